# A GPU host: sshd and the Python environment of the stages. No Airflow, and none of the
# project's code: the orchestrator ships that, as a release under ROOT.
#
# torch's wheels bring CUDA's libraries, the NVIDIA container runtime the driver. Any base with
# apt and Python 3.11 or later will do; on hosts without a GPU, debian:bookworm-slim.
ARG BASE=nvidia/cuda:13.0.2-base-ubuntu24.04

FROM ${BASE} AS python
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates python3 \
    && rm -rf /var/lib/apt/lists/*

FROM python AS environment
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3-venv \
    && rm -rf /var/lib/apt/lists/*
# As in the orchestrator's image.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
COPY eagle3_tasks/host_requirements.lock /source/
RUN python3 -m venv /opt/eagle3/env \
    && /opt/eagle3/env/bin/pip install --no-cache-dir --disable-pip-version-check \
        -r /source/host_requirements.lock

FROM python
# The package makes host keys as it is installed. A key in an image is everyone's key.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends openssh-server \
    && rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_*
RUN useradd --uid 10001 --create-home --shell /bin/sh eagle3 \
    && install -d -o eagle3 -g eagle3 -m 0700 /var/lib/eagle3-ssh /data /data/eagle3 \
    && install -d -o eagle3 -g eagle3 -m 0755 /exchange/client /exchange/host
COPY --from=environment /opt/eagle3/env /opt/eagle3/env
COPY docker/gpu_host_start.sh docker/sshd_config /opt/eagle3/
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER eagle3
EXPOSE 2222
ENTRYPOINT ["sh", "/opt/eagle3/gpu_host_start.sh"]
