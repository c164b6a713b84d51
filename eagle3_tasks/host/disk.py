"""The disk under a folder: what a writer may still use, and whether a write comes back at all.

``python -m eagle3_tasks.host.disk FOLDER`` prints the figures, then tries a small write: two
lines of JSON. It is a process of its own because a full Ceph pool, a dead NFS server or a
failing disk lets callers wait without an error, while ``df`` still smiles.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import sys
import time
from pathlib import Path

from eagle3_tasks.contracts import codec
from eagle3_tasks.contracts.errors import DiskProblem, RequestRefused
from eagle3_tasks.contracts.probes import DiskReport
from eagle3_tasks.contracts.stages import ProbeVerdict
from eagle3_tasks.host.child_command import Look, run_module
from eagle3_tasks.host.files import PRIVATE_FILE, sync_folder, temporary_sibling
from eagle3_tasks.host.mounts import mount_of

DEADLINE_SECONDS = 10.0
MINIMUM_INODES = 10_000
GB = 1e9
_PROBE_BYTES = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Write:
    seconds: float | None
    error: str | None


def read_disk(folder: Path, *, deadline_seconds: float = DEADLINE_SECONDS) -> DiskReport:
    """Report on the file system of ``folder``, or of its nearest parent that exists.

    Raises:
        DiskProblem: the system gives no figures for it.
    """
    look = run_module(__spec__.name, str(folder), deadline_seconds=deadline_seconds)
    return parse_report(str(folder), look)


def parse_report(path: str, look: Look) -> DiskReport:
    """Read what the process printed; what it had no time to print is stalled.

    Raises:
        DiskProblem: it ended without figures; the message says what it printed.
    """
    lines = look.output.splitlines()
    try:
        report = codec.loads(DiskReport, lines[0], where="disk figures") if lines else None
        write = codec.loads(_Write, lines[1], where="disk write") if len(lines) > 1 else None
    except RequestRefused:
        report = write = None
    if report is None and look.return_code is not None:
        raise DiskProblem(f"{path}: its file system can't be looked at: {look.said.strip()}.")
    if report is None:
        report = DiskReport(
            path=path,
            file_system=None,
            total_bytes=0,
            free_bytes=0,
            free_inodes=None,
            is_read_only=False,
            is_stalled=True,
            write_seconds=None,
        )
    if write is None:
        return dataclasses.replace(report, is_stalled=not report.is_read_only)
    return dataclasses.replace(report, write_seconds=write.seconds, write_error=write.error)


def judge_disk(report: DiskReport, needed_bytes: int, reserve_bytes: int) -> ProbeVerdict:
    """Decide whether ``needed_bytes`` can be written while ``reserve_bytes`` stay free."""
    missing = needed_bytes + reserve_bytes - report.free_bytes
    figures = {
        "path": report.path,
        "file_system": report.file_system,
        "total_bytes": report.total_bytes,
        "free_bytes": report.free_bytes,
        "free_inodes": report.free_inodes,
        "needed_bytes": needed_bytes,
        "reserve_bytes": reserve_bytes,
        "missing_bytes": max(0, missing),
        "is_stalled": report.is_stalled,
        "write_seconds": report.write_seconds,
    }
    problem = _problem(report, needed_bytes, reserve_bytes, missing)
    line = problem or (
        f"{_gb(report.free_bytes)} GB free under {report.path}, {_gb(needed_bytes)} GB needed beside the "
        f"reserve of {_gb(reserve_bytes)} GB; a write took {report.write_seconds or 0.0:.3f} s."
    )
    return ProbeVerdict(is_ready=problem is None, line=line, figures=figures)


def _problem(report: DiskReport, needed_bytes: int, reserve_bytes: int, missing: int) -> str | None:
    path = report.path
    if report.is_stalled:
        return (
            f"{path}: a small write did not come back in time, so the disk is stalled, as a full or broken "
            "network storage is, whatever it reports as free. Look at the storage and at `dmesg`."
        )
    if report.is_read_only:
        return (
            f"{path} is on a read-only file system. Look for its error in `dmesg`, mount it writable again."
        )
    if report.write_error is not None:
        return f"{path}: a small write failed: {report.write_error}. Mend that; nothing was started."
    if missing > 0:
        return (
            f"{_gb(report.free_bytes)} GB free under {path}, {_gb(needed_bytes)} GB needed for what is still "
            f"missing and {_gb(reserve_bytes)} GB kept in reserve. Free {_gb(missing)} GB, or lower "
            "disk_reserve_gb."
        )
    if report.free_inodes is not None and report.free_inodes < MINIMUM_INODES:
        return (
            f"{path}: {report.free_inodes} inodes are free, {MINIMUM_INODES} are needed. "
            "Delete small files, or make a file system with more inodes."
        )
    return None


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / GB:.1f}"


def _figures(folder: Path) -> DiskReport:
    status = os.statvfs(folder)
    mount = mount_of(folder)
    return DiskReport(
        path=str(folder),
        file_system=mount.file_system if mount else None,
        total_bytes=status.f_blocks * status.f_frsize,
        # What an unprivileged writer may use: blocks reserved for root are not free.
        free_bytes=status.f_bavail * status.f_frsize,
        # btrfs and some network file systems count no inodes at all.
        free_inodes=status.f_favail if status.f_files else None,
        is_read_only=bool(status.f_flag & os.ST_RDONLY) or (mount is not None and mount.is_read_only),
        is_stalled=False,
        write_seconds=None,
    )


def _try_write(folder: Path) -> _Write:
    path = temporary_sibling(folder / "disk_probe")
    began = time.monotonic()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE_FILE)
        try:
            os.write(descriptor, os.urandom(_PROBE_BYTES))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
            path.unlink(missing_ok=True)
        sync_folder(folder)
    except OSError as error:
        return _Write(seconds=None, error=error.strerror or errno.errorcode.get(error.errno or 0, "unknown"))
    return _Write(seconds=time.monotonic() - began, error=None)


def main(arguments: list[str]) -> int:
    """Print the figures, then the outcome of a write, each as soon as it is known."""
    folder = Path(arguments[0])
    folder = next(candidate for candidate in (folder, *folder.parents) if candidate.is_dir())
    report = _figures(folder)
    sys.stdout.write(codec.dumps(report) + "\n")
    sys.stdout.flush()
    if not report.is_read_only:
        sys.stdout.write(codec.dumps(_try_write(folder)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
