"""Asks the GPU host again and again whether it is ready, and fires when it is."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from eagle3_airflow.hooks.agent_link import ANSWER_SECONDS
from eagle3_airflow.hooks.host_channel import HostChannel
from eagle3_airflow.triggers.host_trigger import HostTrigger
from eagle3_airflow.triggers.outage import wait_out
from eagle3_tasks.contracts import codec
from eagle3_tasks.contracts.errors import HostUnreachable, NodeProblem
from eagle3_tasks.contracts.jobs import ProbeBody
from eagle3_tasks.contracts.stages import ProbeVerdict


class HostProbeTrigger(HostTrigger):
    """Fires ``{"verdict": ProbeVerdict}`` or ``{"error": ErrorRecord}``; "cannot tell" is not ready."""

    def __init__(
        self,
        *,
        ssh_conn_id: str,
        root: str,
        python: str,
        release: str,
        spec: dict[str, Any],
        poke_seconds: float,
    ) -> None:
        super().__init__(ssh_conn_id=ssh_conn_id, root=root, python=python, release=release)
        self.spec = spec
        self.poke_seconds = poke_seconds

    def arguments(self) -> dict[str, Any]:
        return {"spec": self.spec, "poke_seconds": self.poke_seconds}

    async def wait(self) -> dict[str, Any]:
        return {"verdict": codec.to_plain(await self._poke_until_ready())}

    async def _poke_until_ready(self) -> ProbeVerdict:
        body = ProbeBody(spec=self.spec)
        silent_since: float | None = None
        async with HostChannel.lease(self.address) as channel:
            while True:
                try:
                    reply = await channel.request(
                        "probe", body, seconds=body.deadline_seconds + ANSWER_SECONDS
                    )
                except HostUnreachable as problem:
                    silent_since = silent_since or time.time()
                    await wait_out(channel, problem, self.log, since=silent_since)
                    continue
                except NodeProblem as problem:
                    if channel.is_over:
                        raise
                    # A probe that hangs on a sick disk tells nothing, and nothing is never "ready".
                    self.log.warning("cannot tell: %s", problem)
                    silent_since = None
                    await asyncio.sleep(self.poke_seconds)
                    continue
                verdict = codec.from_plain(ProbeVerdict, reply, where="probe")
                self.log.info("%s", verdict.line)
                silent_since = None
                if verdict.is_ready:
                    return verdict
                await asyncio.sleep(self.poke_seconds)
