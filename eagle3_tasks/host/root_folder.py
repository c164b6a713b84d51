"""ROOT on this host: absolute, durable, private, writable, and local where locks must hold."""

from __future__ import annotations

import getpass
import os
from pathlib import Path

from eagle3_tasks.contracts.errors import InvalidSettings
from eagle3_tasks.host.files import PRIVATE_FILE, make_private_folder
from eagle3_tasks.host.machine import host_name
from eagle3_tasks.host.mounts import MEMORY_FILE_SYSTEMS, NETWORK_FILE_SYSTEMS, Mount, mount_of

_EMPTIED_AT_BOOT = (Path("/tmp"), Path("/run"), Path("/dev"))  # noqa: S108 - named to be refused


def prepare_root(root: Path) -> Path:
    """Make ROOT and its folder of jobs if they are missing, and check that jobs can live there.

    Raises:
        InvalidSettings: they can't; the message names path, user and remedy.
    """
    if not root.is_absolute() or ".." in root.parts:
        raise InvalidSettings(f"root is {str(root)!r}; an absolute path without '..' is needed.")
    jobs = root / "jobs"
    for folder in (root, jobs):
        problem = durability_problem(folder, mount_of(folder))
        if problem:
            raise InvalidSettings(problem)
    try:
        make_private_folder(jobs)
        _try_writing(jobs)
    except OSError as error:
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
    path = folder / f".writable.{os.getpid()}"
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, PRIVATE_FILE))
    path.unlink()


def _user_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
