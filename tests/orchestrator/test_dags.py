"""The DAGs as Airflow reads them."""

from __future__ import annotations

import itertools
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from airflow.dag_processing.dagbag import BundleDagBag
from airflow.serialization.serialized_objects import DagSerialization

from eagle3_airflow.operators.remote_job import acknowledge_job
from eagle3_airflow.operators.stage import StageOperator
from eagle3_airflow.params import form_params
from eagle3_airflow.sensors.host_probe import HostProbeSensor

DAGS = Path(__file__).parents[2] / "dags"
ORDER = [
    "preflight", "read_conversations", "wait_for_gpus_to_regenerate", "regenerate", "prepare_data", "plan",
    "wait_for_disk", "wait_for_gpus", "extract", "verify", "map_vocab", "wait_for_gpus_to_train", "train",
    "export_candidate", "evaluate", "publish",
]  # fmt: skip


@pytest.fixture(scope="module")
def dags() -> dict[str, Any]:
    bag = BundleDagBag(str(DAGS), bundle_path=DAGS, bundle_name="dags-folder")
    assert bag.import_errors == {}
    return dict(bag.dags)


def test_the_stages_stand_in_the_order_of_the_design(dags: dict[str, Any]) -> None:
    dag = dags["eagle3_train"]
    assert [task.task_id for task in dag.topological_sort()] == ORDER
    for before, after in itertools.pairwise(ORDER):
        assert after in dag.get_task(before).downstream_task_ids


def test_a_host_is_checked_after_its_set_up(dags: dict[str, Any]) -> None:
    dag = dags["eagle3_setup_host"]
    assert [task.task_id for task in dag.topological_sort()] == ["setup_host", "check_host"]
    assert dag.get_task("setup_host").downstream_task_ids == {"check_host"}


def test_answers_from_the_dataset_do_not_stop_the_run(dags: dict[str, Any]) -> None:
    assert dags["eagle3_train"].get_task("prepare_data").trigger_rule == "none_failed"


@pytest.mark.parametrize(("task_id", "upstream"), [("regenerate", "read_conversations"), ("extract", "plan")])
def test_shards_are_mapped_named_and_bounded(dags: dict[str, Any], task_id: str, upstream: str) -> None:
    task = dags["eagle3_train"].get_task(task_id)
    assert task.is_mapped
    assert task.map_index_template == "{{ task.shard_name }}"
    largest = form_params().get_param("shard_slots").schema["maximum"]
    assert task.max_active_tis_per_dagrun == largest == 64, "the setting alone says how many run at once"
    assert dags["eagle3_train"].get_task(upstream).returns == "shards"
    unmapped = task.unmap({"rows": [150, 300, ""]})
    assert isinstance(unmapped, StageOperator)
    assert unmapped.shard_name == "rows_000150-000300"


def test_every_task_retries_ten_times_and_waits_up_to_half_an_hour(dags: dict[str, Any]) -> None:
    for dag in dags.values():
        for task in dag.tasks:
            assert (task.retries, task.retry_delay, task.max_retry_delay) == (
                10, timedelta(minutes=1), timedelta(minutes=30)
            )  # fmt: skip
            assert task.retry_exponential_backoff == 2.0


def test_every_job_is_acknowledged_after_success_and_only_then(dags: dict[str, Any]) -> None:
    for dag in dags.values():
        for task in dag.tasks:
            operator = task.unmap({"rows": [0, 1, ""]}) if task.is_mapped else task
            callbacks = list(operator.on_success_callback)
            assert callbacks.count(acknowledge_job) == (not isinstance(operator, HostProbeSensor))


def test_nothing_of_a_spec_is_rendered_by_jinja(dags: dict[str, Any]) -> None:
    for dag in dags.values():
        for task in dag.tasks:
            assert list(task.template_fields) == []


def test_the_dags_survive_serialization(dags: dict[str, Any]) -> None:
    for dag in dags.values():
        again = DagSerialization.from_dict(DagSerialization.to_dict(dag))
        assert set(again.task_dict) == set(dag.task_dict)


def test_a_callback_of_ones_own_is_kept_before_the_acknowledgement() -> None:
    def mine(context: Any) -> None: ...

    task = StageOperator(task_id="plan", stage="plan", on_success_callback=mine, retries=2)
    assert list(task.on_success_callback) == [mine, acknowledge_job]
    assert task.retries == 2


def test_a_stage_that_does_not_exist_is_refused_when_the_dag_is_read() -> None:
    wrong: Any = "extrakt"
    with pytest.raises(ValueError, match="extrakt"):
        StageOperator(task_id="x", stage=wrong)
