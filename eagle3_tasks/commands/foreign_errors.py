"""Errors of other libraries and of the operating system, translated once, at the edge."""

from __future__ import annotations

from eagle3_tasks.contracts.errors import OutOfMemory, PipelineError, UnexpectedFailure
from eagle3_tasks.host.disk_errors import disk_problem, is_disk_error


def translate(error: Exception) -> PipelineError:
    """Give the pipeline's own error for whatever ended a stage."""
    if isinstance(error, PipelineError):
        return error
    if isinstance(error, OSError) and is_disk_error(error):
        return disk_problem(error)
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return OutOfMemory(f"out of memory: {error}. Lower capture_batch_tokens or batch_tokens.")
    return UnexpectedFailure(f"{type(error).__name__}: {error}. The traceback is in the log.")
