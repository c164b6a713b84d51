"""How far a shard is, by its receipts: the figures of the log, the page and the report."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from eagle3_tasks.contracts.jobs import Progress
from eagle3_tasks.contracts.receipts import Receipt
from eagle3_tasks.contracts.rows import RowRange

logger = logging.getLogger(__name__)

STAGE = "extract"
_LOG_SECONDS = 10.0


class ShardProgress:
    """Counts committed samples, tokens and bytes of one shard.

    A rate is that of this attempt, counted from its first captured batch, so that neither
    loading the target nor what was reused distorts the estimate.
    """

    def __init__(
        self,
        rows: RowRange,
        *,
        num_samples: int,
        num_tokens: int,
        report: Callable[[Progress], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rows = rows
        self._total_samples = num_samples
        self._total_tokens = num_tokens
        self._report = report
        self._clock = clock
        self._began = clock()
        self._capture_began: float | None = None
        self._logged = self._began
        self._extracted_tokens = 0
        self.samples = self.tokens = self.bytes = 0
        self.extracted = 0
        self.quarantined = self._quarantined_tokens = 0

    @property
    def seconds(self) -> float:
        return self._clock() - self._began

    def count_reused(self, *, num_tokens: int, num_bytes: int) -> None:
        self.samples += 1
        self.tokens += num_tokens
        self.bytes += num_bytes

    def count_quarantined(self, *, num_tokens: int) -> None:
        self.quarantined += 1
        self._quarantined_tokens += num_tokens

    def begin_capture(self) -> None:
        self._capture_began = self._clock()

    def count_receipt(self, receipt: Receipt) -> None:
        """Count a commit; each one is a line of the log."""
        tokens = sum(record.num_tokens for record in receipt.samples)
        self.samples += len(receipt.samples)
        self.extracted += len(receipt.samples)
        self.tokens += tokens
        self._extracted_tokens += tokens
        self.bytes += sum(record.num_bytes for record in receipt.samples)
        self.report(log_seconds=0.0)

    def report(self, *, log_seconds: float = _LOG_SECONDS) -> None:
        """Hand on the progress, and log it when the last line is ``log_seconds`` old."""
        samples_per_second, tokens_per_second, eta_seconds = self._rates()
        values: dict[str, float] = {
            "tokens": self.tokens,
            "bytes": self.bytes,
            "quarantined": self.quarantined,
        }
        if tokens_per_second is not None:
            values["tokens_per_second"] = round(tokens_per_second, 1)
        self._report(
            Progress(
                stage=STAGE,
                done=self.samples,
                total=self._total_samples,
                unit="samples",
                seconds=round(self.seconds, 1),
                rate_per_second=_rounded(samples_per_second),
                eta_seconds=_rounded(eta_seconds),
                values=values,
            )
        )
        now = self._clock()
        if now - self._logged < log_seconds:
            return
        self._logged = now
        logger.info(
            "extract rows=[%d,%d) samples=%d/%d tokens=%d bytes=%d samples_per_second=%s "
            "tokens_per_second=%s eta_seconds=%s",
            self._rows.start, self._rows.stop, self.samples, self._total_samples, self.tokens, self.bytes,
            _shown(samples_per_second), _shown(tokens_per_second), _shown(eta_seconds),
        )  # fmt: skip

    def _rates(self) -> tuple[float | None, float | None, float | None]:
        if self._capture_began is None or not self.extracted:
            return None, None, None
        seconds = max(self._clock() - self._capture_began, 1e-6)
        tokens_per_second = self._extracted_tokens / seconds
        left = self._total_tokens - self.tokens - self._quarantined_tokens
        return self.extracted / seconds, tokens_per_second, left / tokens_per_second


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


def _shown(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1f}"
