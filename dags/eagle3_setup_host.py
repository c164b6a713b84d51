"""Make a fresh GPU host ready: ROOT's Python environment from the lock file, the release, the checks."""

from __future__ import annotations

from airflow.sdk import DAG

from eagle3_airflow.operators.stage import SetupHostOperator
from eagle3_airflow.params import host_form_params

with DAG(
    dag_id="eagle3_setup_host",
    description="Install what the GPU host needs for eagle3_train",
    doc_md=__doc__,
    schedule=None,
    catchup=False,
    params=host_form_params(),
    tags=["eagle3"],
) as dag:
    setup_host = SetupHostOperator(task_id="setup_host")
    check_host = SetupHostOperator(task_id="check_host", stage="check-host")

    setup_host >> check_host
