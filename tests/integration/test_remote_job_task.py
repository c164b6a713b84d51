"""A whole task over a real sshd: operator, deferral, trigger, agent, runner, report, acknowledgement."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowException, AirflowFailException

from eagle3_airflow.hooks.host_channel import HostChannel
from eagle3_airflow.job_follower import JobFollower
from eagle3_airflow.operators import remote_job as remote_job_operator
from eagle3_airflow.operators.remote_job import RemoteJobOperator
from eagle3_airflow.triggers import remote_job as remote_job_trigger
from eagle3_airflow.triggers.host_trigger import HostTrigger
from eagle3_tasks.contracts.jobs import JobStatus, PollItem
from tests.integration.conftest import CONN_ID, AirflowTask, count, first_event, make_task, until
from tests.integration.openssh import OpenSshServer, make_key

Lines = Callable[[], list[str]]


def wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)


def test_a_job_runs_once_its_log_and_report_arrive_and_a_clear_runs_it_again(
    sshd: OpenSshServer, shared_root: Path, tmp_path: Path, log_lines: Lines
) -> None:
    counter = tmp_path / "counter"
    script = (
        f"printf x >> {counter}; echo zwölf; sleep 0.3; "
        "echo '{\"rows\": 3}' > $EAGLE3_GENERATION_FOLDER/report.json; printf 'last line'"
    )
    task = make_task(shared_root, script)
    assert task.run() == {"rows": 3}
    assert task.deferrals == ["RemoteJobTrigger"]
    assert task.ti.xcom == {"report": {"rows": 3}}
    lines = log_lines()
    assert [lines.count(line) for line in ("zwölf", "last line")] == [1, 1]
    assert sum("job succeeded" in line for line in lines) == 1
    assert not any("Authentication" in line or "Connected (version" in line for line in lines)

    # Airflow crashed before it recorded the success: the next attempt gets the same report.
    task.next_attempt()
    assert task.run() == {"rows": 3}
    assert count(counter) == 1

    # Recorded and acknowledged: a person's clear runs it anew.
    task.succeed()
    task.next_attempt()
    assert task.run() == {"rows": 3}
    assert count(counter) == 2


def test_an_attempt_that_follows_a_crash_joins_the_running_job(
    sshd: OpenSshServer, shared_root: Path, tmp_path: Path
) -> None:
    counter, gate = tmp_path / "counter", tmp_path / "gate"
    task = make_task(shared_root, f"printf x >> {counter}; while [ ! -e {gate} ]; do sleep 0.05; done")
    task.start()
    task.next_attempt()
    _, deferral = task.start()
    gate.touch()
    result, deferral = task.resume(deferral, asyncio.run(first_event(task.trigger(deferral))))
    assert (result, deferral, count(counter)) == ({}, None, 1)


def test_a_failed_job_says_why_and_where_its_log_is(
    sshd: OpenSshServer, shared_root: Path, log_lines: Lines
) -> None:
    task = make_task(shared_root, "echo Traceback; echo 'ValueError: the reason' >&2; exit 3")
    with pytest.raises(AirflowException, match=r"output\.log") as raised:
        task.run()
    assert not isinstance(raised.value, AirflowFailException), "a node's problem is retried"
    assert "ValueError: the reason" in log_lines()


def test_a_users_problem_ends_the_retries(sshd: OpenSshServer, shared_root: Path) -> None:
    record = '{"code": "INVALID_INPUT", "kind": "user", "message": "c.jsonl is empty."}'
    task = make_task(shared_root, f"echo '{record}' > $EAGLE3_GENERATION_FOLDER/error.json; exit 11")
    with pytest.raises(AirflowFailException, match=r"INVALID_INPUT: c.jsonl is empty.*output.log"):
        task.run()


def test_a_value_of_any_content_reaches_the_command_byte_for_byte(
    sshd: OpenSshServer, shared_root: Path, tmp_path: Path
) -> None:
    nasty = "x; touch PWNED $(id) `id` {{ 1+1 }} --flag=a b'\"c\n-o ProxyCommand=id é"

    def make() -> RemoteJobOperator:
        return RemoteJobOperator(
            task_id="t", ssh_conn_id=CONN_ID, root=str(shared_root), poll_seconds=0.1, stdin=nasty,
            argv=["/bin/sh", "-c", 'cd "$2"; printf %s "$1" > argv; cat > stdin; printf %s "$V" > env',
                  "sh", nasty, str(tmp_path)], environment={"V": nasty},
        )  # fmt: skip

    task = AirflowTask(make)
    task.ti.run_id = "../../etc; touch PWNED {{ 1+1 }}"
    task.run()
    assert {(tmp_path / name).read_text() for name in ("argv", "stdin", "env")} == {nasty}
    assert not [*tmp_path.rglob("PWNED"), *shared_root.rglob("PWNED")]
    assert {path.name for path in shared_root.iterdir()} <= {"jobs", "releases", "slots"}


def test_a_triggerer_that_dies_leaves_the_job_and_the_next_one_goes_on_with_the_log(
    sshd: OpenSshServer, shared_root: Path, tmp_path: Path, log_lines: Lines
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    wait = "while [ ! -e {} ]; do sleep 0.05; done"
    script = f"echo early; {wait.format(first)}; echo middle; {wait.format(second)}; echo late"
    task = make_task(shared_root, script)
    _, deferral = task.start()

    async def die() -> None:
        waiting = asyncio.create_task(first_event(task.trigger(deferral)))
        await until(lambda: "early" in log_lines())
        first.touch()
        await until(lambda: "middle" in log_lines())
        waiting.cancel()
        await asyncio.wait([waiting])

    asyncio.run(die())
    second.touch()
    result, _ = task.resume(deferral, asyncio.run(first_event(task.trigger(deferral))))
    lines = log_lines()
    assert result == {}
    # What a later poll confirmed never comes again; only the last piece may.
    assert lines.count("early") == 1
    assert lines.count("middle") in (1, 2)
    assert lines.count("late") == 1


@pytest.mark.parametrize(("states", "is_cancelled"), [(["failed"], True), ([], True), (["deferred"], False)])
def test_a_users_mark_cancels_the_job_and_a_move_to_another_triggerer_does_not(
    sshd: OpenSshServer,
    shared_root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    states: list[str],
    is_cancelled: bool,
) -> None:
    monkeypatch.setattr(remote_job_trigger, "task_states", lambda attempt: states)
    started, gate = tmp_path / "started", tmp_path / "gate"
    task = make_task(shared_root, f"touch {started}; while [ ! -e {gate} ]; do sleep 0.05; done")
    _, deferral = task.start()
    wait_for(started.exists)
    asyncio.run(kill_impatiently(task.trigger(deferral)))
    if is_cancelled:
        with pytest.raises(AirflowFailException, match=r"CANCELLED: .*a user stopped task instance"):
            task.resume(deferral, asyncio.run(first_event(task.trigger(deferral))))
    else:
        gate.touch()
        result, _ = task.resume(deferral, asyncio.run(first_event(task.trigger(deferral))))
        assert result == {}


async def kill_impatiently(trigger: Any) -> None:
    """Cancel ``on_kill`` again and again while it works, as Airflow's triggerer does."""
    killing = asyncio.create_task(trigger.on_kill())
    for _ in range(3):
        await asyncio.sleep(0)
        killing.cancel()
    await asyncio.wait([killing])
    assert killing.cancelled()
    while remote_job_trigger._cancelling:
        await asyncio.wait(remote_job_trigger._cancelling)


