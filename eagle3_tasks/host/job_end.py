"""What the end of a job's command means: a state, and the class of its error."""

from __future__ import annotations

import dataclasses
import signal
import time
from pathlib import Path

from eagle3_tasks.contracts.errors import (
    Cancelled,
    ErrorRecord,
    JobLost,
    OutOfMemory,
    PipelineError,
    RequestRefused,
    UnexpectedFailure,
    error_from_exit_code,
)
from eagle3_tasks.contracts.jobs import MAX_REPORT_BYTES, ExitRecord, JobState
from eagle3_tasks.contracts.stages import ERROR_FILE, REPORT_FILE
from eagle3_tasks.host import job_records as records
from eagle3_tasks.host.job_folder import read_leniently, read_report
from eagle3_tasks.host.log_delivery import last_lines


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stop:
    """Why the runner ended the command itself."""

    error: PipelineError

    @property
    def state(self) -> JobState:
        return JobState.CANCELLED if isinstance(self.error, Cancelled) else JobState.FAILED


def stop_for_cancel(record: records.CancelRecord | None) -> Stop:
    reason = record.reason if record and record.reason else "no reason was given"
    return Stop(error=Cancelled(f"cancelled: {reason}."))


def stop_for_orphan(orphan_minutes: float) -> Stop:
    return Stop(
        error=JobLost(
            f"nobody asked about this job for {orphan_minutes:g} min, so it stopped by itself. "
            "What is committed counts; a retry goes on from there."
        )
    )


def stop_for_signal(number: int) -> Stop:
    return Stop(
        error=JobLost(
            f"the job's runner was told to end by {signal.Signals(number).name}, as at a shutdown of the "
            "machine. What is committed counts; a retry goes on from there."
        )
    )


def exit_record(
    folder: Path, *, return_code: int, stop: Stop | None, memory_kills: int, seconds: float
) -> ExitRecord:
    """Classify a command's end.

    Args:
        folder: the generation's folder, with what the command left there.
        return_code: as subprocess gives it: the exit code, or minus the signal's number.
        stop: why the runner ended it; None where it ended by itself.
        memory_kills: processes that the kernel killed for memory in its group meanwhile.
        seconds: how long the command ran.
    """
    error: ErrorRecord | None
    if stop is not None:
        state, error = stop.state, stop.error.record()
    else:
        error = _classify(folder, return_code, memory_kills)
        state = JobState.FAILED if error else JobState.SUCCEEDED
    return ExitRecord(
        state=state,
        exit_code=return_code if return_code >= 0 else None,
        signal=-return_code if return_code < 0 else None,
        error=error,
        ended_at=time.time(),
        seconds=seconds,
    )


def failed_before_start(error: PipelineError) -> ExitRecord:
    """Record the end of a job whose command never ran."""
    state = JobState.CANCELLED if isinstance(error, Cancelled) else JobState.FAILED
    return ExitRecord(
        state=state, exit_code=None, signal=None, error=error.record(), ended_at=time.time(), seconds=0.0
    )


def _classify(folder: Path, return_code: int, memory_kills: int) -> ErrorRecord | None:
    if return_code == 0:
        return _report_problem(folder)
    was_killed = return_code in (-signal.SIGKILL, 128 + signal.SIGKILL)
    if was_killed and memory_kills > 0:
        return OutOfMemory(
            _with_log(folder, f"the kernel killed {memory_kills} process(es) of the job for memory.")
        ).record()
    own = read_leniently(ErrorRecord, folder / ERROR_FILE)
    if own is not None and own.kind in ("user", "node"):
        return own
    if return_code < 0:
        fact = f"the command was ended by {_signal_name(-return_code)}, which the pipeline did not send."
        return UnexpectedFailure(_with_log(folder, fact)).record()
    fact = own.message if own else f"the command ended with exit code {return_code}."
    problem = error_from_exit_code(return_code, _with_log(folder, fact))
    if problem.kind in ("user", "node"):
        return problem.record()
    # Nobody asked for a cancellation, and a command on the host is not unreachable.
    return UnexpectedFailure(str(problem)).record()


def _report_problem(folder: Path) -> ErrorRecord | None:
    path = folder / REPORT_FILE
    try:
        read_report(folder)
        size = path.stat().st_size if path.exists() else 0
    except RequestRefused as error:
        return UnexpectedFailure(f"the command succeeded, but its report can't be read: {error}").record()
    if size > MAX_REPORT_BYTES:
        return UnexpectedFailure(
            f"the command succeeded, but its report of {size} bytes is above {MAX_REPORT_BYTES}: {path}"
        ).record()
    return None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _with_log(folder: Path, fact: str) -> str:
    path = folder / records.LOG_FILE
    lines = last_lines(path)
    said = f" Its last lines:\n{lines}" if lines else " It printed nothing."
    return f"{fact} The whole log is {path} on the host.{said}"
