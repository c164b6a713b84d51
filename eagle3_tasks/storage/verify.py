"""Proving that what receipts say is what lies on the disk. Standard library alone.

Tiers: ``quick`` compares receipts with the sizes of files; ``sample`` checks headers and
the checksums of some samples of each segment; ``full`` checks all bytes.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import random
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from eagle3_tasks.contracts.errors import DamagedData
from eagle3_tasks.contracts.receipts import VoidRecord
from eagle3_tasks.host.files import sync_folder
from eagle3_tasks.storage import names
from eagle3_tasks.storage.capture import Capture
from eagle3_tasks.storage.disk_guard import disk_errors
from eagle3_tasks.storage.fault_points import fault_point
from eagle3_tasks.storage.receipts import append_record, read_shard
from eagle3_tasks.storage.recovery import cut_torn_line
from eagle3_tasks.storage.segment_format import (
    DTYPE_NAMES,
    TensorPlace,
    checksum,
    expected_shapes,
    read_header,
)
from eagle3_tasks.storage.shard_lock import shard_lock

logger = logging.getLogger(__name__)

Tier = Literal["quick", "sample", "full"]

_SAMPLES_PER_SEGMENT = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Damage:
    """Samples of one segment that aren't what their receipt says.

    ``segment`` is relative to the capture's folder.
    """

    segment: str
    samples: tuple[str, ...]
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyResult:
    """What was looked at, and what was found.

    ``is_complete`` is false when the time ran out before the tier was through.
    """

    num_segments: int
    num_samples: int
    num_bytes: int
    damages: tuple[Damage, ...]
    is_complete: bool


def verify_samples(
    capture: Capture,
    samples: Iterable[str],
    *,
    tier: Tier,
    seed: int = 0,
    max_seconds: float | None = None,
    report_progress: Callable[[int, int], None] | None = None,
) -> VerifyResult:
    """Check committed samples against their receipts.

    Args:
        capture: with its index loaded.
        samples: names of committed samples.
        tier: how deep.
        seed: of the choice of samples and of the order of segments.
        max_seconds: stop at about this time; sizes are always checked for all.
        report_progress: called with the segments done and in all.
    """
    began = time.monotonic()
    by_segment: dict[str, list[str]] = collections.defaultdict(list)
    for sample in dict.fromkeys(samples):
        by_segment[capture.location(sample).segment].append(sample)
    damages: dict[str, Damage] = {}
    for segment in by_segment:
        reason = _size_fault(capture.folder / segment, capture.segment_bytes(segment))
        if reason is not None:
            damages[segment] = _whole_segment(segment, capture.receipt(segment), reason)
    order = sorted(by_segment.keys() - damages.keys()) if tier != "quick" else []
    choice = random.Random(seed)  # noqa: S311 - a choice of samples, no secret
    choice.shuffle(order)
    num_samples = num_bytes = num_done = 0
    for segment in order:
        if max_seconds is not None and time.monotonic() - began > max_seconds:
            break
        names_here = by_segment[segment]
        chosen = (
            names_here
            if tier == "full"
            else choice.sample(names_here, min(_SAMPLES_PER_SEGMENT, len(names_here)))
        )
        damage = _check_segment(capture, segment, chosen)
        if damage is not None and len(chosen) < len(names_here):
            damage = _check_segment(capture, segment, names_here)
        if damage is not None:
            damages[segment] = damage
        num_samples += len(chosen)
        num_bytes += sum(capture.location(sample).num_bytes for sample in chosen)
        num_done += 1
        if report_progress is not None:
            report_progress(num_done, len(order))
    return VerifyResult(
        num_segments=len(by_segment),
        num_samples=num_samples,
        num_bytes=num_bytes,
        damages=tuple(damages[segment] for segment in sorted(damages)),
        is_complete=num_done == len(order),
    )


def set_aside(capture_folder: Path, damages: Iterable[Damage]) -> None:
    """Void damaged samples durably: for every reader they are missing from now on.

    A segment with no sample left is renamed, so that nobody takes it for a good one and
    a person can still look at it.
    """
    for damage in damages:
        folder, name = (capture_folder / damage.segment).parent, Path(damage.segment).name
        path = folder / names.VOIDS
        with shard_lock(folder), disk_errors(path):
            cut_torn_line(path)
            void = VoidRecord(
                segment=name, samples=damage.samples, reason=damage.reason, voided_at=time.time()
            )
            append_record(path, void)
            fault_point("void_appended", folder.name)
            for manifest in folder.iterdir():
                if names.is_manifest(manifest.name):
                    manifest.unlink()
            if not _has_good_samples(folder, name) and (folder / name).exists():
                (folder / name).replace(folder / (name + names.SET_ASIDE_SUFFIX))
            sync_folder(folder)
        logger.warning(
            "damage set aside segment=%s samples=%d reason=%s",
            damage.segment,
            len(damage.samples),
            damage.reason,
        )


def _has_good_samples(folder: Path, segment: str) -> bool:
    records = read_shard(folder)
    return any(
        (segment, entry["sample"]) not in records.voided
        for receipt in records.receipts
        if receipt["segment"] == segment
        for entry in receipt["samples"]
    )


def _whole_segment(segment: str, receipt: dict[str, Any], reason: str) -> Damage:
    samples = tuple(str(record["sample"]) for record in receipt["samples"])
    return Damage(segment=segment, samples=samples, reason=reason)


def _size_fault(path: Path, expected: int) -> str | None:
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return "the file is missing"
    except OSError as error:
        return f"the file can't be looked at ({error})"
    return None if size == expected else f"{size} bytes lie on the disk, the receipt says {expected}"


def _check_segment(capture: Capture, segment: str, samples: Sequence[str]) -> Damage | None:
    path = capture.folder / segment
    receipt = capture.receipt(segment)
    records: dict[str, dict[str, Any]] = {record["sample"]: record for record in receipt["samples"]}
    try:
        places, header_checksum = read_header(path)
        if header_checksum != receipt["header_checksum"]:
            return _whole_segment(segment, receipt, "the header's checksum is wrong")
        faults = [
            (sample, fault)
            for sample in samples
            if (fault := _sample_fault(path, places, records[sample])) is not None
        ]
    except (OSError, DamagedData) as error:
        return _whole_segment(segment, receipt, f"reading failed: {error}")
    if not faults:
        return None
    return Damage(segment=segment, samples=tuple(sample for sample, _ in faults), reason=faults[0][1])


def _sample_fault(path: Path, places: dict[str, TensorPlace], record: dict[str, Any]) -> str | None:
    sample: str = record["sample"]
    shapes = expected_shapes(record["num_tokens"], record["num_states"], record["hidden_size"])
    with path.open("rb") as file:
        for name, shape in shapes.items():
            place = places.get(f"{sample}.{name}")
            dtype = DTYPE_NAMES["int32" if name == "token_ids" else record["dtype"]]
            if place is None or place.shape != shape or place.dtype != dtype:
                return f"sample {sample}: {name} is not what the receipt says"
            file.seek(place.start)
            content = file.read(place.stop - place.start)
            if checksum(content) != record["checksums"][name]:
                return f"sample {sample}: the checksum of {name} is wrong"
    return None
