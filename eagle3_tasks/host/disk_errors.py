"""What the operating system says about a disk, as a problem of the node with its remedy."""

from __future__ import annotations

import errno
from collections.abc import Mapping

from eagle3_tasks.contracts.errors import DiskProblem
from eagle3_tasks.host.machine import host_name

REMEDIES: Mapping[int, str] = {
    errno.ENOSPC: "no space is left. Free some, then let the task retry.",
    errno.EDQUOT: "the quota is used up. Raise it or free space, then let the task retry.",
    errno.EROFS: "the file system is read-only. Look for its error in `dmesg`, mount it writable again.",
    errno.EIO: "the disk answered with an input/output error. Look for its error in `dmesg`.",
    errno.ESTALE: "the network file system's handle is stale. Mount it again.",
}


def is_disk_error(error: OSError) -> bool:
    """Tell whether ``error`` can have no other reason than the disk."""
    return error.errno in REMEDIES


def disk_problem(error: OSError) -> DiskProblem:
    """Translate what the system says about a file of ours."""
    fact = REMEDIES.get(error.errno or 0) or f"{error.strerror or error}."
    return DiskProblem(f"{host_name()}: {error.filename or 'the root folder'}: {fact}")
