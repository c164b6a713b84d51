"""Sensors over a real sshd and the host's own probe."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk.exceptions import (
    AirflowFailException,
    AirflowSensorTimeout,
    AirflowSkipException,
    TaskDeferralTimeout,
)

from eagle3_airflow.sensors.host_probe import DiskSpaceSensor, GpuIdleSensor
from tests.integration.conftest import CONN_ID, AirflowTask, first_event, until
from tests.integration.openssh import OpenSshServer

Lines = Callable[[], list[str]]


def make_sensor(kind: type, root: Path, *, device: str, **more: Any) -> AirflowTask:
    params = {
        "preset": "demo", "ssh_conn_id": CONN_ID, "root": str(root), "conversations_path": "/data/c.jsonl",
        "target_model": "/models/t", "device": device, "extraction_gpus": 1, "disk_reserve_gb": 0,
    }  # fmt: skip
    return AirflowTask(lambda: kind(task_id="wait", poke_interval=0.3, **more), params)


def test_a_host_without_gpus_passes_only_if_the_run_chose_the_cpu(
    sshd: OpenSshServer, shared_root: Path, log_lines: Lines
) -> None:
    task = make_sensor(GpuIdleSensor, shared_root, device="cpu")
    result, deferral = task.start()
    assert deferral is None
    assert result is not None

    task = make_sensor(GpuIdleSensor, shared_root, device="cuda")
    result, deferral = task.start()
    assert (result, task.deferrals) == (None, ["HostProbeTrigger"])
    before = len(log_lines())

    async def poke_twice() -> bool:
        waiting = asyncio.create_task(first_event(task.trigger(deferral)))
        await until(lambda: len(log_lines()) >= before + 2 or waiting.done())
        is_over = waiting.done()
        waiting.cancel()
        await asyncio.wait([waiting])
        return is_over

    assert asyncio.run(poke_twice()) is False


def test_a_disk_is_judged_by_the_runs_plan_and_without_one_the_sensor_fails_at_once(
    sshd: OpenSshServer, shared_root: Path
) -> None:
    task = make_sensor(DiskSpaceSensor, shared_root, device="cpu")
    with pytest.raises(AirflowFailException, match=r"INVALID_INPUT: .*plan\.json"):
        task.start()


def test_a_host_that_is_away_is_not_ready_and_is_asked_again_when_it_answers(
    sshd: OpenSshServer, shared_root: Path, log_lines: Lines
) -> None:
    task = make_sensor(GpuIdleSensor, shared_root, device="cpu")
    task.start()
    sshd.stop()
    result, deferral = task.start()
    assert result is None

    async def outage() -> Any:
        waiting = asyncio.create_task(first_event(task.trigger(deferral)))
        await until(lambda: any("host unreachable, waiting" in line for line in log_lines()))
        sshd.start()
        return await waiting

    result, deferral = task.resume(deferral, asyncio.run(outage()))
    assert deferral is None
    assert result is not None


@pytest.mark.parametrize(("soft_fail", "kind"), [(False, AirflowSensorTimeout), (True, AirflowSkipException)])
def test_a_timeout_ends_as_a_sensors_timeout_does(
    sshd: OpenSshServer, shared_root: Path, soft_fail: bool, kind: type[Exception]
) -> None:
    task = make_sensor(GpuIdleSensor, shared_root, device="cuda", timeout=60, soft_fail=soft_fail)
    _, deferral = task.start()
    assert deferral.timeout.total_seconds() == 60
    sensor = task.make_operator()
    assert issubclass(TaskDeferralTimeout, Exception)
    with pytest.raises(kind):
        # This is how Airflow resumes a task whose trigger ran out of time.
        sensor.resume_execution(
            "__fail__", {"error": "Trigger timeout"}, {"ti": task.ti, "params": task.params}
        )


def test_a_connection_that_is_missing_fails_the_sensor_at_once(
    sshd: OpenSshServer, shared_root: Path
) -> None:
    task = make_sensor(GpuIdleSensor, shared_root, device="cpu")
    task.params["ssh_conn_id"] = "no_such_host"
    with pytest.raises(AirflowFailException, match="airflow connections add no_such_host"):
        task.start()
