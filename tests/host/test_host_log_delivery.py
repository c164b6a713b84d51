"""A job's log on its way: confirmed bytes, whole characters, and the rule for floods."""

from __future__ import annotations

import base64
import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3_tasks.contracts.jobs import MAX_LOG_PIECE_BYTES, LogPiece
from eagle3_tasks.host.files import write_json
from eagle3_tasks.host.log_delivery import (
    END_BYTES,
    MAX_JOB_BYTES,
    LogMarks,
    close_log,
    close_minute,
    confirm,
    last_lines,
    next_range,
    read_piece,
)

MIB = 1 << 20


def read_all(folder: Path, max_bytes: int = MAX_LOG_PIECE_BYTES) -> list[LogPiece]:
    """Read as the orchestrator does: each piece confirms the one before."""
    pieces: list[LogPiece] = []
    while (piece := read_piece(folder, is_final=True, max_bytes=max_bytes)).stop > piece.start:
        pieces.append(piece)
        confirm(folder, piece.stop)
    return pieces


def content(piece: LogPiece) -> bytes:
    return base64.b64decode(piece.data)


def test_a_piece_comes_again_until_it_is_confirmed(tmp_path: Path):
    log = tmp_path / "output.log"
    log.write_bytes(b"first\n")
    assert content(read_piece(tmp_path, is_final=False)) == b"first\n"
    log.write_bytes(b"first\nsecond\n")
    assert content(read_piece(tmp_path, is_final=False)) == b"first\nsecond\n"
    confirm(tmp_path, 6)
    piece = read_piece(tmp_path, is_final=False)
    assert (piece.start, piece.stop, piece.size, content(piece)) == (6, 13, 13, b"second\n")


def test_a_confirmation_never_goes_back_and_never_past_the_end(tmp_path: Path):
    (tmp_path / "output.log").write_bytes(b"0123456789")
    confirm(tmp_path, 8)
    confirm(tmp_path, 3)
    assert read_piece(tmp_path, is_final=True).start == 8
    confirm(tmp_path, 1000)
    assert read_piece(tmp_path, is_final=True).start == 10


def test_a_torn_record_of_delivery_begins_again_instead_of_failing(tmp_path: Path):
    (tmp_path / "output.log").write_bytes(b"abc")
    (tmp_path / "delivered.json").write_bytes(b"")
    assert content(read_piece(tmp_path, is_final=True)) == b"abc"


def test_there_is_no_log_before_the_runner_made_one(tmp_path: Path):
    assert read_piece(tmp_path, is_final=False) == LogPiece(start=0, stop=0, size=0, data="")


@pytest.mark.parametrize("text", ["ä", "€", "🦅"])
def test_a_character_that_is_half_written_waits_for_its_rest(tmp_path: Path, text: str):
    log = tmp_path / "output.log"
    for length in range(1, len(text.encode())):
        log.write_bytes(b"x" + text.encode()[:length])
        assert content(read_piece(tmp_path, is_final=False)) == b"x"
        # At the end there is no rest to wait for.
        assert content(read_piece(tmp_path, is_final=True)) == b"x" + text.encode()[:length]
    log.write_bytes(b"x" + text.encode())
    assert content(read_piece(tmp_path, is_final=False)).decode() == "x" + text


@given(st.text(alphabet="aä€🦅\n", max_size=300), st.integers(4, 40))
def test_pieces_of_text_are_text_and_make_the_whole(text: str, limit: int):
    folder = Path(".tmp") / "log_pieces"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "delivered.json").unlink(missing_ok=True)
    (folder / "output.log").write_bytes(text.encode())
    pieces = read_all(folder, limit)
    assert all(0 < len(content(piece)) <= limit for piece in pieces)
    assert "".join(content(piece).decode() for piece in pieces) == text


def test_bytes_that_are_no_text_arrive_as_they_are(tmp_path: Path):
    noise = bytes(range(256)) * 600
    (tmp_path / "output.log").write_bytes(noise)
    pieces = read_all(tmp_path)
    assert b"".join(map(content, pieces)) == noise
    assert len(pieces) > 1
    assert all(piece.stop - piece.start <= MAX_LOG_PIECE_BYTES for piece in pieces)


