"""The target's own answers to the conversations' questions: ``ROOT/conversations/DIGEST_A/``.

One file a writer's row range, ``answers-000000-002000.jsonl``, one line a conversation,
appended and synced batch by batch. A line without its end was torn by a crash: it does
not exist for a reader, and the next writer cuts it off.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, cast

from eagle3_tasks.contracts import codec
from eagle3_tasks.contracts.digests import digest_of
from eagle3_tasks.contracts.errors import DamagedData
from eagle3_tasks.contracts.rows import RowRange
from eagle3_tasks.contracts.settings import Settings
from eagle3_tasks.data.tokenizer_files import tokenizer_fingerprint
from eagle3_tasks.host.files import PRIVATE_FILE, make_private_folder, read_lines, sync_folder

ANSWERS_FORMAT = 1
_FILE_NAME = re.compile(r"answers-(\d{6,})-(\d{6,})\.jsonl")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnsweredTurn:
    """One request as it was served: the prompt's ids, and what the target wrote.

    ``answer_ids`` end with the end-of-turn id where ``finish`` is ``stop``; ``length``
    means that the answer reached its limit and is not whole.
    """

    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    finish: Literal["stop", "length"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnsweredConversation:
    """A conversation whose assistant turns the target wrote anew, in order.

    The last turn is the last of the conversation, or the first that reached its limit.
    """

    content_id: str
    turns: tuple[AnsweredTurn, ...]


def answers_digest(settings: Settings, conversations_digest: str, target_fingerprint: str) -> str:
    """Name the answers by what determines them. Shard sizes and GPUs don't."""
    return digest_of(
        {
            "format": ANSWERS_FORMAT,
            "conversations": conversations_digest,
            "target": target_fingerprint,
            "tokenizer": tokenizer_fingerprint(settings),
            "dtype": settings.target.capture_dtype,
            "max_tokens": settings.data.max_tokens,
            "answer_max_tokens": settings.data.answer_max_tokens,
            "temperature": settings.data.answer_temperature,
            "template_date": settings.data.template_date,
        }
    )


class AnswersFolder:
    """Reads and appends answers. Makes the folder on the first append."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def lock_path(self, rows: RowRange) -> Path:
        """Name the lock that the one writer of a shard holds, from reading what is missing on."""
        return self.path / f".{_file_name(rows)}.lock"

    def append(self, rows: RowRange, records: Iterable[AnsweredConversation]) -> None:
        """Append the answers of one batch, durably.

        ``rows`` is the writer's shard; the caller holds its lock.
        """
        content = "".join(codec.dumps(record) + "\n" for record in records).encode()
        if not content:
            return
        make_private_folder(self.path)
        path = self.path / _file_name(rows)
        is_new = not path.exists()
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, PRIVATE_FILE)
        with os.fdopen(descriptor, "r+b") as file:
            file.truncate(_whole_bytes(path))
            file.seek(0, os.SEEK_END)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if is_new:
            sync_folder(self.path)

    def read_committed(self, rows: RowRange) -> dict[str, AnsweredConversation]:
        """Give the committed answers to ``rows`` by content id.

        The files of every range that overlaps are read, so the result may hold more, and
        another choice of shards finds what an earlier one answered.

        Raises:
            DamagedData: a whole line is not an answer; the message names file and line.
        """
        return {
            record.content_id: record
            for path, file_rows in self._files()
            if file_rows.start < rows.stop and rows.start < file_rows.stop
            for record in _read_file(path)
        }

    def fingerprint(self) -> str:
        """Name the committed state: it changes when answers are added, and only then."""
        hasher = hashlib.sha256()
        for path, _ in self._files():
            hasher.update(f"{path.name}\0{_whole_bytes(path)}\0".encode())
        return hasher.hexdigest()

    def _files(self) -> Iterator[tuple[Path, RowRange]]:
        if not self.path.is_dir():
            return
        for path in sorted(self.path.iterdir()):
            match = _FILE_NAME.fullmatch(path.name)
            if match is not None:
                yield path, RowRange(start=int(match[1]), stop=int(match[2]))


def _file_name(rows: RowRange) -> str:
    return f"answers-{rows.start:06d}-{rows.stop:06d}.jsonl"


def _read_file(path: Path) -> Iterator[AnsweredConversation]:
    for number, (_, value) in enumerate(read_lines(path), start=1):
        try:
            yield _decode(value)
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedData(
                f"{path} line {number} is not an answer ({error!r}). Move the file away; its rows are then "
                "answered again."
            ) from error


def _decode(value: Any) -> AnsweredConversation:
    # By hand: the generic decoder takes a second for what this does in 20 ms, a batch of 2,000.
    turns: list[AnsweredTurn] = []
    for turn in value["turns"]:
        finish = turn["finish"]
        if finish not in ("stop", "length"):
            raise ValueError(f"finish {finish!r}")
        turns.append(
            AnsweredTurn(
                prompt_ids=_ids(turn["prompt_ids"]),
                answer_ids=_ids(turn["answer_ids"]),
                finish=cast("Literal['stop', 'length']", finish),
            )
        )
    content_id = value["content_id"]
    if not isinstance(content_id, str) or not turns:
        raise ValueError("no content id, or no turn")
    return AnsweredConversation(content_id=content_id, turns=tuple(turns))


def _ids(value: Any) -> tuple[int, ...]:
    ids = tuple(value)
    if not all(type(one) is int and one >= 0 for one in ids):
        raise ValueError("token ids that are not whole numbers")
    return ids


def _whole_bytes(path: Path) -> int:
    """Give the length of ``path`` up to its last line end: what a crash can't have torn."""
    size = path.stat().st_size if path.exists() else 0
    block = 1 << 16
    with path.open("rb") as file:
        stop = size
        while stop > 0:
            start = max(0, stop - block)
            file.seek(start)
            position = file.read(stop - start).rfind(b"\n")
            if position >= 0:
                return start + position + 1
            stop = start
    return 0
