"""Reading and appending a shard's receipts: the only truth about what is committed.

Records are plain dictionaries, and receipts can be had one at a time: a capture may hold a
million samples.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

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
        receipt_files: names in the order of their writers, and up to which byte each counts.
        receipts: as written, oldest first, including samples that were voided later.
        quarantined: as written, oldest first.
        voided: pairs of segment and sample that verification has set aside.
        newest_generation: 0 when no writer ever opened the folder.
        num_damaged_lines: whole lines whose checksum does not fit; they count for nothing.
    """

    folder: Path
    receipt_files: list[tuple[str, int | None]] = dataclasses.field(
        default_factory=list[tuple[str, int | None]]
    )
    receipts: list[dict[str, Any]] = dataclasses.field(default_factory=list[dict[str, Any]])
    quarantined: list[dict[str, Any]] = dataclasses.field(default_factory=list[dict[str, Any]])
    voided: set[tuple[str, str]] = dataclasses.field(default_factory=set[tuple[str, str]])
    newest_generation: int = 0
    num_damaged_lines: int = 0


class LinePlace(NamedTuple):
    """Where a whole line lies, in a file of a shard's folder."""

    file_name: str
    start: int
    num_bytes: int


def read_shard(folder: Path) -> ShardRecords:
    """Read all that counts in a shard's folder, whether or not a writer is at work.

    Raises:
        DamagedData: a record of another storage version.
    """
    records = open_shard(folder)
    records.receipts = [receipt for _, receipt in walk_receipts(records)]
    return records


def open_shard(folder: Path) -> ShardRecords:
    """Read all that counts but the receipts, for :func:`walk_receipts`.

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
            records.receipt_files.append((name, _limit(fence, name, generation)))
        name = names.quarantine_name(generation)
        if name in files:
            limit = _limit(fence, name, generation)
            records.quarantined += [line for _, line in _counted_lines(records, name, limit)]
    if names.VOIDS in files:
        for _, void in _counted_lines(records, names.VOIDS, None):
            records.voided.update((void["segment"], sample) for sample in void["samples"])
    return records


def walk_receipts(records: ShardRecords) -> Iterator[tuple[LinePlace, dict[str, Any]]]:
    """Give the receipts that count one at a time, oldest first, and where each lies.

    Raises:
        DamagedData: a receipt of another storage version.
    """
    for name, limit in records.receipt_files:
        yield from _counted_lines(records, name, limit)


def read_receipt(folder: Path, place: LinePlace) -> dict[str, Any]:
    """Read one receipt again. Lines that counted once are never moved.

    Raises:
        DamagedData: it is no longer there, whole.
    """
    path = folder / place.file_name
    with path.open("rb") as file:
        file.seek(place.start)
        value = _unseal(file.read(place.num_bytes))
    if value is None:
        raise DamagedData(f"{path}: the receipt at byte {place.start} changed. Clear the extract stage.")
    return value


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


def _counted_lines(
    records: ShardRecords, name: str, limit: int | None
) -> Iterator[tuple[LinePlace, dict[str, Any]]]:
    path = records.folder / name
    stop = ignored = 0
    with path.open("rb") as file:
        for number, whole_line in enumerate(file, start=1):
            if not whole_line.endswith(b"\n"):
                break
            start, stop = stop, stop + len(whole_line)
            line = whole_line if limit is None else whole_line[: max(0, limit - start)]
            ignored += len(whole_line) - len(line)
            if not line:
                continue
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
                yield LinePlace(name, start, len(line)), value
    if ignored:
        logger.warning(
            "late records ignored file=%s ignored_bytes=%d: an older writer appended them after a newer one "
            "had begun", path, ignored,
        )  # fmt: skip


def _unseal(line: bytes) -> dict[str, Any] | None:
    body = line[:-_SEAL_BYTES] + b"}"
    if line[-_SEAL_BYTES:] != _SEAL % checksum(body)[-8:].encode():
        return None
    value: dict[str, Any] = json.loads(line)
    return value
