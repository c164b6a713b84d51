"""The disk's own errors, each in its own words, and the reserve that is never used."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from eagle3_tasks.contracts.errors import DiskProblem

GB = 1e9

_CAUSES = {
    errno.EDQUOT: ("the user's quota is used up", "Free space or raise the quota."),
    errno.EROFS: ("the file system is read-only", "Look at the kernel log and remount it writable."),
    errno.EIO: ("the disk answered with an input/output error", "Look at the kernel log."),
    errno.ESTALE: ("the network file system has lost the file (stale handle)", "Remount it."),
    errno.EACCES: ("permission is denied", "Let the login's user own the folder."),
    errno.EPERM: ("permission is denied", "Let the login's user own the folder."),
}  # fmt: skip


def free_bytes(folder: Path) -> int:
    """Count what an unprivileged writer may still use: reserved blocks are not free."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def check_reserve(folder: Path, *, needed_bytes: int, reserve_bytes: int, missing: str) -> None:
    """Refuse a write that would reach into the reserve.

    Args:
        folder: any folder on the file system.
        needed_bytes: what is about to be written.
        reserve_bytes: free space that must remain.
        missing: what still has to be written in all, for the message.

    Raises:
        DiskProblem: too little is free; Airflow retries later.
    """
    free = free_bytes(folder)
    if free - needed_bytes < reserve_bytes:
        raise DiskProblem(
            f"{socket.gethostname()}: {free / GB:.1f} GB free under {folder}, of which "
            f"{reserve_bytes / GB:.1f} GB are the reserve; {missing}. All counted work is committed. Free "
            "space or lower disk_reserve_gb; a retry goes on from here."
        )


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Translate what the operating system says about ``path`` into a DiskProblem.

    Raises:
        DiskProblem: any OSError of the block.
    """
    try:
        yield
    except OSError as error:
        raise disk_problem(error, path) from error


def disk_problem(error: OSError, path: Path) -> DiskProblem:
    """Word one error of the operating system."""
    fact, remedy = _CAUSES.get(error.errno or 0, (str(error), "Look at the kernel log."))
    if error.errno == errno.ENOSPC:
        fact, remedy = _no_space(path)
    return DiskProblem(f"{socket.gethostname()}: {path} could not be written: {fact}. {remedy}")


def _no_space(path: Path) -> tuple[str, str]:
    with contextlib.suppress(OSError):
        status = os.statvfs(path.parent)
        if status.f_files and not status.f_favail:
            return "no inodes are left on the file system", "Delete small files that nobody needs."
    return "no space is left on the file system", "Free space; a retry goes on from here."
