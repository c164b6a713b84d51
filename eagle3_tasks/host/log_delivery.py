"""Handing a job's log on, piece by piece: nothing lost, whole characters, floods shortened.

The file on the host is always complete. What Airflow gets follows one rule: of a minute
in which a job writes more than 1 MiB, its first and last half MiB; of a job that writes more
than 64 MiB in all (so shortened), the beginning and the last half MiB. The runner, which
is there while the log grows, marks what is left out (``log_marks.json``); the agent only
reads. So an orchestrator that was away for a day still gets every byte of a quiet log.
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from eagle3_tasks.contracts.jobs import MAX_LOG_PIECE_BYTES, LogPiece
from eagle3_tasks.host import job_records as records
from eagle3_tasks.host.files import write_json
from eagle3_tasks.host.job_folder import read_leniently

MINUTE_SECONDS = 60.0
MAX_MINUTE_BYTES = 1 << 20
MAX_JOB_BYTES = 64 << 20
MAX_REPLY_LOG_BYTES = 2 << 20
"""Of one reply to a poll, all its jobs together; jobs beyond it get a little each."""
MIN_PIECE_BYTES = 1 << 10
END_BYTES = 512 << 10
"""Length of the first and of the last part that a flooding minute, or job, keeps."""
_ALIGN_BYTES = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogMarks:
    """``log_marks.json``: which bytes of the log are not handed on.

    ``omitted`` are ascending ``[start, stop)`` ranges below ``minute_start``, where the
    minute that is still open began. ``kept_bytes`` is what is handed on of the bytes before.
    Nothing from ``capped_from`` on is handed on until the job has ended.
    """

    minute_start: int = 0
    omitted: tuple[tuple[int, int], ...] = ()
    kept_bytes: int = 0
    capped_from: int | None = None


def close_minute(marks: LogMarks, size: int) -> LogMarks:
    """Decide about the minute that ends with the log at ``size`` bytes."""
    start, grown = marks.minute_start, size - marks.minute_start
    if grown <= 0 or marks.capped_from is not None:
        return dataclasses.replace(marks, minute_start=max(size, start))
    omitted = marks.omitted
    if grown > MAX_MINUTE_BYTES:
        omitted = (*omitted, (start + END_BYTES, size - END_BYTES))
        grown = 2 * END_BYTES
    if marks.kept_bytes + grown > MAX_JOB_BYTES - 2 * END_BYTES:
        # Of the minute just closed up to END_BYTES may be handed on, at the end as many again.
        return LogMarks(
            minute_start=size, omitted=marks.omitted, kept_bytes=marks.kept_bytes, capped_from=start
        )
    return LogMarks(minute_start=size, omitted=omitted, kept_bytes=marks.kept_bytes + grown)


def close_log(marks: LogMarks, size: int) -> LogMarks:
    """Decide about the rest of a log whose job has ended: its last part is always handed on."""
    marks = close_minute(marks, size)
    if marks.capped_from is None:
        return marks
    start, stop = marks.capped_from, max(marks.capped_from, size - END_BYTES)
    omitted = (*marks.omitted, (start, stop)) if stop > start else marks.omitted
    return LogMarks(minute_start=size, omitted=omitted, kept_bytes=marks.kept_bytes + size - stop)


class LogTurns:
    """Whose log comes first in the next reply, so that no loud job starves the others."""

    def __init__(self) -> None:
        self.last = ""
        """Key of the last job that had a share of the reply before."""

    def order(self, keys: Sequence[str]) -> list[int]:
        """Give the places of ``keys`` in the order in which their logs are read."""
        return sorted(range(len(keys)), key=lambda index: (keys[index] <= self.last, keys[index]))


def next_range(
    marks: LogMarks, offset: int, size: int, max_bytes: int = MAX_LOG_PIECE_BYTES
) -> tuple[int, int, int]:
    """Choose which bytes follow ``offset`` in what is handed on.

    Returns:
        ``(start, stop, omitted bytes before start)``; ``start == stop`` where there is
        nothing yet. Of the open minute only its first part is certain to be kept.
    """
    limit = size if marks.capped_from is None else min(size, marks.capped_from)
    if marks.minute_start < size and marks.capped_from is None:
        limit = min(limit, marks.minute_start + END_BYTES)
    start, skipped = offset, 0
    for begin, end in marks.omitted:
        if begin <= start < end:
            start, skipped = end, end - start
        elif start < begin:
            limit = min(limit, begin)
            break
    limit = min(limit, start + max_bytes)
    return (start, limit, skipped) if limit > start else (offset, offset, 0)


def read_piece(folder: Path, *, is_final: bool, max_bytes: int = MAX_LOG_PIECE_BYTES) -> LogPiece:
    """Read the piece after what has been confirmed.

    Asked again without a confirmation, it gives the same place again. A character is
    never cut in two, except where the log itself ends, or the job's bytes are no text.
    """
    delivered = read_leniently(records.DeliveredRecord, folder / records.DELIVERED_FILE)
    path = folder / records.LOG_FILE
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            marks = read_leniently(LogMarks, folder / records.LOG_MARKS_FILE) or LogMarks()
            if is_final:
                # Equal to what the runner marked; needed where it died before it could.
                marks = close_log(marks, size)
            look = _Look(file=file, marks=marks, size=size, is_final=is_final, max_bytes=max_bytes)
            return _read_range(look, min(delivered.offset if delivered else 0, size))
    except FileNotFoundError:
        return LogPiece(start=0, stop=0, size=0, data="")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Look:
    file: BinaryIO
    marks: LogMarks
    size: int
    is_final: bool
    max_bytes: int


def _read_range(look: _Look, offset: int) -> LogPiece:
    start, stop, omitted = next_range(look.marks, offset, look.size, look.max_bytes)
    look.file.seek(start)
    content = look.file.read(stop - start)
    if omitted:
        dropped = _broken_line_bytes(content)
        start, omitted, content = start + dropped, omitted + dropped, content[dropped:]
    if not (look.is_final and stop == look.size):
        whole = content[: len(content) - _cut_character_bytes(content)]
        if content and not whole and any(begin == stop for begin, _ in look.marks.omitted):
            # The rest of this character is left out: what is here of it is left out too.
            piece = _read_range(look, stop)
            return dataclasses.replace(piece, omitted_bytes=piece.omitted_bytes + omitted + len(content))
        content = whole
    data = base64.b64encode(content).decode("ascii")
    return LogPiece(start=start, stop=start + len(content), size=look.size, data=data, omitted_bytes=omitted)


def confirm(folder: Path, offset: int) -> None:
    """Note that the log is handed on up to ``offset``. Never goes back, never past the log's end."""
    try:
        size = (folder / records.LOG_FILE).stat().st_size
    except FileNotFoundError:
        return
    path = folder / records.DELIVERED_FILE
    delivered = read_leniently(records.DeliveredRecord, path)
    offset = min(offset, size)
    if offset > (delivered.offset if delivered else 0):
        write_json(path, records.DeliveredRecord(offset=offset), is_durable=False)


