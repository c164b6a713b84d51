"""Stage ``verify``: every row of the plan is committed and is what its receipt says."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any

from eagle3_tasks.contracts.errors import DamagedData, EngineProblem
from eagle3_tasks.contracts.jobs import Progress
from eagle3_tasks.contracts.rows import RowRange
from eagle3_tasks.contracts.run_records import PlanRecord
from eagle3_tasks.data.dataset import Dataset
from eagle3_tasks.extraction.extract_stage import is_over_limit
from eagle3_tasks.host.stage_context import StageContext
from eagle3_tasks.storage.capture import Capture
from eagle3_tasks.storage.verify import set_aside, verify_samples

logger = logging.getLogger(__name__)

SAMPLE_TIER_SECONDS = 600.0
_NAMED = 5


def run_verify(context: StageContext) -> dict[str, Any]:
    """Check the plan's samples in the tier that the settings choose.

    Damage is set aside durably, so that clearing the extract tasks that the message names
    captures exactly these samples again.

    Raises:
        DamagedData: samples are missing or damaged; the message names files and shards.
        EngineProblem: more samples than the limit are quarantined in a shard.
    """
    began = time.monotonic()
    plan = context.read_record(PlanRecord)
    dataset = Dataset(context.layout.dataset(plan.dataset))
    samples = [dataset.sample(row) for row in range(plan.num_samples)]
    capture = Capture(context.layout.capture(plan.capture))
    capture.load_index()
    quarantined = _check_quarantine(context, plan, capture, samples)
    missing = [
        row
        for row, sample in enumerate(samples)
        if not capture.has(sample) and sample not in capture.quarantined
    ]
    if missing:
        raise DamagedData(
            f"{len(missing)} of {plan.num_samples} samples are not committed. "
            f"Clear the extract tasks {_shard_names(plan, missing)}; they capture what is missing."
        )
    tier = context.settings.extraction.verify_tier

    def report(done: int, total: int) -> None:
        context.report_progress(
            Progress(
                stage="verify",
                done=done,
                total=total,
                unit="segments",
                seconds=round(time.monotonic() - began, 1),
            )
        )

    committed = [sample for sample in dict.fromkeys(samples) if capture.has(sample)]
    result = verify_samples(
        capture,
        committed,
        tier=tier,
        max_seconds=SAMPLE_TIER_SECONDS if tier == "sample" else None,
        report_progress=report,
    )
    seconds = time.monotonic() - began
    logger.info(
        "capture verified tier=%s samples=%d segments=%d checked_samples=%d checked_bytes=%d "
        "damaged_segments=%d quarantined=%d is_complete=%s seconds=%.1f",
        tier, len(committed), result.num_segments, result.num_samples, result.num_bytes, len(result.damages),
        quarantined, result.is_complete, seconds,
    )  # fmt: skip
    if result.damages:
        set_aside(capture.folder, result.damages)
        damaged = {sample for damage in result.damages for sample in damage.samples}
        rows = [row for row, sample in enumerate(samples) if sample in damaged]
        files = "; ".join(f"{damage.segment}: {damage.reason}" for damage in result.damages[:_NAMED])
        more = f"; and {len(result.damages) - _NAMED} more files" if len(result.damages) > _NAMED else ""
        raise DamagedData(
            f"{len(rows)} of {plan.num_samples} samples are damaged in {capture.folder} ({files}{more}). "
            f"They are set aside. Clear the extract tasks {_shard_names(plan, rows)}; they capture exactly "
            "these samples again."
        )
    return {
        "tier": tier,
        "samples": len(committed),
        "tokens": sum(capture.num_tokens(sample) for sample in committed),
        "bytes": sum(capture.location(sample).num_bytes for sample in committed),
        "segments": result.num_segments,
        "checked_samples": result.num_samples,
        "checked_bytes": result.num_bytes,
        "is_complete": result.is_complete,
        "quarantined": quarantined,
        "seconds": round(seconds, 2),
    }


def _check_quarantine(context: StageContext, plan: PlanRecord, capture: Capture, samples: list[str]) -> int:
    total = 0
    for rows in plan.shards:
        names = set(samples[rows.start : rows.stop])
        given_up = [sample for sample in names if sample in capture.quarantined]
        total += len(given_up)
        if is_over_limit(len(given_up), len(names), context.settings):
            raise EngineProblem(
                f"{len(given_up)} of {len(names)} samples of {rows.name(plan.num_samples)} are quarantined, "
                f"more than {context.settings.extraction.max_quarantine_percent:g} %. Clear its extract task "
                "to try them again, or raise max_quarantine_percent."
            )
    return total


def _shard_names(plan: PlanRecord, rows: Iterable[int]) -> str:
    """Name the plan's shards that hold ``rows``, as the tasks are named."""
    shards: list[RowRange] = sorted({_shard_of(plan, row) for row in rows})
    names = [shard.name(plan.num_samples) for shard in shards]
    more = f" and {len(names) - 4 * _NAMED} more" if len(names) > 4 * _NAMED else ""
    return ", ".join(names[: 4 * _NAMED]) + more


def _shard_of(plan: PlanRecord, row: int) -> RowRange:
    return next(shard for shard in plan.shards if shard.start <= row < shard.stop)
