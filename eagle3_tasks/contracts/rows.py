"""Row ranges: how the input is cut into shards."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from eagle3_tasks.contracts.errors import InvalidSettings, RequestRefused

MINIMUM_ROW_DIGITS = 6
MAX_SHARDS = 1024
"""Airflow's default ``[core] max_map_length``: more mapped tasks are refused there."""
_PATTERN = re.compile(r"rows_(\d{6,})-(\d{6,})")


@dataclasses.dataclass(frozen=True, kw_only=True, order=True)
class RowRange:
    """A half-open range of row numbers, ``[start, stop)``."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise RequestRefused(f"[{self.start}, {self.stop}) is not a row range: 0 <= start < stop.")

    def __len__(self) -> int:
        return self.stop - self.start

    def name(self, num_rows: int) -> str:
        """Give the folder name, such as ``rows_002000-004000``.

        Args:
            num_rows: rows of the whole dataset; its width pads the numbers, at least to
                six digits, so that names sort like numbers.
        """
        digits = max(MINIMUM_ROW_DIGITS, len(str(num_rows)))
        return f"rows_{self.start:0{digits}d}-{self.stop:0{digits}d}"


def parse_row_range(name: str) -> RowRange:
    """Read a range back from its folder name.

    Raises:
        RequestRefused: ``name`` is not of the form that :meth:`RowRange.name` gives.
    """
    match = _PATTERN.fullmatch(name)
    if match is None:
        raise RequestRefused(f"{name!r} is not the name of a row range, such as 'rows_002000-004000'.")
    return RowRange(start=int(match[1]), stop=int(match[2]))


def split_rows(num_rows: int, rows_per_shard: int) -> Iterator[RowRange]:
    """Cut ``num_rows`` into consecutive ranges; only the last may be shorter.

    The result depends on the two numbers alone, so the orchestrator and the host agree
    on every shard without talking to each other.
    """
    for start in range(0, num_rows, rows_per_shard):
        yield RowRange(start=start, stop=min(start + rows_per_shard, num_rows))


def choose_shards(num_rows: int, rows_per_shard: int, *, setting: str) -> tuple[RowRange, ...]:
    """Cut ``num_rows`` into shards that Airflow can map over.

    Raises:
        InvalidSettings: they are too many; the message proposes a value for ``setting``.
    """
    num_shards = -(-num_rows // rows_per_shard)
    if num_shards > MAX_SHARDS:
        raise InvalidSettings(
            f"{num_rows} rows with {setting} {rows_per_shard} make {num_shards} shards; Airflow maps at most "
            f"{MAX_SHARDS}. Set {setting} to at least {-(-num_rows // MAX_SHARDS)}."
        )
    return tuple(split_rows(num_rows, rows_per_shard))
