"""ROOT on this host: absolute, durable, private, writable, and local where locks must hold."""

from __future__ import annotations

import errno
import getpass
import os
from pathlib import Path

from eagle3_tasks.contracts.errors import DiskProblem, InvalidSettings
from eagle3_tasks.host.disk_errors import disk_problem
from eagle3_tasks.host.files import PRIVATE_FILE, make_private_folder, temporary_sibling
from eagle3_tasks.host.machine import host_name
from eagle3_tasks.host.mounts import MEMORY_FILE_SYSTEMS, NETWORK_FILE_SYSTEMS, Mount, mount_of

_EMPTIED_AT_BOOT = (Path("/tmp"), Path("/run"), Path("/dev"))  # noqa: S108 - named to be refused

_TYPED_WRONG = {
    errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG,
    errno.EINVAL,
}  # fmt: skip
"""What the system says to a ROOT that was chosen wrong. All else is the disk, and may pass."""


def prepare_root(root: Path, *, make_root: bool) -> Path:
    """Check that jobs can live under ROOT; make it and its folder of jobs if that is asked.

    Not asked, a ROOT that is missing is a disk that is not mounted: made anew on the disk
    below, it would hold no jobs, and all that was done would begin again there.

    Raises:
        InvalidSettings: they can't; the message names path, user and remedy.
        DiskProblem: ROOT is not there, or its disk is full, read-only or broken.
    """
    if not root.is_absolute() or ".." in root.parts:
        raise InvalidSettings(f"root is {str(root)!r}; an absolute path without '..' is needed.")
    jobs = root / "jobs"
    for folder in (root, jobs):
        problem = durability_problem(folder, mount_of(folder))
        if problem:
            raise InvalidSettings(problem)
    if not make_root and not jobs.is_dir():
        raise DiskProblem(
            f"{host_name()}: ROOT is not there: {root} is no folder with jobs in it. Is the data disk "
            "mounted? Mount it; a retry then goes on."
        )
    try:
        make_private_folder(jobs)
        _try_writing(jobs)
    except OSError as error:
        if error.errno not in _TYPED_WRONG:
            raise disk_problem(error) from error
        raise InvalidSettings(
            f"{host_name()}: user {_user_name()!r} can't write in {error.filename or jobs}: "
            f"{error.strerror}. Choose another root, or give this user the right to write there."
        ) from error
    return root


def durability_problem(folder: Path, mount: Mount | None) -> str | None:
    """Say why jobs can't live in ``folder``, which lies on ``mount``; None if they can."""
    resolved = folder.resolve()
    remedy = "Choose a root on a local, durable disk."
    for emptied in _EMPTIED_AT_BOOT:
        if resolved == emptied or emptied in resolved.parents:
            return f"{folder} lies under {emptied}, which a reboot empties. {remedy}"
    if mount is None:
        return None
    if mount.file_system in MEMORY_FILE_SYSTEMS:
        return f"{folder} lies on a {mount.file_system}, which a reboot empties. {remedy}"
    if folder.name == "jobs" and mount.file_system in NETWORK_FILE_SYSTEMS:
        return (
            f"{folder} lies on a network file system ({mount.file_system}), where locks and renames "
            f"don't hold as jobs need them. {remedy} Or mount a local disk at {folder}; captures may stay "
            "where they are."
        )
    return None


def _try_writing(folder: Path) -> None:
    # A name of its own for each try: one agent works on many submits at once.
    path = temporary_sibling(folder / "writable")
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE_FILE))
    path.unlink()


def _user_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
