"""What all triggers of this package share: the host's address, and when an event may fire."""

from __future__ import annotations

import abc
import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from airflow.sdk.configuration import conf
from airflow.triggers.base import BaseTrigger, TriggerEvent

from eagle3_airflow.remote_command import HostAddress
from eagle3_tasks.contracts import codec
from eagle3_tasks.contracts.errors import PipelineError

SCHEDULER_LOOP_SECONDS = 2.0


def where_to_wait(address: HostAddress) -> dict[str, str]:
    """Give the part of an address that a trigger's arguments hold.

    Not ``make_root``: a trigger only looks on, and never makes a ROOT that has vanished.
    """
    return {
        "ssh_conn_id": address.ssh_conn_id,
        "root": address.root,
        "python": address.python,
        "release": address.release,
    }


class HostTrigger(BaseTrigger, abc.ABC):
    """Waits for something on a GPU host and fires once.

    It never fires within a few seconds of its start. A worker that has deferred its task is
    noticed to have ended up to ``[workers] min_heartbeat_interval`` (5 s) later; if the task is
    queued again by then, the scheduler takes that late end for the failure of the new attempt
    ("state attribute is queued") and a retry is lost (seen with Airflow 3.3.2).
    """

    settle_seconds: float = conf.getint("workers", "min_heartbeat_interval") + SCHEDULER_LOOP_SECONDS

    def __init__(self, *, ssh_conn_id: str, root: str, python: str, release: str) -> None:
        super().__init__()
        self.address = HostAddress(ssh_conn_id=ssh_conn_id, root=root, python=python, release=release)

    @abc.abstractmethod
    async def wait(self) -> dict[str, Any]:
        """Give the event's payload, as plain JSON.

        Raises:
            PipelineError: fired as ``{"error": ErrorRecord}``.
        """

    @abc.abstractmethod
    def arguments(self) -> dict[str, Any]:
        """Give the constructor's arguments besides the address."""

    def serialize(self) -> tuple[str, dict[str, Any]]:
        name = f"{type(self).__module__}.{type(self).__qualname__}"
        return name, {**where_to_wait(self.address), **self.arguments()}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        earliest = time.monotonic() + self.settle_seconds
        try:
            payload = await self.wait()
        except PipelineError as problem:
            payload = {"error": codec.to_plain(problem.record())}
        await asyncio.sleep(max(0.0, earliest - time.monotonic()))
        yield TriggerEvent(payload)
