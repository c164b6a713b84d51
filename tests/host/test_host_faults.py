"""What goes wrong around jobs on the host: sick disks, races, floods of many, each by its name."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from eagle3_tasks.commands.main import _write_report
from eagle3_tasks.contracts import codec
from eagle3_tasks.contracts.errors import DiskProblem, MissingSoftware, UnexpectedFailure
from eagle3_tasks.contracts.jobs import MAX_LOG_PIECE_BYTES, JobState, PollBody, PollItem
from eagle3_tasks.contracts.rows import MAX_SHARDS
from eagle3_tasks.host import job_folder as jobs
from eagle3_tasks.host import root_folder, runner
from eagle3_tasks.host.files import file_lock, make_private_folder, write_json
from eagle3_tasks.host.job_end import exit_record
from eagle3_tasks.host.job_records import StartedRecord
from eagle3_tasks.host.log_delivery import MAX_REPLY_LOG_BYTES, MIN_PIECE_BYTES
from eagle3_tasks.host.machine import machine_id
from eagle3_tasks.host.process import own_identity
from tests.host.job_host import JobHost


@pytest.fixture
def host(tmp_path: Path) -> Iterator[JobHost]:
    host = JobHost(root=tmp_path / "root")
    yield host
    host.close()


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE])
def test_a_sick_disk_under_the_root_is_the_nodes_problem(
    host: JobHost, monkeypatch: pytest.MonkeyPatch, number: int
):
    def fail(folder: Path) -> None:
        raise OSError(number, os.strerror(number), str(folder))

    monkeypatch.setattr(root_folder, "_try_writing", fail)
    with pytest.raises(DiskProblem, match=str(host.root)):
        host.submit(host.spec("true"))


def test_many_submits_at_once_in_one_agent_all_find_the_root_writable(host: JobHost):
    root_folder.prepare_root(host.root, make_root=True)
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(root_folder.prepare_root, host.root, make_root=False) for _ in range(400)]
    assert {future.result() for future in futures} == {host.root}
    assert list((host.root / "jobs").iterdir()) == []


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, DiskProblem),
        (errno.EIO, DiskProblem),
        (errno.E2BIG, UnexpectedFailure),
        (errno.EAGAIN, UnexpectedFailure),
        (errno.ENOEXEC, MissingSoftware),
        (errno.EACCES, MissingSoftware),
    ],
)
def test_only_a_program_that_cannot_be_executed_is_missing_software(
    host: JobHost, monkeypatch: pytest.MonkeyPatch, number: int, kind: type
):
    spec = host.spec("true")
    folder = jobs.make_generation(make_private_folder(host.folder(spec.key)), 1, spec)

    def fail(*_arguments: object, **_more: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(runner.subprocess, "Popen", fail)
    with pytest.raises((OSError, MissingSoftware)) as caught:
        runner.start_command(runner.Attempt(folder, spec, -1))
    assert type(runner.problem_of(caught.value)) is kind


def test_a_disk_too_full_for_what_the_command_reads_is_a_disk_problem(
    host: JobHost, monkeypatch: pytest.MonkeyPatch
):
    spec = host.spec("true", stdin="x")
    folder = jobs.make_generation(make_private_folder(host.folder(spec.key)), 1, spec)

    def fail(**_more: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(runner.tempfile, "TemporaryFile", fail)
    with pytest.raises(OSError, match="No space left") as caught:
        runner.start_command(runner.Attempt(folder, spec, -1))
    assert "no space is left" in str(runner.problem_of(caught.value))


def test_a_cancel_reaches_what_a_submit_under_way_starts(host: JobHost):
    spec = host.spec("exec sleep 60")
    folder = make_private_folder(host.folder(spec.key))
    old = jobs.make_generation(folder, 1, spec)
    with ThreadPoolExecutor() as pool, file_lock(jobs.submit_lock_path(folder)):
        assert host.poll(spec.key).state is JobState.LOST
        answer = pool.submit(host.cancel, spec.key)
        time.sleep(0.2)
        new = jobs.make_generation(folder, 2, spec)
        me = own_identity()
        started = StartedRecord(
            machine_id=machine_id(host.environment), runner=me, command=me, started_at=time.time()
        )
        write_json(new / "started.json", started)
    assert answer.result().state is JobState.RUNNING
    assert [(one / "cancel.json").exists() for one in (old, new)] == [False, True]


def test_a_reply_holds_a_bounded_part_of_many_loud_logs_and_each_job_has_its_turn(host: JobHost):
    keys = [host.spec("true", name=f"loud_{number}").key for number in range(40)]
    for key in keys:
        folder = make_private_folder(host.folder(key) / "gen-0001")
        (folder / "output.log").write_bytes(b"0123456789abcde\n" * (16 << 10))
    verbs = host.verbs

    def pieces() -> dict[str, int]:
        reply = verbs.poll(PollBody(jobs=tuple(PollItem(key=key) for key in keys)))
        assert [status.key for status in reply.jobs] == keys
        return {status.key: status.log.stop for status in reply.jobs if status.log}

    first, second = pieces(), pieces()
    assert sum(first.values()) <= MAX_REPLY_LOG_BYTES + 40 * MIN_PIECE_BYTES
    assert {MIN_PIECE_BYTES, MAX_LOG_PIECE_BYTES} == set(first.values())
    assert all(MAX_LOG_PIECE_BYTES in (first[key], second[key]) for key in keys)


def test_the_report_of_the_largest_run_is_taken(tmp_path: Path):
    shards = [[9_000_000 + row, 9_000_001 + row, "h" * 64] for row in range(MAX_SHARDS)]
    _write_report(tmp_path, {"shards": shards, "checks": "x" * 4096})
    record = exit_record(tmp_path, return_code=0, stop=None, memory_kills=0, seconds=1.0)
    assert record.state is JobState.SUCCEEDED
    assert codec.to_plain(jobs.read_report(tmp_path))["shards"] == shards
