"""Reading and appending a shard's receipts: the only truth about what is committed.

Readers keep plain dictionaries: a capture may hold a million samples.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

from eagle3_tasks.contracts import codec
from eagle3_tasks.contracts.errors import DamagedData
from eagle3_tasks.contracts.receipts import (
    STORAGE_VERSION,
    Fence,
    QuarantineRecord,
    Receipt,
    VoidRecord,
)
from eagle3_tasks.host.files import append_line, read_json
from eagle3_tasks.storage import names
from eagle3_tasks.storage.segment_format import checksum

logger = logging.getLogger(__name__)

_SEAL = b', "checksum": "crc32:%s"}\n'
_SEAL_BYTES = len(_SEAL % b"00000000")


@dataclasses.dataclass(kw_only=True)
class ShardRecords:
    """What counts in one shard's folder.

    Attributes:
        receipts: as written, oldest first, including samples that were voided later.
        quarantined: as written, oldest first.
        voided: pairs of segment and sample that verification has set aside.
        newest_generation: 0 when no writer ever opened the folder.
        num_damaged_lines: whole lines whose checksum does not fit; they count for nothing.
    """

    folder: Path
    receipts: list[dict[str, Any]] = dataclasses.field(default_factory=list[dict[str, Any]])
    quarantined: list[dict[str, Any]] = dataclasses.field(default_factory=list[dict[str, Any]])
    voided: set[tuple[str, str]] = dataclasses.field(default_factory=set[tuple[str, str]])
    newest_generation: int = 0
    num_damaged_lines: int = 0


def read_shard(folder: Path) -> ShardRecords:
    """Read all that counts in a shard's folder, whether or not a writer is at work.

    Raises:
        DamagedData: a record of another storage version.
    """
    records = ShardRecords(folder=folder)
    files = {path.name for path in folder.iterdir()}
    generations = {generation for name in files if (generation := names.generation_of(name))}
    records.newest_generation = max(generations, default=0)
    fence = _newest_fence(folder, files)
    for generation in sorted(generations):
        name = names.receipts_name(generation)
        if name in files:
            records.receipts += _counted_lines(records, name, _limit(fence, name, generation))
        name = names.quarantine_name(generation)
        if name in files:
            records.quarantined += _counted_lines(records, name, _limit(fence, name, generation))
    if names.VOIDS in files:
        for void in _counted_lines(records, names.VOIDS, None):
            records.voided.update((void["segment"], sample) for sample in void["samples"])
    return records


def counted_bytes(folder: Path) -> dict[str, int]:
    """Say up to which byte each receipts and quarantine file counts now, by its name."""
    files = {path.name for path in folder.iterdir()}
    fence = _newest_fence(folder, files)
    counted: dict[str, int] = {}
    for name in sorted(files):
        generation = names.generation_of(name)
        if generation and name in (names.receipts_name(generation), names.quarantine_name(generation)):
            limit = _limit(fence, name, generation)
            whole = whole_bytes(folder / name)
            counted[name] = whole if limit is None else min(limit, whole)
    return counted


def append_record(path: Path, record: Receipt | QuarantineRecord | VoidRecord) -> None:
    """Append one record durably, sealed with its line's checksum."""
    fields: dict[str, Any] = codec.to_plain(record)
    append_line(path, {**fields, "checksum": checksum(codec.dumps(fields).encode())})


def whole_bytes(path: Path) -> int:
    """Count the bytes up to the end of the last whole line; 0 for a file that isn't there."""
    if not path.exists():
        return 0
    content = path.read_bytes()
    return content.rfind(b"\n") + 1


def _newest_fence(folder: Path, files: set[str]) -> Fence | None:
    while True:
        fences = {
            generation: name
            for name in files
            if (generation := names.generation_of(name)) and name.startswith("fence-")
        }
        if not fences:
            return None
        fence = read_json(Fence, folder / fences[max(fences)])
        if fence is not None:
            return fence
        # A new writer has just put its own fence in the place of this one.
        files = {path.name for path in folder.iterdir()}


def _limit(fence: Fence | None, name: str, generation: int) -> int | None:
    """Up to which byte the file counts; None for the files of the newest writer."""
    if fence is None or generation >= fence.generation:
        return None
    return fence.counted_bytes.get(name, 0)


def _counted_lines(records: ShardRecords, name: str, limit: int | None) -> list[dict[str, Any]]:
    path = records.folder / name
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if limit is not None and limit < whole:
        logger.warning(
            "late records ignored file=%s ignored_bytes=%d: an older writer appended them after a newer one "
            "had begun", path, whole - limit,
        )  # fmt: skip
        whole = limit
    lines: list[dict[str, Any]] = []
    for number, line in enumerate(content[:whole].splitlines(keepends=True), start=1):
        value = _unseal(line)
        if value is None:
            records.num_damaged_lines += 1
            logger.warning("damaged record ignored file=%s line=%d", path, number)
        elif value.get("version") != STORAGE_VERSION:
            raise DamagedData(
                f"{path} line {number} is of storage version {value.get('version')}; this release reads "
                f"{STORAGE_VERSION}. Use the release that wrote it."
            )
        else:
            lines.append(value)
    return lines


def _unseal(line: bytes) -> dict[str, Any] | None:
    body = line[:-_SEAL_BYTES] + b"}"
    if line[-_SEAL_BYTES:] != _SEAL % checksum(body)[-8:].encode():
        return None
    value: dict[str, Any] = json.loads(line)
    return value
