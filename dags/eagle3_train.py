"""From conversations and a target model to an EAGLE-3 draft model. Order only; the work is in the stages."""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG, TriggerRule

from eagle3_airflow.operators.stage import MAX_SHARDS_AT_ONCE, StageOperator
from eagle3_airflow.params import form_params
from eagle3_airflow.retries import MAX_RETRY_DELAY
from eagle3_airflow.sensors.host_probe import DiskSpaceSensor, GpuIdleSensor

with DAG(
    dag_id="eagle3_train",
    description="Make an EAGLE-3 draft model of a target model on a GPU host",
    doc_md=__doc__,
    schedule=None,
    catchup=False,
    params=form_params(),
    # The operators' other defaults reach mapped tasks by themselves; Airflow leaves this one out.
    default_args={"max_retry_delay": MAX_RETRY_DELAY},
    tags=["eagle3"],
    dagrun_timeout=timedelta(days=30),
) as dag:
    preflight = StageOperator(task_id="preflight", stage="preflight")
    read_conversations = StageOperator(
        task_id="read_conversations", stage="read-conversations", returns="shards"
    )
    wait_for_gpus_to_regenerate = GpuIdleSensor(task_id="wait_for_gpus_to_regenerate", purpose="regenerate")
    regenerate = StageOperator.partial(
        task_id="regenerate", stage="regenerate", max_active_tis_per_dagrun=MAX_SHARDS_AT_ONCE
    ).expand(rows=read_conversations.output)
    # Answers that come from the dataset skip the two tasks before this one.
    prepare_data = StageOperator(
        task_id="prepare_data", stage="prepare-data", trigger_rule=TriggerRule.NONE_FAILED
    )
    plan = StageOperator(task_id="plan", stage="plan", returns="shards")
    wait_for_disk = DiskSpaceSensor(task_id="wait_for_disk")
    wait_for_gpus = GpuIdleSensor(task_id="wait_for_gpus", purpose="extract")
    extract = StageOperator.partial(
        task_id="extract", stage="extract", max_active_tis_per_dagrun=MAX_SHARDS_AT_ONCE
    ).expand(rows=plan.output)
    verify = StageOperator(task_id="verify", stage="verify")
    map_vocab = StageOperator(task_id="map_vocab", stage="map-vocab")
    wait_for_gpus_to_train = GpuIdleSensor(task_id="wait_for_gpus_to_train", purpose="train")
    train = StageOperator(task_id="train", stage="train")
    export_candidate = StageOperator(task_id="export_candidate", stage="export-candidate")
    evaluate = StageOperator(task_id="evaluate", stage="evaluate")
    publish = StageOperator(task_id="publish", stage="publish")

    preflight >> read_conversations >> wait_for_gpus_to_regenerate >> regenerate >> prepare_data
    prepare_data >> plan >> wait_for_disk >> wait_for_gpus >> extract >> verify >> map_vocab
    map_vocab >> wait_for_gpus_to_train >> train >> export_candidate >> evaluate >> publish
