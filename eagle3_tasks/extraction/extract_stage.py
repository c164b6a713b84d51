"""Stage ``extract``: the hidden states of one shard's rows, whatever is still missing of them.

The first attempt and the tenth do the same: read the receipts of the whole capture, and
capture the samples of the rows that none of them names.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

from eagle3_tasks.contracts.errors import EngineProblem, OutOfMemory, RequestRefused
from eagle3_tasks.contracts.jobs import Progress
from eagle3_tasks.contracts.rows import RowRange
from eagle3_tasks.contracts.run_records import PlanRecord
from eagle3_tasks.contracts.settings import Settings
from eagle3_tasks.data.dataset import Dataset
from eagle3_tasks.engines.batches import batches_by_length
from eagle3_tasks.engines.interface import Engine
from eagle3_tasks.extraction.capture_facts import check_target_unchanged
from eagle3_tasks.extraction.shard_engine import load_shard_engine
from eagle3_tasks.extraction.shard_progress import STAGE, ShardProgress
from eagle3_tasks.host.stage_context import StageContext
from eagle3_tasks.storage.capture import Capture
from eagle3_tasks.storage.fault_points import fault_point
from eagle3_tasks.storage.manifest import make_manifest, write_manifest
from eagle3_tasks.storage.sample import CapturedSample
from eagle3_tasks.storage.shard_lock import shard_lock
from eagle3_tasks.storage.writer import ShardWriter

logger = logging.getLogger(__name__)

FURTHER_TRIES = 2
"""How often a sample that failed a guard is asked for again, alone."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Wanted:
    row: int
    sample: str
    token_ids: list[int]


def run_extract(context: StageContext) -> dict[str, Any]:
    """Complete the shard ``context.spec.rows``. See :func:`extract_rows`."""
    return extract_rows(context, lambda: load_shard_engine(context.settings))


def extract_rows(context: StageContext, load_engine: Callable[[], Engine]) -> dict[str, Any]:
    """Complete a shard with whatever engine ``load_engine`` gives; not called if nothing is missing.

    Raises:
        DiskProblem: the reserve was reached or the disk failed; all counted work is committed.
        EngineProblem: more samples than the limit could not be captured.
        InvalidInput: the target's files changed after the plan.
        RequestRefused: the spec names no rows, or rows that the dataset doesn't have.
    """
    plan = context.read_record(PlanRecord)
    rows = context.spec.rows
    if rows is None or rows.stop > plan.num_samples:
        raise RequestRefused(
            f"rows {rows} can't be extracted from {plan.num_samples} samples. Give a shard of the plan."
        )
    dataset = Dataset(context.layout.dataset(plan.dataset))
    samples = [dataset.sample(row) for row in range(rows.start, rows.stop)]
    lengths = dataset.lengths()[rows.start : rows.stop].tolist()
    tokens = dict(zip(samples, lengths, strict=True))
    capture = Capture(context.layout.capture(plan.capture))
    folder = capture.folder / rows.name(plan.num_samples)
    progress = ShardProgress(
        rows, num_samples=len(tokens), num_tokens=sum(tokens.values()), report=context.report_progress
    )

    def report_waiting(seconds: float) -> None:
        context.report_progress(
            Progress(stage=STAGE, done=0, total=len(tokens), unit="samples", seconds=round(seconds, 1))
        )

    with shard_lock(folder, report_waiting=report_waiting):
        fault_point("extract_started", folder.name)
        capture.load_index()
        missing = _missing_rows(capture, rows, samples, context.settings, progress)
        logger.info(
            "shard opened rows=[%d,%d) samples=%d reused=%d missing=%d",
            rows.start, rows.stop, len(tokens), progress.samples, len(missing),
        )  # fmt: skip
        if missing:
            check_target_unchanged(context.settings, capture.folder)
            wanted = [
                _Wanted(row=row, sample=samples[row - rows.start], token_ids=dataset.token_ids(row).tolist())
                for row in missing
            ]
            engine = load_engine()
            with ShardWriter(
                folder,
                segment_bytes=context.settings.extraction.segment_mb * 1_000_000,
                reserve_bytes=int(context.settings.host.disk_reserve_gb * 1e9),
                on_commit=progress.count_receipt,
            ) as writer:
                _ShardExtraction(context.settings, engine, writer, progress, num_samples=len(tokens)).run(
                    wanted
                )
            capture.load_index()
        write_manifest(folder, make_manifest(capture, dataset=plan.dataset, rows=rows, samples=samples))
    progress.report(log_seconds=float("inf"))
    logger.info(
        "shard written rows=[%d,%d) samples=%d tokens=%d bytes=%d seconds=%.1f extracted=%d reused=%d "
        "quarantined=%d",
        rows.start, rows.stop, progress.samples, progress.tokens, progress.bytes, progress.seconds,
        progress.extracted, progress.samples - progress.extracted, progress.quarantined,
    )  # fmt: skip
    return {
        "rows": [rows.start, rows.stop],
        "samples": progress.samples,
        "extracted": progress.extracted,
        "reused": progress.samples - progress.extracted,
        "quarantined": progress.quarantined,
        "tokens": progress.tokens,
        "bytes": progress.bytes,
        "seconds": round(progress.seconds, 2),
    }


