"""One job on the GPU host as one Airflow task: submit, defer, take the report, acknowledge.

Use :class:`RemoteJobOperator` for any command; :class:`~eagle3_airflow.operators.stage.StageOperator`
is the pipeline's own.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn, cast

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowException

from eagle3_airflow.airflow_errors import to_airflow
from eagle3_airflow.attempt import NOT_MAPPED, current_attempt
from eagle3_airflow.hooks.agent_session import AgentSession
from eagle3_airflow.job_follower import JobFollower, problem_of
from eagle3_airflow.release import current_release
from eagle3_airflow.remote_command import HostAddress
from eagle3_airflow.retries import MAX_RETRY_DELAY, RETRIES, RETRY_DELAY
from eagle3_airflow.triggers.host_trigger import where_to_wait
from eagle3_airflow.triggers.host_wait import HostWaitTrigger
from eagle3_airflow.triggers.outage import patience_left
from eagle3_airflow.triggers.remote_job import (
    RemoteJobTrigger,
    cancel_reason,
    is_cancel_of_another,
    task_states,
)
from eagle3_tasks.contracts import codec
from eagle3_tasks.contracts.errors import ErrorRecord, HostUnreachable, PipelineError, error_from_record
from eagle3_tasks.contracts.jobs import JobSpec, JobState, JobStatus, job_key, run_key

if TYPE_CHECKING:
    from airflow.sdk import Context

REPORT_KEY = "report"
ON_KILL_SECONDS = 4.0
"""Airflow sends SIGKILL five seconds after SIGTERM."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RemoteJob:
    """A job, where it runs, and how often it is asked for its state."""

    address: HostAddress
    spec: JobSpec
    poll_seconds: float


def acknowledge_job(context: Context) -> None:
    """Tell the host that Airflow has recorded the success; runs as ``on_success_callback``.

    Only now may a clear start the job anew. If this is lost, a clear hands the report over
    once more and nothing runs twice.
    """
    task = cast("Any", context)["task"]
    if isinstance(task, RemoteJobOperator):
        task.acknowledge()


