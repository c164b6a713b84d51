"""Waits until an unreachable host answers, so that a submit can be tried again."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from eagle3_airflow.hooks.host_channel import HostChannel
from eagle3_airflow.triggers.host_trigger import HostTrigger
from eagle3_airflow.triggers.outage import wait_out
from eagle3_tasks.contracts.errors import HostUnreachable, PipelineError


class HostWaitTrigger(HostTrigger):
    """Fires ``{"attempt": n, "since": t}`` once the host answers, be it with an error.

    The operator will see the error. ``attempt`` counts the submits that failed one after
    another; each waits longer, because a host that answers triggers may still refuse
    operators. ``since`` is the time of the first failure, in seconds since the epoch.
    """

    def __init__(
        self,
        *,
        ssh_conn_id: str,
        root: str,
        python: str,
        release: str,
        problem: str,
        attempt: int,
        since: float,
    ) -> None:
        super().__init__(ssh_conn_id=ssh_conn_id, root=root, python=python, release=release)
        self.problem = problem
        self.attempt = attempt
        self.since = since

    def arguments(self) -> dict[str, Any]:
        return {"problem": self.problem, "attempt": self.attempt, "since": self.since}

    async def wait(self) -> dict[str, Any]:
        try:
            await self._wait_out()
        except HostUnreachable:
            raise
        except PipelineError as problem:
            self.log.info("host answers, with an error code=%s", problem.code)
        return {"attempt": self.attempt, "since": self.since}

    async def _wait_out(self) -> None:
        longest = HostChannel.last_retry_seconds
        pause = min(HostChannel.first_retry_seconds * 2 ** min(self.attempt - 1, 16), longest)
        await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311 - not a secret
        async with HostChannel.lease(self.address) as channel:
            await wait_out(channel, HostUnreachable(self.problem), self.log, since=self.since)
