"""What the host says about its disk and its GPUs. None means UNKNOWN, never 0 and never idle."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiskReport:
    """One file system, as an unprivileged writer sees it.

    ``free_bytes`` is ``f_bavail`` times the fragment size: reserved blocks are not free.
    ``write_seconds`` is the time of a small write with fsync; None if it did not end
    within the deadline (``is_stalled``), as on a full Ceph pool while df still smiles.
    ``write_error`` is what the system said where it failed at once.
    """

    path: str
    file_system: str | None
    total_bytes: int
    free_bytes: int
    free_inodes: int | None
    is_read_only: bool
    is_stalled: bool
    write_seconds: float | None
    write_error: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuHolder:
    """A process that holds memory of a card."""

    pid: int
    used_mib: int | None
    user: str | None
    command: str | None
    is_ours: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuReport:
    """One card. ``needs_reset`` is true although such a card may look alive."""

    index: int
    uuid: str | None
    name: str
    total_mib: int | None
    used_mib: int | None
    utilization_percent: int | None
    needs_reset: bool | None
    is_mig: bool | None
    holders: tuple[GpuHolder, ...] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpusReport:
    """All cards, or why they can't be seen.

    ``is_broken``: the driver answers with an error that a retry doesn't mend.
    """

    cards: tuple[GpuReport, ...]
    problem: str | None
    is_broken: bool
