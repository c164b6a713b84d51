"""Which lines reach Airflow's log, and what is confirmed on the host."""

from __future__ import annotations

import base64
import random
from typing import Any

import pytest

from eagle3_airflow.job_follower import JobFollower, problem_of
from eagle3_airflow.log_lines import LogLines
from eagle3_tasks.contracts.errors import Cancelled, ErrorRecord, InvalidInput, JobLost, UnexpectedFailure
from eagle3_tasks.contracts.jobs import ExitRecord, JobState, JobStatus, LogPiece

KEY = "extract-000000_000150-0123456789abcdef01234567"


def piece(content: bytes, start: int, stop: int, omitted: int = 0) -> LogPiece:
    data = base64.b64encode(content[start:stop]).decode()
    return LogPiece(start=start, stop=stop, size=len(content), data=data, omitted_bytes=omitted)


def status(state: JobState, log: LogPiece | None = None, **more: Any) -> JobStatus:
    return JobStatus(
        key=KEY, **{"generation": 1, "state": state, "log": log, "log_path": "/r/output.log", **more}
    )


def ended(state: JobState, error: ErrorRecord | None) -> JobStatus:
    record = ExitRecord(state=state, exit_code=1, signal=None, error=error, ended_at=0.0, seconds=1.0)
    return status(state, exit=record)


def test_lines_come_out_once_and_whole_however_the_pieces_are_cut() -> None:
    content = "zwölf Boxkämpfer\nsmørrebrød ☃ 𝄞\n\nlast without an end".encode()
    for seed in range(200):
        cuts = sorted(random.Random(seed).choices(range(len(content) + 1), k=6))
        lines = LogLines()
        found = []
        for start, stop in zip([0, *cuts], [*cuts, len(content)], strict=True):
            found += lines.feed(piece(content, start, stop), log_path="")
        assert [*found, *lines.finish()] == content.decode().split("\n")


def test_bytes_that_are_no_text_and_progress_bars_make_one_line_each() -> None:
    content = b"ol\xe9\n 10%\r 50%\r100%\r\nplain\r\n"
    assert LogLines().feed(piece(content, 0, len(content)), log_path="") == ["ol\ufffd", "100%", "plain"]


def test_bytes_left_out_are_named_with_the_file_that_has_them() -> None:
    lines = LogLines()
    content = b"first\npart" + b"x" * 100 + b"last\n"
    found = lines.feed(piece(content, 0, 10), log_path="/r/output.log")
    found += lines.feed(piece(content, 110, 115, omitted=100), log_path="/r/output.log")
    assert found == [
        "first",
        "part",
        "... 100 bytes of the log are left out here; all of it: /r/output.log",
        "last",
    ]


def test_each_question_confirms_the_piece_before_it() -> None:
    content = b"one\ntwo\nthree\n"
    follower = JobFollower(KEY, 1)
    assert follower.question().confirmed is None
    follower.take(status(JobState.RUNNING, piece(content, 0, 4)))
    assert (follower.question().confirmed, follower.has_more_log) == (4, True)
    follower.take(status(JobState.RUNNING, piece(content, 4, 14)))
    assert (follower.question().confirmed, follower.has_more_log) == (14, False)


def test_a_job_is_not_over_before_the_last_line_of_its_log_is_logged() -> None:
    content = b"one\nTraceback\nValueError: the reason"
    follower = JobFollower(KEY, 1)
    assert follower.take(status(JobState.FAILED, piece(content, 0, 4))) == ["one"]
    assert follower.take(status(JobState.FAILED, piece(content, 4, len(content)))) == ["Traceback"]
    assert (follower.final, follower.has_more_log) == (None, True), "the last piece is not confirmed yet"
    nothing = piece(content, len(content), len(content))
    assert follower.take(status(JobState.FAILED, nothing, detail="exit code 1.\nTraceback")) == [
        "ValueError: the reason",
        f"job failed key={KEY} generation=1 detail=exit code 1.",
    ]
    assert follower.final is not None
    assert follower.final.log is None


def test_a_state_is_one_line_when_it_changes_and_none_while_it_lasts() -> None:
    follower = JobFollower(KEY, 1)
    assert follower.take(status(JobState.QUEUED, detail="place 1 of shards is held by job x")) == [
        f"job queued key={KEY} generation=1 detail=place 1 of shards is held by job x"
    ]
    assert follower.take(status(JobState.QUEUED, detail="place 1 of shards is held by job x")) == []
    assert follower.take(status(JobState.RUNNING)) == [f"job running key={KEY} generation=1"]


def test_offsets_of_one_generation_are_not_used_for_the_next() -> None:
    follower = JobFollower(KEY, 1)
    follower.take(status(JobState.RUNNING, piece(b"abc\n", 0, 4)))
    follower.take(status(JobState.RUNNING, generation=2))
    assert (follower.question().generation, follower.question().confirmed) == (2, None)


def test_a_job_that_the_host_has_forgotten_is_lost() -> None:
    with pytest.raises(JobLost, match="no folder"):
        JobFollower(KEY, 1).take(status(JobState.ABSENT, generation=0))


def test_the_error_of_a_job_keeps_its_class_and_names_its_log() -> None:
    record = ErrorRecord(code="INVALID_INPUT", kind="user", message="/data/c.jsonl is empty.")
    problem = problem_of(ended(JobState.FAILED, record))
    assert type(problem) is InvalidInput
    assert str(problem) == "/data/c.jsonl is empty. Its log on the GPU host: /r/output.log"
    cancelled = problem_of(
        ended(JobState.CANCELLED, ErrorRecord(code="CANCELLED", kind="cancelled", message="x"))
    )
    assert type(cancelled) is Cancelled
    assert type(problem_of(status(JobState.LOST, detail="the machine restarted"))) is JobLost
    assert type(problem_of(status(JobState.FAILED))) is UnexpectedFailure
    assert problem_of(status(JobState.SUCCEEDED)) is None