def last_lines(path: Path, *, max_lines: int = 15, max_bytes: int = 2000) -> str:
    """Give the last lines of a log, for an error's message."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - max_bytes))
            content = file.read(max_bytes)
    except OSError:
        return ""
    if size > max_bytes:
        content = content[_broken_line_bytes(content) :]
    lines = content.decode("utf-8", "replace").replace("\r", "\n").splitlines()
    return "\n".join([line for line in lines if line.strip()][-max_lines:])


def _broken_line_bytes(content: bytes) -> int:
    """Count the bytes before the first whole line, or at least the first whole character."""
    newline = content.find(b"\n", 0, _ALIGN_BYTES)
    if 0 <= newline < len(content) - 1:
        return newline + 1
    count = 0
    while count < min(3, len(content)) and content[count] & 0xC0 == 0x80:
        count += 1
    return count


def _cut_character_bytes(content: bytes) -> int:
    """Count the bytes at the end that begin a UTF-8 character and don't finish it."""
    for back in range(1, min(3, len(content)) + 1):
        byte = content[-back]
        if byte & 0xC0 == 0x80:
            continue
        needed = 2 if byte & 0xE0 == 0xC0 else 3 if byte & 0xF0 == 0xE0 else 4 if byte & 0xF8 == 0xF0 else 1
        return back if needed > back else 0
    return 0
