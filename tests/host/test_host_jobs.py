"""Remote jobs on the host: one execution, whatever dies; real processes throughout."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle3_tasks.contracts.errors import InvalidSettings
from eagle3_tasks.contracts.jobs import AGENT_PYTHON, JobState, SlotRule
from eagle3_tasks.host import job_folder as jobs
from eagle3_tasks.host.process import identity_of, is_alive
from tests.host.job_host import JobHost, log_bytes, pids_in, wait_until


@pytest.fixture
def host(tmp_path: Path) -> Iterator[JobHost]:
    host = JobHost(root=tmp_path / "root")
    yield host
    host.close()


def test_a_command_that_ends_well_hands_over_its_report_and_its_whole_log(host: JobHost):
    script = """echo one; printf two >&2; echo '{"rows": 7}' > "$EAGLE3_GENERATION_FOLDER/report.json"; pwd"""
    spec = host.spec(script)
    assert host.poll(spec.key).state is JobState.ABSENT
    assert host.submit(spec).generation == 1
    status = host.wait_for_end(spec.key)
    assert (status.state, status.generation, status.report) == (JobState.SUCCEEDED, 1, {"rows": 7})
    assert log_bytes(status).decode() == f"one\ntwo{host.generation(spec.key)}\n"
    assert status.exit is not None
    assert status.exit.exit_code == 0
    assert status.exit.error is None


def test_the_command_reads_its_text_and_environment_and_runs_without_a_shell(host: JobHost):
    program = (
        "import os, sys; print(sys.stdin.read()); "
        "print(os.environ['WANTED'], os.path.basename(os.environ['EAGLE3_GENERATION_FOLDER']));"
        "print(sys.argv[1]); import eagle3_tasks; print(oct(os.umask(0)))"
    )
    spec = host.spec(
        "",
        argv=(AGENT_PYTHON, "-c", program, "$(touch PWNED); `id`"),
        stdin="größe\n",
        environment={"WANTED": "a b"},
    )
    status = host.run(spec)
    assert log_bytes(status).decode() == "größe\n\na b gen-0001\n$(touch PWNED); `id`\n0o77\n"
    assert not list(host.root.rglob("PWNED"))


def test_submitting_twice_joins_the_running_job(host: JobHost):
    spec = host.spec("echo started >> ../count; sleep 0.5")
    host.submit(spec)
    assert host.submit(spec).generation == 1
    assert host.wait_for_end(spec.key).state is JobState.SUCCEEDED
    assert (host.folder(spec.key) / "count").read_text() == "started\n"


def test_a_success_is_handed_over_until_it_is_acknowledged_and_then_runs_anew(host: JobHost):
    spec = host.spec("echo started >> ../count")
    host.run(spec)
    again = host.submit(spec)
    assert (again.state, again.generation, again.acknowledged) == (JobState.SUCCEEDED, 1, False)
    assert host.acknowledge(spec.key, 2).acknowledged is False, (
        "another generation's number acknowledges nothing"
    )
    assert host.acknowledge(spec.key, 1).acknowledged is True
    assert host.poll(spec.key).acknowledged is True
    assert host.submit(spec).generation == 2
    assert host.wait_for_end(spec.key).state is JobState.SUCCEEDED
    assert (host.folder(spec.key) / "count").read_text() == "started\n" * 2


def test_a_failed_job_is_classified_and_the_next_submit_is_the_next_generation(host: JobHost):
    spec = host.spec("echo reason of failure; exit 30")
    status = host.run(spec)
    assert status.state is JobState.FAILED
    assert status.exit is not None
    assert status.exit.error is not None
    assert (status.exit.exit_code, status.exit.error.code, status.exit.error.kind) == (
        30,
        "DISK_PROBLEM",
        "node",
    )
    assert "reason of failure" in status.exit.error.message
    assert status.log_path in status.exit.error.message
    assert host.submit(spec).generation == 2


@pytest.mark.parametrize(
    ("script", "code", "kind"),
    [
        ("exit 1", "UNEXPECTED_FAILURE", "node"),
        ("exit 11", "INVALID_INPUT", "user"),
        ("exit 60", "UNEXPECTED_FAILURE", "node"),
        ("kill -SEGV $$", "UNEXPECTED_FAILURE", "node"),
        ("kill -KILL $$", "UNEXPECTED_FAILURE", "node"),
        (
            """echo '{"code":"GPU_PROBLEM","kind":"node","message":"card 3"}' > error.json; exit 1""",
            "GPU_PROBLEM",
            "node",
        ),
        ("""echo '[1]' > report.json""", "UNEXPECTED_FAILURE", "node"),
        ("exec /nowhere/program", "UNEXPECTED_FAILURE", "node"),
    ],
)
def test_each_end_of_a_command_has_a_class(host: JobHost, script: str, code: str, kind: str):
    status = host.run(host.spec(script))
    assert status.exit is not None
    assert status.exit.error is not None
    assert (status.state, status.exit.error.code, status.exit.error.kind) == (JobState.FAILED, code, kind)
    if "kill" in script:
        assert status.exit.exit_code is None
        assert status.exit.signal in (signal.SIGSEGV, signal.SIGKILL)


def test_a_program_that_is_not_there_is_missing_software(host: JobHost):
    status = host.run(host.spec("", argv=("/nowhere/program",)))
    assert status.exit is not None
    assert status.exit.error is not None
    assert status.exit.error.code == "MISSING_SOFTWARE"
    assert "/nowhere/program" in status.exit.error.message


def test_a_killed_runner_is_a_lost_job_and_its_tree_is_dead_before_the_next_generation(host: JobHost):
    # The command leaves the lock behind, as Python's own children do; its environment betrays it.
    spec = host.spec(
        "echo started >> ../count; echo $$ > pid; [ -e ../again ] || exec sleep 60 3>&- 4>&- 5>&-"
    )
    host.submit(spec)
    folder = host.generation(spec.key)
    [command] = pids_in(folder, "pid")
    living = identity_of(command)
    os.kill(host.started(spec.key).runner.pid, signal.SIGKILL)
    status = host.wait_for(spec.key, JobState.LOST)
    assert status.detail == jobs.RUNNER_DIED
    assert living is not None
    assert is_alive(living)
    (host.folder(spec.key) / "again").touch()
    assert host.submit(spec).generation == 2
    assert not is_alive(living)
    assert host.wait_for_end(spec.key).state is JobState.SUCCEEDED
    assert (host.folder(spec.key) / "count").read_text() == "started\n" * 2


def test_a_cancelled_job_leaves_nothing_alive_not_even_who_ignores_term_in_a_session_of_its_own(
    host: JobHost,
):
    script = """
      setsid sh -c 'trap "" TERM; echo $$ > stubborn; while :; do sleep 0.1; done' &
      (setsid env -i sh -c 'echo $$ > stripped; exec sleep 60' 3>&- 4>&- 5>&- 6>&- &) &
      sleep 60
    """
    spec = host.spec(script, grace_seconds=0.5)
    other = host.spec("sleep 60", name="other")
    host.submit(other)
    host.submit(spec)
    pids = pids_in(host.generation(spec.key), "stubborn", "stripped")
    began = time.monotonic()
    assert host.cancel(spec.key).state is JobState.RUNNING
    status = host.wait_for(spec.key, JobState.CANCELLED)
    assert time.monotonic() - began < 4
    assert [identity_of(pid) for pid in pids] == [None, None]
    assert status.exit is not None
    assert status.exit.error is not None
    assert (status.exit.error.kind, status.exit.error.message) == ("cancelled", "cancelled: a test says so.")
    assert host.poll(other.key).state is JobState.RUNNING


def test_what_a_command_leaves_behind_is_ended_before_the_job_has_ended(host: JobHost):
    spec = host.spec(
        "setsid sh -c 'echo $$ > left; exec sleep 60' & while [ ! -s left ]; do sleep 0.05; done"
    )
    status = host.run(spec)
    assert status.state is JobState.SUCCEEDED
    assert identity_of(int((host.generation(spec.key) / "left").read_text())) is None


def test_cancelling_a_lost_job_ends_what_lives_of_it(host: JobHost):
    spec = host.spec("echo $$ > pid; exec sleep 60")
    host.submit(spec)
    [command] = pids_in(host.generation(spec.key), "pid")
    os.kill(host.started(spec.key).runner.pid, signal.SIGKILL)
    host.wait_for(spec.key, JobState.LOST)
    host.cancel(spec.key)
    assert identity_of(command) is None


def test_another_machine_identity_means_the_job_is_lost_by_a_restart(host: JobHost):
    spec = host.spec("echo $$ > pid; exec sleep 60")
    host.submit(spec)
    [command] = pids_in(host.generation(spec.key), "pid")
    host.reboot()
    status = host.poll(spec.key)
    assert (status.state, status.detail) == (JobState.LOST, jobs.MACHINE_RESTARTED)
    # As in a container that shares its processes with the one before: what lives of it is ended.
    assert host.submit(spec).generation == 2
    assert identity_of(command) is None


def test_a_success_before_a_restart_is_still_handed_over(host: JobHost):
    spec = host.spec("echo '{}' > report.json")
    host.run(spec)
    host.reboot()
    assert host.submit(spec).state is JobState.SUCCEEDED


def test_a_job_that_nobody_asks_about_stops_by_itself(host: JobHost):
    spec = host.spec("sleep 60", orphan_minutes=0.04)
    host.submit(spec)
    exit_file = host.generation(spec.key) / "exit.json"
    deadline = time.monotonic() + 3.0
    while time.monotonic() < deadline:
        assert host.poll(spec.key).state in (JobState.QUEUED, JobState.RUNNING), "polls renew the lease"
        time.sleep(0.3)
    assert wait_until(exit_file.exists, 10.0)
    status = host.poll(spec.key)
    assert status.exit is not None
    assert status.exit.error is not None
    assert (status.state, status.exit.error.code) == (JobState.FAILED, "JOB_LOST")


def test_a_runner_that_is_told_to_end_takes_its_tree_along_and_says_so(host: JobHost):
    spec = host.spec("echo $$ > pid; exec sleep 60")
    host.submit(spec)
    [command] = pids_in(host.generation(spec.key), "pid")
    os.kill(host.started(spec.key).runner.pid, signal.SIGTERM)
    status = host.wait_for_end(spec.key)
    assert status.exit is not None
    assert status.exit.error is not None
    assert "SIGTERM" in status.exit.error.message
    assert (status.state, status.exit.error.kind, identity_of(command)) == (JobState.FAILED, "node", None)


def test_a_reused_process_number_is_not_the_runner(host: JobHost):
    spec = host.spec("true")
    host.run(spec)
    folder = host.generation(spec.key)
    (folder / "exit.json").unlink()
    started = json.loads((folder / "started.json").read_text())
    me = identity_of(os.getpid())
    assert me is not None
    started["runner"] = {"pid": me.pid, "start_ticks": me.start_ticks + 1}
    (folder / "started.json").write_text(json.dumps(started))
    assert host.poll(spec.key).state is JobState.LOST


def test_a_generation_whose_agent_died_before_starting_it_is_lost_not_queued(host: JobHost):
    spec = host.spec("true")
    folder = host.folder(spec.key)
    folder.mkdir(parents=True)
    jobs.lock_path(folder).touch()
    jobs.make_generation(folder, 1, spec)
    assert host.poll(spec.key).state is JobState.LOST
    assert host.submit(spec).generation == 2


def test_slots_are_given_in_row_order_and_waiting_jobs_name_the_holder(host: JobHost):
    def shard(order: int, script: str):
        return host.spec(script, name=f"shard_{order}", slots=SlotRule(name="shards", count=1, order=order))

    go = "echo {0} >> ../../order"
    first = shard(4000, "while [ ! -e go ]; do sleep 0.05; done")
    later, sooner = shard(2000, go.format(2000)), shard(0, go.format(0))
    host.submit(first)
    host.wait_for(first.key, JobState.RUNNING)
    for spec in (later, sooner):
        assert host.submit(spec).state is JobState.QUEUED
    assert wait_until(lambda: first.key in host.poll(later.key).detail), "the holder is named"
    (host.generation(first.key) / "go").touch()
    for spec in (first, later, sooner):
        assert host.wait_for_end(spec.key).state is JobState.SUCCEEDED
    assert (host.root / "jobs" / "order").read_text() == "0\n2000\n"


def test_a_dead_holder_frees_its_place_and_a_queued_job_can_be_cancelled(host: JobHost):
    rule = SlotRule(name="shards", count=1)
    holder = host.spec("exec sleep 60", name="holder", slots=rule)
    waiter, given_up = (
        host.spec("true", name="waiter", slots=rule),
        host.spec("true", name="given_up", slots=rule),
    )
    host.submit(holder)
    started = host.wait_for(holder.key, JobState.RUNNING)
    host.submit(waiter)
    host.submit(given_up)
    host.cancel(given_up.key)
    assert host.wait_for_end(given_up.key).state is JobState.CANCELLED
    os.kill(host.started(holder.key).runner.pid, signal.SIGKILL)
    host.wait_for(holder.key, JobState.LOST)
    assert host.poll(waiter.key).state is JobState.QUEUED, "the tree of the dead runner still holds the place"
    host.cancel(holder.key)
    assert host.wait_for_end(waiter.key).state is JobState.SUCCEEDED
    assert started.generation == 1


def test_everything_a_job_writes_is_private(host: JobHost):
    spec = host.spec("echo x > made; mkdir made_folder")
    host.run(spec)
    for path in host.folder(spec.key).rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path


def test_progress_and_heartbeat_arrive_and_damaged_progress_is_ignored(host: JobHost):
    progress = {"stage": "extract", "done": 3, "total": 9, "unit": "samples", "seconds": 1.5}
    spec = host.spec(f"echo '{json.dumps(progress)}' > progress.json; while [ ! -e go ]; do sleep 0.05; done")
    host.submit(spec)
    assert wait_until(lambda: host.poll(spec.key).heartbeat_age_seconds is not None)
    assert wait_until(lambda: host.poll(spec.key).progress is not None)
    status = host.poll(spec.key)
    assert status.progress is not None
    assert (status.progress.done, status.progress.total) == (3, 9)
    assert status.heartbeat_age_seconds is not None
    assert status.heartbeat_age_seconds < 6
    (host.generation(spec.key) / "progress.json").write_text('{"stage": "ext')
    assert host.poll(spec.key).progress is None
    (host.generation(spec.key) / "go").touch()
    assert host.wait_for_end(spec.key).state is JobState.SUCCEEDED


def test_a_root_that_a_reboot_empties_is_refused(host: JobHost):
    for root, reason in (
        ("/tmp/eagle3-host-tests", "a reboot empties"),
        ("/dev/shm/eagle3-host-tests", "a reboot empties"),
    ):
        with pytest.raises(InvalidSettings, match=reason):
            JobHost(root=Path(root)).submit(host.spec("true"))
        assert not Path(root).exists()
    with pytest.raises(InvalidSettings, match="absolute"):
        JobHost(root=Path("relative")).submit(host.spec("true"))


def test_a_root_that_is_a_file_is_refused_by_name(host: JobHost, tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidSettings, match=r"can't write in .*file"):
        JobHost(root=tmp_path / "file").submit(host.spec("true"))
