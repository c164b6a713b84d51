"""What is still to ask about a job, and what to log of the answers. Pure: asks nobody itself."""

from __future__ import annotations

import dataclasses

from eagle3_airflow.log_lines import LogLines
from eagle3_tasks.contracts.errors import JobLost, PipelineError, UnexpectedFailure, error_from_record
from eagle3_tasks.contracts.jobs import JobState, JobStatus, PollItem


class JobFollower:
    """Follows one job until it has ended and its log has arrived.

    Each question confirms the piece of log that came with the answer before. A final
    state is read before the log is drained, so its last lines can't be missed.
    """

    def __init__(self, key: str, generation: int = 0) -> None:
        self._key = key
        self._generation = generation
        self._confirmed: int | None = None
        self._lines = LogLines()
        self._seen: tuple[JobState, int, str] | None = None
        self.final: JobStatus | None = None
        """The status with which the job ended, once its log is drained as well."""
        self.has_more_log = False

    def question(self) -> PollItem:
        return PollItem(key=self._key, generation=self._generation, confirmed=self._confirmed)

    def take(self, status: JobStatus) -> list[str]:
        """Take an answer and give the lines to log, oldest first.

        Raises:
            JobLost: the host knows no such job any more.
        """
        lines: list[str] = []
        if status.state == JobState.ABSENT:
            raise JobLost(
                f"the GPU host has no folder of job {self._key} any more. A retry starts it again; what it "
                "committed is kept as long as ROOT is."
            )
        if status.generation != self._generation:
            # Offsets belong to one generation's log.
            lines += self._lines.finish()
            self._generation, self._confirmed = status.generation, None
        if status.log is not None and status.log.stop > status.log.start:
            lines += self._lines.feed(status.log, log_path=status.log_path)
            self._confirmed = status.log.stop
            self.has_more_log = status.log.stop < status.log.size or status.state.is_final
        else:
            self.has_more_log = False
        if not status.state.is_final:
            change = (status.state, status.generation, status.detail)
            lines = lines if change == self._seen else [_state_line(status), *lines]
            self._seen = change
        elif not self.has_more_log:
            lines += [*self._lines.finish(), _state_line(status)]
            self.final = dataclasses.replace(status, log=None, progress=None)
        return lines


def _state_line(status: JobStatus) -> str:
    first_line = status.detail.split("\n", 1)[0]
    detail = f" detail={first_line}" if first_line else ""
    return f"job {status.state.value.lower()} key={status.key} generation={status.generation}{detail}"


def problem_of(status: JobStatus) -> PipelineError | None:
    """Give the error of a job that ended without success; the message names its log on the host."""
    if status.state == JobState.SUCCEEDED:
        return None
    error = status.exit.error if status.exit is not None else None
    is_named = status.log_path and error is not None and status.log_path in error.message
    where = f" Its log on the GPU host: {status.log_path}" if status.log_path and not is_named else ""
    if error is not None:
        return error_from_record(dataclasses.replace(error, message=error.message + where))
    if status.state == JobState.LOST:
        return JobLost(f"{status.detail or 'the processes are gone without an exit record'}.{where}")
    return UnexpectedFailure(f"job {status.key} ended as {status.state.value} without a reason.{where}")
