"""A task whose host is away, or tells nothing: it waits without a retry, and not for ever."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowException

from eagle3_airflow.hooks.host_channel import HostChannel, JobUnknown
from eagle3_airflow.retries import MAX_OUTAGE_HOURS
from eagle3_airflow.triggers import outage
from eagle3_tasks.contracts.errors import HostUnreachable
from eagle3_tasks.contracts.jobs import JobStatus, PollItem
from tests.integration.conftest import count, first_event, make_task, until
from tests.integration.openssh import OpenSshServer

Lines = Callable[[], list[str]]


def test_an_unreachable_host_is_waited_for_without_a_retry_and_with_two_lines(
    sshd: OpenSshServer, shared_root: Path, tmp_path: Path, log_lines: Lines
) -> None:
    counter = tmp_path / "counter"
    task = make_task(shared_root, f"printf x >> {counter}")
    sshd.stop()
    _, deferral = task.start()
    assert task.deferrals == ["HostWaitTrigger"]

    async def outage() -> Any:
        waiting = asyncio.create_task(first_event(task.trigger(deferral)))
        await until(lambda: any("host unreachable, waiting" in line for line in log_lines()))
        await asyncio.sleep(0.5)
        assert not waiting.done()
        sshd.start()
        return await waiting

    event = asyncio.run(outage())
    result, deferral = task.resume(deferral, event)
    while deferral is not None:
        result, deferral = task.resume(deferral, asyncio.run(first_event(task.trigger(deferral))))
    assert (result, count(counter)) == ({}, 1)
    assert sum("host unreachable, waiting" in line for line in log_lines()) == 1


def test_submits_that_fail_again_and_again_are_one_outage_and_it_has_an_end(
    sshd: OpenSshServer, shared_root: Path
) -> None:
    task = make_task(shared_root, "true")
    sshd.stop()
    began = time.time()
    _, deferral = task.start()
    since = deferral.trigger.serialize()[1]["since"]
    assert began <= since <= time.time()
    earlier = since - 3600
    _, deferral = task.resume(deferral, {"attempt": 1, "since": earlier})
    assert deferral.trigger.serialize()[1]["since"] == earlier
    assert deferral.trigger.serialize()[1]["attempt"] == 2
    too_early = since - MAX_OUTAGE_HOURS * 3600 - 1
    with pytest.raises(AirflowException, match="unreachable for 48 hours"):
        task.resume(deferral, {"attempt": 1, "since": too_early})


@pytest.mark.parametrize(
    ("kind", "message"),
    [(JobUnknown, "could not tell .* how the job is"), (HostUnreachable, "has been unreachable")],
)
def test_a_host_that_answers_but_never_about_the_job_is_given_up_in_the_end(
    sshd: OpenSshServer, shared_root: Path, monkeypatch: pytest.MonkeyPatch,
    kind: type[HostUnreachable], message: str,
) -> None:  # fmt: skip
    task = make_task(shared_root, "sleep 0.5")
    _, deferral = task.start()

    async def poll(_channel: HostChannel, _item: PollItem, *, after_seconds: float) -> JobStatus:
        await asyncio.sleep(after_seconds + 0.01)
        raise kind("DISK_PROBLEM: input/output error")

    monkeypatch.setattr(HostChannel, "poll", poll)
    monkeypatch.setattr(outage, "MAX_OUTAGE_HOURS", 0.5 / 3600)

    async def give_up() -> Any:
        return await asyncio.wait_for(first_event(task.trigger(deferral)), 5)

    with pytest.raises(AirflowException, match=f"HOST_UNREACHABLE: .*{message}.*input/output error"):
        task.resume(deferral, asyncio.run(give_up()))


def test_a_trigger_never_makes_a_root_that_has_vanished(
    sshd: OpenSshServer, root: Path, log_lines: Lines
) -> None:
    task = make_task(root, "sleep 1")
    _, deferral = task.start()
    assert root.exists(), "a standalone job may make its ROOT"
    root.rename(root.with_name("unmounted"))
    asyncio.run(first_event(task.trigger(deferral)))
    assert not root.exists()


def test_an_outage_while_the_job_runs_loses_no_line_and_starts_nothing(
    sshd: OpenSshServer, shared_root: Path, tmp_path: Path, log_lines: Lines
) -> None:
    counter = tmp_path / "counter"
    script = f"printf x >> {counter}; for i in $(seq 20); do echo line $i; sleep 0.1; done"
    task = make_task(shared_root, script)
    _, deferral = task.start()

    async def outage() -> Any:
        waiting = asyncio.create_task(first_event(task.trigger(deferral)))
        await until(lambda: "line 3" in log_lines())
        sshd.cut_connections()
        sshd.stop()
        await until(lambda: any("host unreachable, waiting" in line for line in log_lines()))
        sshd.start()
        return await waiting

    result, _ = task.resume(deferral, asyncio.run(outage()))
    lines = log_lines()
    assert result == {}
    assert [min(lines.count(f"line {number}"), 1) for number in range(1, 21)] == [1] * 20
    assert sum("host unreachable, waiting" in line for line in lines) == 1
    assert sum("host answers again" in line for line in lines) == 1
    assert count(counter) == 1
