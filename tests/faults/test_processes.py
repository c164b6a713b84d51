"""Processes that die at bad moments: the job's own record says what ran, and how often at once."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle3_tasks.contracts.jobs import JobState, PollBody, SubmitBody
from eagle3_tasks.host import job_folder as jobs
from eagle3_tasks.host import machine
from eagle3_tasks.host.files import read_json, write_json
from eagle3_tasks.host.job_records import StartedRecord
from eagle3_tasks.host.process import ProcessIdentity, identity_of
from tests.faults.conftest import SOAK_ROUNDS
from tests.faults.witness import Witness
from tests.host.job_host import JobHost, log_bytes, pids_in, wait_until
from tests.host.test_agent import running_agent

NUM_ROUNDS = SOAK_ROUNDS or 5


@pytest.fixture
def host(tmp_path: Path) -> Iterator[JobHost]:
    host = JobHost(root=tmp_path / "root")
    yield host
    host.close()


def test_a_runner_killed_at_any_moment_never_leaves_two_commands_and_ends_in_one_success(
    host: JobHost, tmp_path: Path
) -> None:
    chance = random.Random(3)
    for number in range(NUM_ROUNDS):
        witness = Witness(tmp_path / f"round-{number}")
        spec = host.spec(
            # A grandchild of its own session that ignores TERM must be gone as well.
            witness.script("setsid sh -c 'trap \"\" TERM; sleep 0.3' & sleep 0.15"),
            name=f"killed_{number}", grace_seconds=0.1,
        )  # fmt: skip
        host.submit(spec)
        time.sleep(chance.uniform(0.0, 0.6))
        started = read_json(StartedRecord, host.generation(spec.key) / "started.json")
        assert started is not None
        if identity_of(started.runner.pid) == started.runner:
            os.kill(started.runner.pid, signal.SIGKILL)
        before = host.wait_for(spec.key, JobState.LOST, JobState.SUCCEEDED)
        status = host.run(spec)
        assert status.state is JobState.SUCCEEDED
        assert status.generation == (2 if before.state is JobState.LOST else 1)
        witness.check()
        assert len(witness.begun) <= status.generation
        assert f"gen-{status.generation:04d}" in witness.lines("done")


def test_an_agent_killed_at_any_moment_of_a_submit_leads_to_one_execution(
    host: JobHost, tmp_path: Path
) -> None:
    chance = random.Random(4)
    for number in range(NUM_ROUNDS):
        witness = Witness(tmp_path / f"round-{number}")
        spec = host.spec(witness.script("sleep 0.2"), name=f"agent_{number}")
        host.keys.add(spec.key)
        with running_agent(host.root) as agent:
            # It answers once it is up: what is killed is the submit, not Python's start.
            agent.ask("poll", PollBody(jobs=()))
            agent.send("submit", SubmitBody(spec=spec))
            time.sleep(chance.uniform(0.0, 0.15))
            os.kill(agent.process.pid, signal.SIGKILL)
            agent.process.wait(5)
        status = host.run(spec)
        assert status.state is JobState.SUCCEEDED
        witness.check()
        assert witness.begun == [f"gen-{status.generation:04d}"]


def test_what_a_dead_runner_left_in_a_session_of_its_own_is_gone_before_the_next_generation(
    host: JobHost, tmp_path: Path
) -> None:
    witness = Witness(tmp_path / "witness")
    stubborn = "setsid sh -c 'trap \"\" TERM; echo $$ > stubborn; while :; do sleep 0.1; done' &"
    body = f"[ -e ../again ] || {{ {stubborn} while [ ! -s stubborn ]; do sleep 0.02; done; sleep 60; }}"
    spec = host.spec(witness.script(body), grace_seconds=0.3)
    host.submit(spec)
    [grandchild] = pids_in(host.generation(spec.key), "stubborn")
    started = host.started(spec.key)
    assert started.command is not None
    for identity in (started.runner, started.command):
        os.kill(identity.pid, signal.SIGKILL)
    host.wait_for(spec.key, JobState.LOST)
    assert identity_of(grandchild) is not None, "it is nobody's child any more, but lives"
    (host.folder(spec.key) / "again").touch()
    assert host.run(spec).state is JobState.SUCCEEDED
    assert identity_of(grandchild) is None
    witness.check()


@pytest.mark.parametrize("is_other_boot", [False, True])
def test_a_stranger_that_has_the_number_of_the_runner_is_neither_taken_for_it_nor_ended(
    host: JobHost, is_other_boot: bool
) -> None:
    spec = host.spec("true")
    host.run(spec)
    folder = host.generation(spec.key)
    (folder / "exit.json").unlink()
    stranger = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        seen = identity_of(stranger.pid)
        assert seen is not None
        # Only on another boot can number and start time both be the same.
        reused = ProcessIdentity(pid=seen.pid, start_ticks=seen.start_ticks - (0 if is_other_boot else 1))
        record = host.started(spec.key)
        write_json(
            folder / "started.json",
            StartedRecord(
                machine_id="before" if is_other_boot else record.machine_id,
                runner=reused, command=reused, started_at=record.started_at,
            ),
        )  # fmt: skip
        assert host.poll(spec.key).state is JobState.LOST
        host.cancel(spec.key)
        assert host.submit(spec).generation == 2
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


@pytest.mark.parametrize("changed", ["boot", "first process", "namespace"])
def test_a_reboot_and_a_restarted_container_lose_what_ran_and_keep_what_had_succeeded(
    host: JobHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    running = host.spec("exec sleep 60", name="running")
    done = host.spec("true", name="done")
    host.submit(running)
    host.run(done)
    if changed == "boot":
        boot = tmp_path / "boot_id"
        boot.write_text("11111111-2222-3333-4444-555555555555\n")
        monkeypatch.setattr(machine, "_BOOT_ID", boot)
    elif changed == "first process":
        stat = tmp_path / "stat"
        fields = Path("/proc/1/stat").read_text().rpartition(")")[2].split()
        fields[19] = str(int(fields[19]) + 100)
        stat.write_text("1 (a (nasty) name) " + " ".join(fields))
        monkeypatch.setattr(machine, "_FIRST_PROCESS", stat)
    else:
        namespace = tmp_path / "ns"
        namespace.symlink_to("pid:[1234567890]")
        monkeypatch.setattr(machine, "_PID_NAMESPACE", namespace)
    status = host.poll(running.key)
    assert (status.state, status.detail) == (JobState.LOST, jobs.MACHINE_RESTARTED)
    assert host.submit(done).state is JobState.SUCCEEDED


CODES = [0, 2, 10, 126, 127, 137, 255]
USER_CODES = range(10, 17)
SIGNALS = [signal.SIGINT, signal.SIGABRT, signal.SIGTERM]


def test_each_exit_code_and_signal_is_recorded_as_it_was_with_the_last_line_of_the_log(
    host: JobHost,
) -> None:
    codes = range(256) if SOAK_ROUNDS else CODES
    ends = {f"exit {code}": (code, None) for code in codes}
    ends |= {f"kill -{number.value} $$": (None, number.value) for number in SIGNALS}
    specs = {
        end: host.spec(f"printf '%s' 'last words'; {end}", name=f"end_{index}")
        for index, end in enumerate(ends)
    }
    for spec in specs.values():
        host.submit(spec)
    for end, spec in specs.items():
        status = host.wait_for_end(spec.key)
        assert status.exit is not None
        assert (status.exit.exit_code, status.exit.signal) == ends[end]
        assert status.state is (JobState.SUCCEEDED if end == "exit 0" else JobState.FAILED), end
        assert log_bytes(status) == b"last words", end
        if end != "exit 0":
            assert status.exit.error is not None
            # Never cancelled: nobody has asked for that.
            assert status.exit.error.kind == ("user" if status.exit.exit_code in USER_CODES else "node"), end


def test_a_command_that_dies_with_its_runner_before_it_could_write_anything_is_lost_and_runs_again(
    host: JobHost, tmp_path: Path
) -> None:
    witness = Witness(tmp_path / "witness")
    spec = host.spec(witness.script("[ -e ../again ] || kill -KILL $PPID $$"))
    host.submit(spec)
    status = host.wait_for(spec.key, JobState.LOST)
    assert (status.detail, log_bytes(status)) == (jobs.RUNNER_DIED, b"")
    (host.folder(spec.key) / "again").touch()
    assert host.run(spec).generation == 2
    assert wait_until(lambda: witness.begun == ["gen-0001", "gen-0002"])
    witness.check()