def _missing_rows(
    capture: Capture, rows: RowRange, samples: Sequence[str], settings: Settings, progress: ShardProgress
) -> list[int]:
    """Find the rows to capture, and count the rest.

    Samples that an earlier attempt gave up stay given up while they are within the limit;
    beyond it the shard has failed, and a retry is a new chance for all of them.
    """
    first_rows = {sample: row for row, sample in reversed(list(enumerate(samples, start=rows.start)))}
    given_up = [sample for sample in first_rows if sample in capture.quarantined]
    if is_over_limit(len(given_up), len(first_rows), settings):
        logger.info("quarantined samples are tried again samples=%d", len(given_up))
        given_up = []
    for sample in given_up:
        progress.count_quarantined(num_tokens=capture.quarantined[sample].num_tokens)
    skipped = set(given_up)
    missing: list[int] = []
    for sample, row in first_rows.items():
        if capture.has(sample):
            location = capture.location(sample)
            progress.count_reused(num_tokens=location.num_tokens, num_bytes=location.num_bytes)
        elif sample not in skipped:
            missing.append(row)
    return sorted(missing)


def is_over_limit(num_quarantined: int, num_samples: int, settings: Settings) -> bool:
    return num_quarantined * 100 > settings.extraction.max_quarantine_percent * num_samples


class _ShardExtraction:
    """Captures wanted samples batch by batch, judges each, and commits or quarantines it."""

    def __init__(
        self,
        settings: Settings,
        engine: Engine,
        writer: ShardWriter,
        progress: ShardProgress,
        *,
        num_samples: int,
    ) -> None:
        from eagle3_tasks.engines.huggingface import DTYPES

        self._settings = settings
        self._engine = engine
        self._writer = writer
        self._progress = progress
        self._num_samples = num_samples
        self._hidden_size = engine.describe().hidden_size
        self._dtype = DTYPES[settings.target.capture_dtype]

    def run(self, wanted: Sequence[_Wanted]) -> None:
        self._progress.begin_capture()
        lengths = [len(one.token_ids) for one in wanted]
        for batch in batches_by_length(lengths, self._settings.extraction.capture_batch_tokens):
            chosen = [wanted[index] for index in batch]
            for one, captured in zip(chosen, self._capture(chosen), strict=True):
                self._settle(one, captured)
            self._writer.commit_if_due()
            self._progress.report()

    def _capture(self, wanted: Sequence[_Wanted]) -> Sequence[CapturedSample | None]:
        try:
            captured = self._engine.capture([one.token_ids for one in wanted])
        except OutOfMemory as error:
            logger.warning("batch did not fit samples=%d: %s", len(wanted), error)
            return [None] * len(wanted)
        if len(captured) != len(wanted):
            raise EngineProblem(f"the engine gave {len(captured)} samples for {len(wanted)}. Restart it.")
        return captured

    def _settle(self, wanted: _Wanted, captured: CapturedSample | None) -> None:
        from eagle3_tasks.storage.guards import find_fault

        reason: str | None = None
        for attempt in range(1 + FURTHER_TRIES):
            if attempt:
                (captured,) = self._capture([wanted])
            reason = "it does not fit into memory"
            if captured is not None:
                reason = find_fault(
                    captured, token_ids=wanted.token_ids, hidden_size=self._hidden_size, dtype=self._dtype
                )
                if reason is None:
                    self._writer.append(wanted.sample, captured)
                    return
            logger.warning(
                "sample refused row=%d sample=%s tokens=%d attempt=%d reason=%s",
                wanted.row, wanted.sample, len(wanted.token_ids), attempt + 1, reason,
            )  # fmt: skip
        self._quarantine(wanted, str(reason))

    def _quarantine(self, wanted: _Wanted, reason: str) -> None:
        num_tokens = len(wanted.token_ids)
        self._writer.quarantine(sample=wanted.sample, row=wanted.row, num_tokens=num_tokens, reason=reason)
        self._progress.count_quarantined(num_tokens=num_tokens)
        num_quarantined = self._progress.quarantined
        if is_over_limit(num_quarantined, self._num_samples, self._settings):
            raise EngineProblem(
                f"{num_quarantined} of {self._num_samples} samples could not be captured, more than the "
                f"{self._settings.extraction.max_quarantine_percent:g} % that max_quarantine_percent allows. "
                f"The last: row {wanted.row}: {reason}. The shard's quarantine file lists all. Mend the "
                "engine and clear the shard, or raise the limit."
            )
