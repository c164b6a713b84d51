"""Errors of other libraries and of the operating system, translated once, at the edge."""

from __future__ import annotations

import errno

from eagle3_tasks.contracts.errors import DiskProblem, OutOfMemory, PipelineError, UnexpectedFailure

_DISK = {
    errno.ENOSPC: "no space is left. Free some, then let the task retry.",
    errno.EDQUOT: "the quota is used up. Raise it or free space, then let the task retry.",
    errno.EROFS: "the file system is read-only. Look for its error in `dmesg`, mount it writable again.",
    errno.EIO: "the disk answered with an input/output error. Look for its error in `dmesg`.",
    errno.ESTALE: "the network file system's handle is stale. Mount it again.",
}


def translate(error: Exception) -> PipelineError:
    """Give the pipeline's own error for whatever ended a stage."""
    if isinstance(error, PipelineError):
        return error
    if isinstance(error, OSError) and error.errno in _DISK:
        where = error.filename or "the root folder"
        return DiskProblem(f"{where}: {_DISK[error.errno]}")
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return OutOfMemory(f"out of memory: {error}. Lower capture_batch_tokens or batch_tokens.")
    return UnexpectedFailure(f"{type(error).__name__}: {error}. The traceback is in the log.")
