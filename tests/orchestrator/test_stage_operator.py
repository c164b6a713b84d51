"""What a stage's task asks of the host."""

from __future__ import annotations

import types
import uuid
from typing import Any, get_args

import pytest
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException

from eagle3_airflow.operators.remote_job import RemoteJob, RemoteJobOperator
from eagle3_airflow.operators.stage import SetupHostOperator, StageOperator, host_address
from eagle3_airflow.params import settings_from_params
from eagle3_airflow.sensors.host_probe import GpuIdleSensor
from eagle3_tasks.contracts.errors import InvalidSettings, RequestRefused
from eagle3_tasks.contracts.jobs import check_job_key, check_run_key
from eagle3_tasks.contracts.rows import RowRange
from eagle3_tasks.contracts.stages import Stage, parse_stage_spec

PARAMS = {
    "preset": "demo", "ssh_conn_id": "gpu", "root": "/data/eagle3", "conversations_path": "/data/c.jsonl",
    "target_model": "$(id); {{ 1+1 }}", "shard_slots": 3, "poll_seconds": 7, "orphan_minutes": 30,
}  # fmt: skip


def context(run_id: str = "r", **params: Any) -> Any:
    ti = types.SimpleNamespace(id=uuid.uuid4(), dag_id="d", run_id=run_id, task_id="t", map_index=-1)
    return {"ti": ti, "params": {**PARAMS, **params}}


def plan(rows: list[Any] | None = None, run_id: str = "r", **params: Any) -> RemoteJob:
    return StageOperator(task_id="extract", stage="extract", rows=rows).plan_job(context(run_id, **params))


def test_the_spec_goes_down_on_standard_input_and_the_command_line_is_constant() -> None:
    job = plan([150, 300, ""])
    assert job.spec.argv == ("@python", "-m", "eagle3_tasks.commands.main", "extract", "--spec", "-")
    spec = parse_stage_spec(job.spec.stdin, where="spec")
    assert spec.settings == settings_from_params(PARAMS)
    assert spec.settings.target.target_model == "$(id); {{ 1+1 }}"
    assert spec.rows == RowRange(start=150, stop=300)
    assert (job.poll_seconds, job.spec.orphan_minutes) == (7, 30)
    assert (job.address.ssh_conn_id, job.address.root) == ("gpu", "/data/eagle3")


def test_every_attempt_at_a_shard_names_one_job_and_other_shards_and_runs_others() -> None:
    key = plan([150, 300, ""]).spec.key
    assert plan([150, 300, "gpu"]).spec.key == key
    others = {plan([0, 150, ""]).spec.key, plan(None).spec.key, plan([150, 300, ""], run_id="r2").spec.key}
    assert len(others | {key}) == 4


@pytest.mark.parametrize(
    "run_id", ["..", "-rf", "~", "a/b/../../c", "x; touch PWNED", "{{ 1+1 }}", "é" * 300, "\n"]
)
def test_a_run_id_of_any_content_names_a_folder_inside_root(run_id: str) -> None:
    job = plan([0, 1, ""], run_id=run_id)
    assert check_job_key(job.spec.key)
    assert check_run_key(job.spec.run_key)


def test_shards_queue_on_the_host_in_row_order() -> None:
    slots = plan([150, 300, ""]).spec.slots
    assert slots is not None
    assert (slots.name, slots.count, slots.order) == ("shards", 3, 150)
    assert plan(None).spec.slots is None


def test_a_report_cannot_lead_to_another_connection() -> None:
    with pytest.raises(RequestRefused, match="somewhere_else"):
        plan([0, 150, "somewhere_else"])


@pytest.mark.parametrize("rows", [[0, 150], [0, "150", ""], [150, 150, ""], [True, 5, ""]])
def test_a_shard_of_another_form_is_refused(rows: list[Any]) -> None:
    with pytest.raises(RequestRefused):
        plan(rows)


def test_only_shards_are_returned_where_tasks_are_mapped_over_them() -> None:
    report = {"shards": [[0, 150, ""]], "num_rows": 150}
    assert StageOperator(task_id="p", stage="plan", returns="shards").value_of(report) == [[0, 150, ""]]
    assert StageOperator(task_id="p", stage="plan").value_of(report) == report
    with pytest.raises(RequestRefused, match="no shards"):
        StageOperator(task_id="p", stage="plan", returns="shards").value_of({})


def test_settings_that_cannot_work_fail_before_anything_is_asked_of_the_host() -> None:
    with pytest.raises(InvalidSettings, match="root is empty"):
        plan(None, root="")
    with pytest.raises(AirflowFailException, match="INVALID_SETTINGS: root is empty"):
        GpuIdleSensor(task_id="t", purpose="train")._spec(context(root=""))


def test_answers_from_the_dataset_skip_the_wait_for_gpus() -> None:
    sensor = GpuIdleSensor(task_id="t", purpose="regenerate")
    with pytest.raises(AirflowSkipException, match="no GPU is needed"):
        sensor._spec(context(answers="dataset"))
    assert sensor._spec(context(answers="regenerate")).purpose == "regenerate"


def test_a_host_is_set_up_by_one_job_of_its_own() -> None:
    task: Any = {
        "ti": context()["ti"],
        "params": {"ssh_conn_id": "gpu", "root": "/data/eagle3", "python": None},
    }
    job = SetupHostOperator(task_id="setup_host").plan_job(task)
    assert job.spec.argv[-3:] == ("setup-host", "--spec", "-")
    assert parse_stage_spec(job.spec.stdin, where="spec").settings.host.root == "/data/eagle3"


def test_a_host_is_checked_with_the_interpreter_that_its_set_up_made() -> None:
    task: Any = {
        "ti": context()["ti"],
        "params": {"ssh_conn_id": "gpu", "root": "/data/eagle3", "python": "/usr/bin/python3.12",
                   "device": "cpu", "extraction_gpus": 2},
    }  # fmt: skip
    made = SetupHostOperator(task_id="setup_host").plan_job(task)
    checked = SetupHostOperator(task_id="check_host", stage="check-host").plan_job(task)
    assert (made.address.python, checked.address.python) == ("/usr/bin/python3.12", "")
    assert checked.spec.argv[-3:] == ("check-host", "--spec", "-")
    host = parse_stage_spec(checked.spec.stdin, where="spec").settings.host
    assert (host.device, host.extraction_gpus) == ("cpu", 2)


def test_only_the_first_stages_make_a_root_that_is_not_there() -> None:
    making = {
        stage
        for stage in get_args(Stage)
        if StageOperator(task_id="t", stage=stage).plan_job(context()).address.make_root
    }
    assert making == {"preflight", "setup-host"}
    assert not host_address(settings_from_params(PARAMS)).make_root, "a sensor only asks"


@pytest.mark.parametrize("make_root", [True, False])
def test_a_command_of_ones_own_makes_its_root_unless_told_otherwise(make_root: bool) -> None:
    more: dict[str, Any] = {} if make_root else {"make_root": False}
    task = RemoteJobOperator(task_id="t", ssh_conn_id="gpu", root="/data", argv=["true"], **more)
    assert task.plan_job(context()).address.make_root is make_root