def test_a_cleared_task_that_joined_its_stopping_job_submits_anew(
    sshd: OpenSshServer, shared_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_job_trigger, "task_states", lambda attempt: ["queued"])
    counter, gate = tmp_path / "counter", tmp_path / "gate"
    task = make_task(shared_root, f"printf x >> {counter}; while [ ! -e {gate} ]; do sleep 0.05; done")
    _, deferral = task.start()
    wait_for(counter.exists)
    old_trigger = task.trigger(deferral)
    old_trigger.task_instance = type(task.ti)(task_id="t")
    task.next_attempt()
    _, deferral = task.start()
    asyncio.run(old_trigger.on_kill())
    result, deferral = task.resume(deferral, asyncio.run(first_event(task.trigger(deferral))))
    assert result is None
    gate.touch()
    result, _ = task.resume(deferral, asyncio.run(first_event(task.trigger(deferral))))
    assert (result, count(counter)) == ({}, 2)


def test_an_operator_that_a_user_kills_cancels_and_one_whose_worker_ends_does_not(
    sshd: OpenSshServer, shared_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, gate = tmp_path / "started", tmp_path / "gate"
    task = make_task(shared_root, f"touch {started}; while [ ! -e {gate} ]; do sleep 0.05; done")
    _, deferral = task.start()
    wait_for(started.exists)
    monkeypatch.setattr(remote_job_operator, "task_states", lambda attempt: ["running"])
    task.operator.on_kill()
    status = asyncio.run(poll_once(task, deferral))
    assert status == "RUNNING"
    monkeypatch.setattr(remote_job_operator, "task_states", lambda attempt: ["failed"])
    task.operator.on_kill()
    event = asyncio.run(first_event(task.trigger(deferral)))
    assert event["status"]["state"] == "CANCELLED"


async def poll_once(task: AirflowTask, deferral: Any) -> str:
    trigger = task.trigger(deferral)
    async with HostChannel.lease(trigger.address) as channel:
        status = await channel.poll(PollItem(key=trigger.key), after_seconds=0)
        return status.state.value


@pytest.mark.parametrize(("seconds", "expected"), [(0.0, [1, 2, 3, 3]), (1000.0, [1, 3])])
def test_progress_is_written_when_it_changes_not_too_often_and_at_the_end(
    sshd: OpenSshServer, shared_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    seconds: float, expected: list[int],
) -> None:  # fmt: skip
    written: list[dict[str, Any]] = []
    polled = JobFollower.take

    async def aset(**values: Any) -> None:
        written.append(values)

    def take(self: JobFollower, status: JobStatus) -> list[str]:
        if status.progress is not None:
            (tmp_path / f"seen{status.progress.done}").touch()
        return polled(self, status)

    monkeypatch.setattr(remote_job_trigger.XCom, "aset", aset)
    monkeypatch.setattr(remote_job_trigger, "PROGRESS_SECONDS", seconds)
    monkeypatch.setattr(JobFollower, "take", take)
    record = '{"stage": "s", "done": %d, "total": 3, "unit": "rows", "seconds": 1.0}'
    script = (
        f"cd $EAGLE3_GENERATION_FOLDER; for i in 1 2 3; do printf '{record}' $i > p && mv p progress.json; "
        f"while [ ! -e {tmp_path}/seen$i ]; do sleep 0.05; done; done"
    )
    make_task(shared_root, script).run()
    assert [values["value"]["done"] for values in written] == expected
    assert [values["value"]["state"] for values in written] == ["RUNNING"] * (len(expected) - 1) + [
        "SUCCEEDED"
    ]
    assert {values["key"] for values in written} == {"progress"}
    assert (written[0]["task_id"], written[0]["map_index"]) == ("t", -1)


def test_a_changed_host_key_ends_the_wait_with_the_text_that_fixes_it(
    sshd: OpenSshServer, shared_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = tmp_path / "gate"
    task = make_task(shared_root, f"while [ ! -e {gate} ]; do sleep 0.05; done")
    _, deferral = task.start()
    make_key(tmp_path / "other")
    other = " ".join((tmp_path / "other.pub").read_text().split()[:2])
    monkeypatch.setenv(f"AIRFLOW_CONN_{CONN_ID.upper()}", sshd.connection(host_key=other))
    event = asyncio.run(first_event(task.trigger(deferral)))
    gate.touch()
    with pytest.raises(AirflowFailException, match=f"ssh-keyscan -p {sshd.port} 127.0.0.1"):
        task.resume(deferral, event)


def test_a_mapped_command_is_one_job_a_map_index(sshd: OpenSshServer, shared_root: Path) -> None:
    first, second = (
        make_task(shared_root, "true", task_id="mapped"),
        make_task(shared_root, "true", task_id="mapped"),
    )
    second.ti.run_id = first.ti.run_id
    first.ti.map_index, second.ti.map_index = 0, 1
    first.run()
    second.run()
    keys = {next(iter(task.ti.xcom)) for task in (first, second)}
    assert keys == {"report"}
    assert len(list((shared_root / "jobs").glob("mapped_*"))) == 2


def test_an_event_never_fires_before_the_workers_own_end_is_noticed(
    sshd: OpenSshServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Quick(HostTrigger):
        def arguments(self) -> dict[str, Any]:
            return {}

        async def wait(self) -> dict[str, Any]:
            return {"at": time.monotonic()}

    monkeypatch.setattr(HostTrigger, "settle_seconds", 0.5)
    began = time.monotonic()
    event = asyncio.run(first_event(Quick(ssh_conn_id="x", root="/x", python="", release="")))
    assert time.monotonic() - began >= 0.5
    assert event["at"] - began < 0.4
