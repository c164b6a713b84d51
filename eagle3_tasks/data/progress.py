"""How far a data stage is: rate and time left from what is done, at most once a second."""

from __future__ import annotations

import time

from eagle3_tasks.contracts.jobs import Progress
from eagle3_tasks.host.stage_context import StageContext

_SECONDS_BETWEEN = 1.0


class ProgressClock:
    """Reports progress of one stage; cheap enough for every row."""

    def __init__(self, context: StageContext, *, stage: str, unit: str, total: int) -> None:
        self._context = context
        self._stage = stage
        self._unit = unit
        self._total = total
        self._began = self._last = time.monotonic()

    def seconds(self) -> float:
        return time.monotonic() - self._began

    def update(self, done: int, **values: float) -> None:
        """Say that ``done`` of the total is done. ``values`` are further figures to show."""
        now = time.monotonic()
        if now - self._last < _SECONDS_BETWEEN and done < self._total:
            return
        self._last = now
        seconds = max(now - self._began, 1e-3)
        rate = done / seconds
        self._context.report_progress(
            Progress(
                stage=self._stage,
                done=done,
                total=self._total,
                unit=self._unit,
                seconds=round(seconds, 1),
                rate_per_second=round(rate, 1),
                eta_seconds=round((self._total - done) / rate, 1) if done else None,
                values=values,
            )
        )