def test_a_flood_gives_its_first_and_last_part_and_names_the_bytes_between(tmp_path: Path):
    line = "€ a line of a flood\n".encode()
    flood = line * (3 * MIB // len(line))
    (tmp_path / "output.log").write_bytes(flood)
    pieces = read_all(tmp_path)
    assert sum(len(content(piece)) for piece in pieces) <= MIB
    omitted = [piece for piece in pieces if piece.omitted_bytes]
    assert len(omitted) == 1
    assert content(omitted[0]).startswith(line)
    assert sum(len(content(piece)) + piece.omitted_bytes for piece in pieces) == len(flood)
    given = b"".join(map(content, pieces))
    assert given.startswith(line)
    assert given.endswith(line)


def test_while_a_minute_may_still_become_a_flood_only_its_first_part_is_given():
    marks = LogMarks(minute_start=100)
    offsets = [0]
    while (step := next_range(marks, offsets[-1], 10 * MIB))[1] > step[0]:
        offsets.append(step[1])
    assert offsets[-1] == 100 + END_BYTES
    quiet = close_minute(marks, 100 + END_BYTES + 10)
    assert next_range(quiet, offsets[-1], 100 + END_BYTES + 10) == (offsets[-1], offsets[-1] + 10, 0)


def test_a_quiet_log_is_given_whole_however_long_nobody_asked():
    marks, size = LogMarks(), 0
    for _ in range(600):
        size += 100_000
        marks = close_minute(marks, size)
    assert marks.omitted == ()
    assert marks.capped_from is None
    assert close_log(marks, size) == marks


def test_a_job_never_hands_on_more_than_its_limit_and_always_its_end():
    marks, size = LogMarks(), 0
    for _ in range(200):
        size += 5 * MIB
        marks = close_minute(marks, size)
    assert marks.capped_from is not None
    assert next_range(marks, marks.capped_from, size)[1] == marks.capped_from
    marks = close_log(marks, size)
    omitted = sum(stop - start for start, stop in marks.omitted)
    assert size - omitted <= MAX_JOB_BYTES
    assert marks.omitted[-1][1] == size - END_BYTES
    assert close_log(marks, size) == marks, "deciding again decides the same"


@given(st.lists(st.integers(0, 3 * MIB), max_size=80), st.integers(0, 3 * MIB))
def test_what_is_given_and_what_is_left_out_make_the_whole_log(minutes: list[int], rest: int):
    marks, size = LogMarks(), 0
    for grown in minutes:
        size += grown
        marks = close_minute(marks, size)
    size += rest
    marks = close_log(marks, size)
    assert all(start < stop for start, stop in marks.omitted)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(marks.omitted))
    offset = total = 0
    while (step := next_range(marks, offset, size))[1] > step[0]:
        assert step[0] == offset + step[2]
        total += step[2] + step[1] - step[0]
        offset = step[1]
    assert (offset, total) == (size, size)


def test_a_character_cut_by_an_omission_does_not_stop_the_log(tmp_path: Path):
    text = "€" * 50_000
    (tmp_path / "output.log").write_bytes(text.encode())
    write_json(
        tmp_path / "log_marks.json", LogMarks(minute_start=100_000, omitted=((10_000, 90_001),), kept_bytes=1)
    )
    pieces = read_all(tmp_path)
    assert sum(len(content(piece)) + piece.omitted_bytes for piece in pieces) == len(text.encode())
    assert {content(piece).decode().strip("€") for piece in pieces} == {""}


def test_the_last_lines_of_a_log_are_whole_and_few(tmp_path: Path):
    path = tmp_path / "output.log"
    path.write_text(
        "".join(f"line {number}\n" for number in range(1000)) + "\rprogress 1\rprogress 2\nthe end"
    )
    lines = last_lines(path).splitlines()
    assert lines[-2:] == ["progress 2", "the end"]
    assert len(lines) == 15
    assert last_lines(tmp_path / "absent") == ""
