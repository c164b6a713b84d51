# The orchestrator: Airflow and the DAGs. No torch, no numpy, no GPU.
ARG BASE=debian:bookworm-slim

FROM ${BASE} AS python
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates python3 \
    && rm -rf /var/lib/apt/lists/*

FROM python AS environment
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3-venv \
    && rm -rf /var/lib/apt/lists/*
# pip's own variables, for a package index or a folder of wheels of your own. They stay in this
# stage: the finished image's history does not show them.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
WORKDIR /source
COPY locks/orchestrator.txt locks/
RUN python3 -m venv /opt/eagle3/env \
    && /opt/eagle3/env/bin/pip install --no-cache-dir --disable-pip-version-check -r locks/orchestrator.txt
COPY pyproject.toml README.md LICENSE ./
COPY eagle3_tasks eagle3_tasks
COPY plugins plugins
# Builds the wheel and installs it, entry points included. The dependencies are the lock's alone.
RUN /opt/eagle3/env/bin/pip install --no-cache-dir --disable-pip-version-check --no-deps .

FROM python
# One uid in both images: files of a shared volume have the same owner on both sides.
# The empty folders give fresh named volumes their owner and mode.
RUN useradd --uid 10001 --create-home --shell /bin/sh eagle3 \
    && install -d -o eagle3 -g eagle3 -m 0700 /var/lib/eagle3 \
    && install -d -o eagle3 -g eagle3 -m 0755 /exchange/client /exchange/host
COPY --from=environment /opt/eagle3/env /opt/eagle3/env
COPY dags /opt/eagle3/dags
COPY docker/orchestrator_init.py /opt/eagle3/
ENV PATH=/opt/eagle3/env/bin:/usr/local/bin:/usr/bin:/bin \
    AIRFLOW_HOME=/var/lib/eagle3/airflow \
    AIRFLOW__CORE__DAGS_FOLDER=/opt/eagle3/dags \
    AIRFLOW__CORE__LOAD_EXAMPLES=False \
    AIRFLOW__CORE__EXECUTOR=LocalExecutor \
    AIRFLOW__CORE__PARALLELISM=8 \
    AIRFLOW__CORE__DAGS_ARE_PAUSED_AT_CREATION=False \
    AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS=admin:admin \
    AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE=/var/lib/eagle3/private/passwords.json \
    AIRFLOW__CORE__FERNET_KEY_CMD="cat /var/lib/eagle3/private/fernet_key" \
    AIRFLOW__API__SECRET_KEY_CMD="cat /var/lib/eagle3/private/api_secret_key" \
    AIRFLOW__API_AUTH__JWT_SECRET_CMD="cat /var/lib/eagle3/private/jwt_secret" \
    AIRFLOW__API__HOST=0.0.0.0 \
    AIRFLOW__API__PORT=8080 \
    AIRFLOW__API__WORKERS=1 \
    AIRFLOW__SECRETS__BACKEND=airflow.secrets.local_filesystem.LocalFilesystemBackend \
    AIRFLOW__SECRETS__BACKEND_KWARGS="{\"connections_file_path\": \"/var/lib/eagle3/private/connections.json\"}" \
    AIRFLOW__LOGGING__NAMESPACE_LEVELS="asyncssh=WARNING paramiko=WARNING"
USER eagle3
WORKDIR /var/lib/eagle3
ENTRYPOINT ["airflow"]
CMD ["version"]