class RemoteJobOperator(BaseOperator):
    """Run a command on the GPU host, once, whatever happens to Airflow meanwhile.

    The job is named by DAG, run, task and map index: an attempt that follows a crash finds
    the running job and joins it. Nothing of ``argv``, ``stdin`` or ``environment`` is
    rendered by Jinja or seen by a shell.

    Args:
        ssh_conn_id: Airflow connection of type ssh.
        root: absolute folder on the host, on a durable disk.
        argv: the command; the first word ``@python`` stands for the agent's interpreter.
        stdin: what the command reads.
        environment: variables for the command; readable by its user alone.
        python: interpreter on the host; empty: ROOT/env, else python3 if it is 3.11 or later, else
            the newest of python3.13, python3.12 and python3.11 on the PATH.
        poll_seconds: how often the job is asked for its state.
        orphan_minutes: a job that nobody has asked about for so long stops by itself.
        make_root: make ``root`` where it isn't there. Without it, a folder without jobs is
            taken for a disk that is not mounted.
        on_success_callback: run before the job is acknowledged.
    """

    ui_color = "#e8f0e4"
    template_fields: Collection[str] = ()

    def __init__(
        self,
        *,
        ssh_conn_id: str = "",
        root: str = "",
        argv: Sequence[str] = (),
        stdin: str = "",
        environment: Mapping[str, str] | None = None,
        python: str = "",
        poll_seconds: float = 5.0,
        orphan_minutes: float = 1440.0,
        make_root: bool = True,
        retries: int | None = RETRIES,
        retry_delay: timedelta | float = RETRY_DELAY,
        retry_exponential_backoff: float = 2.0,
        max_retry_delay: timedelta | float | None = MAX_RETRY_DELAY,
        on_success_callback: Callable[[Context], Any] | Collection[Callable[[Context], Any]] | None = None,
        **kwargs: Any,
    ) -> None:
        callbacks = on_success_callback or ()
        callbacks = [callbacks] if callable(callbacks) else list(callbacks)
        super().__init__(
            retries=retries,
            retry_delay=retry_delay,
            retry_exponential_backoff=retry_exponential_backoff,
            max_retry_delay=max_retry_delay,
            on_success_callback=[*callbacks, *([] if acknowledge_job in callbacks else [acknowledge_job])],
            **kwargs,
        )
        self.ssh_conn_id = ssh_conn_id
        self.root = root
        self.argv = argv
        self.stdin = stdin
        self.environment = environment
        self.python = python
        self.poll_seconds = poll_seconds
        self.orphan_minutes = orphan_minutes
        self.make_root = make_root
        self._job: RemoteJob | None = None
        self._context: Context | None = None
        self._succeeded: JobStatus | None = None
        self._is_killed = False

    def plan_job(self, context: Context) -> RemoteJob:
        """Say what to run and where. The same task of the same run always gives the same key.

        Raises:
            PipelineError: the task's arguments can't work.
        """
        attempt = current_attempt(context)
        part = "" if attempt.map_index == NOT_MAPPED else f"[{attempt.map_index}]"
        return RemoteJob(
            address=HostAddress(
                ssh_conn_id=self.ssh_conn_id,
                root=self.root,
                python=self.python,
                release=current_release().digest,
                make_root=self.make_root,
            ),
            spec=JobSpec(
                key=job_key(dag_id=attempt.dag_id, run_id=attempt.run_id, stage=self.task_id + part),
                stage=self.task_id,
                run_key=run_key(dag_id=attempt.dag_id, run_id=attempt.run_id),
                argv=tuple(self.argv),
                stdin=self.stdin,
                environment=dict(self.environment or {}),
                orphan_minutes=self.orphan_minutes,
            ),
            poll_seconds=self.poll_seconds,
        )

    def value_of(self, report: Mapping[str, Any]) -> Any:
        """Give what the task returns; the whole report is the XCom ``report`` in any case."""
        return dict(report)

    def execute(self, context: Context) -> Any:
        return self._submit(context, attempt=1)

    def on_host_answers(self, context: Context, event: dict[str, Any]) -> Any:
        """Try the submit again after an outage."""
        self._raise_error_of(event)
        return self._submit(context, attempt=int(event["attempt"]) + 1, since=float(event["since"]))

    def on_job_event(self, context: Context, event: dict[str, Any]) -> Any:
        """Take the job's end from the trigger."""
        self._raise_error_of(event)
        try:
            status = codec.from_plain(JobStatus, event["status"], where="trigger event")
        except PipelineError as error:
            raise to_airflow(error) from error
        return self._finish(context, status)

    def acknowledge(self) -> None:
        """Tell the host that the success is recorded; a host that is away is not waited for."""
        if self._succeeded is None or self._job is None:
            return
        try:
            with AgentSession(self._job.address, current_release()) as session:
                session.acknowledge(self._succeeded.key, self._succeeded.generation)
        except PipelineError as error:
            self.log.warning("success not acknowledged key=%s: %s", self._succeeded.key, error)

    def on_kill(self) -> None:
        """Record a cancel on the host, if it was a user who ended this task.

        The end of a worker sends the same signal, but then Airflow still counts the task as
        running, and the next attempt shall find its job alive.
        """
        self._is_killed = True
        # The signal may have come in the middle of a talk with Airflow, which this thread
        # would wait for in vain: so another one, for a bounded time.
        thread = threading.Thread(target=self._cancel_after_user_action, daemon=True)
        thread.start()
        thread.join(ON_KILL_SECONDS)

    def _submit(self, context: Context, *, attempt: int, since: float | None = None) -> Any:
        """Submit the job; ``since`` is when the first of the attempts before this one failed."""
        job = self._plan(context)
        try:
            with AgentSession(job.address, current_release()) as session:
                if self._is_killed:
                    raise AirflowException("the task was ended before its job was submitted.")
                status = session.submit(job.spec)
                self.log.info(
                    "job submitted key=%s state=%s generation=%d log=%s",
                    status.key, status.state.value, status.generation, status.log_path,
                )  # fmt: skip
                if self._is_killed:
                    self._cancel_after_user_action()
                if status.state.is_final:
                    status = self._drain(session, status)
        except HostUnreachable as error:
            self.log.warning("host unreachable, the submit waits: %s", error)
            self._defer_to_host(job, error, attempt=attempt, since=since or time.time())
        except PipelineError as error:
            raise to_airflow(error) from error
        if not status.state.is_final:
            self._defer_to_job(job, status)
        return self._finish(context, status)

    def _defer_to_host(
        self, job: RemoteJob, problem: HostUnreachable, *, attempt: int, since: float
    ) -> NoReturn:
        try:
            patience_left(problem, since=since)
        except HostUnreachable as error:
            raise to_airflow(error) from problem
        trigger = HostWaitTrigger(
            **where_to_wait(job.address), problem=str(problem), attempt=attempt, since=since
        )
        self.defer(trigger=trigger, method_name=self.on_host_answers.__name__)

    def _defer_to_job(self, job: RemoteJob, status: JobStatus) -> NoReturn:
        trigger = RemoteJobTrigger(
            **where_to_wait(job.address),
            key=status.key,
            generation=status.generation,
            poll_seconds=job.poll_seconds,
        )
        self.defer(trigger=trigger, method_name=self.on_job_event.__name__)

    def _drain(self, session: AgentSession, status: JobStatus) -> JobStatus:
        """Log what is left of the log of a job that had ended before this attempt began."""
        follower = JobFollower(status.key, status.generation)
        while follower.final is None:
            for line in follower.take(session.poll(follower.question())):
                self.log.info("%s", line)
        return follower.final

    def _finish(self, context: Context, status: JobStatus) -> Any:
        job = self._plan(context)
        error = problem_of(status)
        if error is None:
            self._succeeded = status
            report = status.report or {}
            cast("Any", context)["ti"].xcom_push(key=REPORT_KEY, value=dict(report))
            try:
                return self.value_of(report)
            except PipelineError as problem:
                raise to_airflow(problem) from problem
        reason = f"{error} {status.detail}"
        if status.state == JobState.CANCELLED and is_cancel_of_another(current_attempt(context).id, reason):
            # A clear ended the attempt before this one, and this one had joined its job.
            self.log.info("the job of the attempt before was stopped; submitting anew key=%s", job.spec.key)
            return self._submit(context, attempt=1)
        raise to_airflow(error)

    def _plan(self, context: Context) -> RemoteJob:
        try:
            job = self.plan_job(context)
        except PipelineError as error:
            raise to_airflow(error) from error
        self._job, self._context = job, context
        return job

    def _raise_error_of(self, event: Mapping[str, Any]) -> None:
        if "error" in event:
            record = codec.from_plain(ErrorRecord, event["error"], where="trigger event")
            raise to_airflow(error_from_record(record))

    def _cancel_after_user_action(self) -> None:
        job, context = self._job, self._context
        if job is None or context is None:
            return
        attempt = current_attempt(context)
        try:
            if "running" in task_states(attempt):
                self.log.warning("task ended, but by no user: its job goes on key=%s", job.spec.key)
                return
            with AgentSession(job.address, current_release()) as session:
                session.cancel(job.spec.key, cancel_reason(attempt.id))
            self.log.info("cancel recorded on the GPU host key=%s", job.spec.key)
        except Exception as error:  # noqa: BLE001 - in a signal handler; the lease ends the job in any case
            self.log.warning("cancel not recorded key=%s: %s", job.spec.key, error)
