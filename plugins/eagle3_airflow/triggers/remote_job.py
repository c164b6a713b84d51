"""Waits for a job on the GPU host: hands on its log and progress, and fires when it has ended."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance
from airflow.sdk.execution_time.xcom import XCom

from eagle3_airflow.attempt import Attempt, attempt_of
from eagle3_airflow.hooks.host_channel import HostChannel, JobUnknown
from eagle3_airflow.job_follower import JobFollower
from eagle3_airflow.triggers.host_trigger import HostTrigger
from eagle3_airflow.triggers.outage import patience_left, wait_out
from eagle3_tasks.contracts import codec
from eagle3_tasks.contracts.errors import HostUnreachable, PipelineError
from eagle3_tasks.contracts.jobs import MAX_PROGRESS_BYTES, CancelBody, JobStatus

PROGRESS_KEY = "progress"
PROGRESS_SECONDS = float(os.environ.get("EAGLE3_PROGRESS_SECONDS", "15"))
CANCEL_SECONDS = 600.0
"""How long a cancel is tried to be brought to a host that is away."""
_LINES_AT_ONCE = 100
_CANCELLED_ATTEMPT = "a user stopped task instance"
_cancelling: set[asyncio.Task[None]] = set()
"""Keeps the tasks alive that bring a cancel to a host: the event loop itself does not."""


class RemoteJobTrigger(HostTrigger):
    """Follows one job. Fires ``{"status": JobStatus}`` or ``{"error": ErrorRecord}``, as plain JSON.

    It never acknowledges and, unless a user acts on the task, never cancels: its death or
    its move to another triggerer changes nothing on the host.
    """

    def __init__(
        self,
        *,
        ssh_conn_id: str,
        root: str,
        python: str,
        release: str,
        key: str,
        generation: int,
        poll_seconds: float,
    ) -> None:
        super().__init__(ssh_conn_id=ssh_conn_id, root=root, python=python, release=release)
        self.key = key
        self.generation = generation
        self.poll_seconds = poll_seconds
        self._last_progress: dict[str, Any] | None = None
        self._next_progress = 0.0

    def arguments(self) -> dict[str, Any]:
        return {"key": self.key, "generation": self.generation, "poll_seconds": self.poll_seconds}

    async def wait(self) -> dict[str, Any]:
        return {"status": codec.to_plain(await self._follow())}

    async def _follow(self) -> JobStatus:
        follower = JobFollower(self.key, self.generation)
        pause = 0.0
        unknown = ""
        silent_since: float | None = None
        async with HostChannel.lease(self.address) as channel:
            while True:
                try:
                    status = await channel.poll(follower.question(), after_seconds=pause)
                except JobUnknown as problem:
                    silent_since = silent_since or time.time()
                    patience_left(problem, since=silent_since)
                    if str(problem) != unknown:
                        unknown = str(problem)
                        self.log.warning("job state unknown, asking again key=%s: %s", self.key, unknown)
                    pause = self.poll_seconds
                    continue
                except HostUnreachable as problem:
                    silent_since = silent_since or time.time()
                    await wait_out(channel, problem, self.log, since=silent_since)
                    pause = 0.0
                    continue
                unknown, silent_since = "", None
                await self._log_lines(follower.take(status))
                await self._record_progress(status)
                if follower.final is not None:
                    return follower.final
                pause = 0.0 if follower.has_more_log else self.poll_seconds

    async def _log_lines(self, lines: list[str]) -> None:
        for number, line in enumerate(lines, start=1):
            self.log.info("%s", line)
            if number % _LINES_AT_ONCE == 0:
                # A burst of log must not hold up the other triggers of this process.
                await asyncio.sleep(0)

    async def _record_progress(self, status: JobStatus) -> None:
        """Write how far the job is into the XCom ``progress``, at most every 15 s, if it changed."""
        if self.task_instance is None or status.progress is None:
            return
        attempt = attempt_of(self.task_instance)
        record = {**codec.to_plain(status.progress), "state": status.state.value}
        if record == self._last_progress or (
            time.monotonic() < self._next_progress and not status.state.is_final
        ):
            return
        if len(codec.canonical(record)) > MAX_PROGRESS_BYTES:
            record["values"] = {}
        self._next_progress = time.monotonic() + PROGRESS_SECONDS
        self._last_progress = record
        try:
            await XCom.aset(
                key=PROGRESS_KEY,
                value=record,
                dag_id=attempt.dag_id,
                task_id=attempt.task_id,
                run_id=attempt.run_id,
                map_index=attempt.map_index,
            )
        except Exception as error:  # noqa: BLE001 - a figure for the screen must never end a job's trigger
            self.log.warning("progress not recorded key=%s: %s: %s", self.key, type(error).__name__, error)

    async def on_kill(self) -> None:
        """Record on the host that a user stopped the task; the job's runner does the rest.

        Airflow calls this also when it gives a living trigger to another triggerer, because
        this one missed its heartbeat. Then the task is still deferred, and nothing is cancelled.
        """
        # Airflow repeats its cancellation every second until the trigger has ended. It must
        # not reach the talk with the host: that one goes on in a task of its own.
        cancelling = asyncio.create_task(self._cancel_after_user_action())
        _cancelling.add(cancelling)
        cancelling.add_done_callback(_cancelling.discard)
        await asyncio.shield(cancelling)

    async def _cancel_after_user_action(self) -> None:
        if not await self._has_user_acted():
            self.log.warning("trigger taken away, job goes on key=%s", self.key)
            return
        body = CancelBody(key=self.key, reason=cancel_reason(attempt_of(self.task_instance).id))
        try:
            async with asyncio.timeout(CANCEL_SECONDS), HostChannel.lease(self.address) as channel:
                while True:
                    try:
                        await channel.request("cancel", body)
                    except HostUnreachable:
                        await channel.until_reachable()
                    else:
                        self.log.info("cancel recorded on the GPU host key=%s", self.key)
                        return
        except (PipelineError, TimeoutError) as error:
            # The job then ends by itself once nobody has asked about it for its orphan limit.
            self.log.warning("cancel not recorded key=%s: %s: %s", self.key, type(error).__name__, error)

    async def _has_user_acted(self) -> bool:
        try:
            states = await asyncio.to_thread(task_states, attempt_of(self.task_instance))
        except Exception as error:  # noqa: BLE001 - not to know is a reason to leave the job alone
            self.log.warning("task state unknown, job goes on key=%s: %s", self.key, error)
            return False
        return "deferred" not in states


def task_states(attempt: Attempt) -> list[str]:
    """Ask Airflow how the task stands; empty if its run is gone."""
    states = RuntimeTaskInstance.get_task_states(
        dag_id=attempt.dag_id,
        task_ids=[attempt.task_id],
        run_ids=[attempt.run_id],
        map_index=attempt.map_index,
    )
    return list(states.get(attempt.run_id, {}).values())


def cancel_reason(attempt: str) -> str:
    """Name the attempt in the reason: a later attempt that joined its job learns whom it was for."""
    return f"{_CANCELLED_ATTEMPT} {attempt} in Airflow"


def is_cancel_of_another(attempt: str, reason: str) -> bool:
    """Tell whether ``reason`` is one of :func:`cancel_reason`, but for another attempt."""
    return _CANCELLED_ATTEMPT in reason and attempt not in reason
