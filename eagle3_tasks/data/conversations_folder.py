"""Conversations on disk: ``ROOT/conversations/DIGEST/``, written once, read by row range.

``rows.jsonl``         one line a conversation: row, id, content_id, messages
``row_offsets.npy``    int64 [rows + 1]: the byte at which each line begins
``rejects.jsonl``      one line a reject: line, id, reason, message
``statistics.json``    counts
``complete.json``      the seal, written last
"""

from __future__ import annotations

import array
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np

from eagle3_tasks.contracts.errors import DamagedData, RequestRefused
from eagle3_tasks.contracts.rows import RowRange
from eagle3_tasks.data.conversations import Conversation, ConversationReader, Message
from eagle3_tasks.data.source_lines import Reject
from eagle3_tasks.host.files import read_json, write_json
from eagle3_tasks.host.sealed_folder import check_sealed

ROWS_FILE = "rows.jsonl"
OFFSETS_FILE = "row_offsets.npy"
REJECTS_FILE = "rejects.jsonl"
STATISTICS_FILE = "statistics.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConversationStatistics:
    """``statistics.json``: counts of one reading. ``policies`` counts rows that were changed or renamed."""

    num_rows: int
    num_rejects: int
    num_duplicates: int
    num_lines: int
    num_blank_lines: int
    num_bytes: int
    reasons: dict[str, int]
    policies: dict[str, int]


def write_conversations(
    folder: Path, reader: ConversationReader, on_row: Callable[[int, int], None]
) -> ConversationStatistics:
    """Read everything that ``reader`` gives into ``folder``, in bounded memory.

    ``on_row`` is told rows and bytes so far, often.
    """
    offsets = array.array("q", [0])
    with (
        (folder / ROWS_FILE).open("wb", buffering=1 << 20) as rows,
        (folder / REJECTS_FILE).open("wb") as rejects,
    ):
        for item in reader:
            if isinstance(item, Reject):
                rejects.write(_line(dataclasses.asdict(item)))
            else:
                offsets.append(offsets[-1] + rows.write(_line(_plain(item))))
            on_row(reader.counts["rows"], reader.counts["bytes"])
    np.save(folder / OFFSETS_FILE, np.frombuffer(offsets, dtype=np.int64), allow_pickle=False)
    counts = dict(reader.counts)
    statistics = ConversationStatistics(
        num_rows=counts.pop("rows", 0),
        num_rejects=counts.pop("rejects", 0),
        num_duplicates=counts.pop("duplicates", 0),
        num_lines=counts.pop("lines", 0),
        num_blank_lines=counts.pop("blank_lines", 0),
        num_bytes=counts.pop("bytes", 0),
        reasons=dict(reader.reasons.most_common()),
        policies=counts,
    )
    write_json(folder / STATISTICS_FILE, statistics)
    return statistics


class ConversationsFolder:
    """A finished folder of conversations.

    Raises:
        DamagedData: the folder is not finished, or a file is not as it was written.
    """

    def __init__(self, path: Path) -> None:
        check_sealed(path)
        self.path = path
        self._offsets = np.load(path / OFFSETS_FILE, mmap_mode="r", allow_pickle=False)

    @property
    def num_rows(self) -> int:
        return len(self._offsets) - 1

    def statistics(self) -> ConversationStatistics:
        statistics = read_json(ConversationStatistics, self.path / STATISTICS_FILE)
        if statistics is None:
            raise DamagedData(f"{self.path / STATISTICS_FILE} is missing. Run read-conversations again.")
        return statistics

    def read(self, rows: RowRange) -> Iterator[Conversation]:
        """Yield the conversations of ``rows`` in order; nothing before them is read.

        Raises:
            RequestRefused: the folder has fewer rows.
            DamagedData: a line is not what was written.
        """
        if rows.stop > self.num_rows:
            raise RequestRefused(
                f"rows [{rows.start}, {rows.stop}) of {self.path}, which has {self.num_rows}."
            )
        with (self.path / ROWS_FILE).open("rb", buffering=1 << 20) as file:
            file.seek(int(self._offsets[rows.start]))
            for row in range(rows.start, rows.stop):
                yield self._decode(file.readline(), row)

    def first_rejects(self, count: int) -> list[Reject]:
        """Give the first ``count`` rejects in the file's order."""
        with (self.path / REJECTS_FILE).open("rb") as file:
            return [Reject(**json.loads(line)) for _, line in zip(range(count), file, strict=False)]

    def _decode(self, line: bytes, row: int) -> Conversation:
        try:
            value = cast("dict[str, Any]", json.loads(line))
            messages = tuple(Message(**message) for message in value["messages"])
            found = Conversation(
                row=value["row"], id=value["id"], content_id=value["content_id"], messages=messages
            )
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedData(
                f"{self.path / ROWS_FILE} row {row} is not what was written ({error!r})."
            ) from error
        if found.row != row:
            raise DamagedData(f"{self.path / ROWS_FILE}: row {found.row} stands where row {row} was written.")
        return found


def _plain(item: Conversation) -> dict[str, Any]:
    messages = [{"role": message.role, "content": message.content} for message in item.messages]
    return {"row": item.row, "id": item.id, "content_id": item.content_id, "messages": messages}


def _line(value: dict[str, Any]) -> bytes:
    # A reject's message may quote half of a surrogate pair: written as JSON's own escape.
    text = json.dumps(value, ensure_ascii=False)
    return (text + "\n").encode("utf-8", "backslashreplace")
