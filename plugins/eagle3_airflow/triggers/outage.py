"""How long a trigger waits for a host that doesn't answer, and what it says meanwhile."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from eagle3_airflow.hooks.host_channel import HostChannel
from eagle3_airflow.retries import MAX_OUTAGE_HOURS
from eagle3_tasks.contracts.errors import HostUnreachable

if TYPE_CHECKING:
    from airflow.sdk.types import Logger


async def wait_out(channel: HostChannel, problem: HostUnreachable, log: Logger) -> None:
    """Wait until the host answers again: two log lines, no retry used, nothing started.

    Raises:
        HostUnreachable: it has been away for longer than anybody waits.
        PipelineError: it answers, but with something that waiting doesn't mend.
    """
    began = time.monotonic()
    log.warning("host unreachable, waiting conn_id=%s: %s", channel.address.ssh_conn_id, problem)
    try:
        await asyncio.wait_for(channel.until_reachable(), timeout=MAX_OUTAGE_HOURS * 3600)
    except TimeoutError:
        raise HostUnreachable(
            f"the GPU host has been unreachable for {MAX_OUTAGE_HOURS:.0f} hours ({problem}). "
            "A running job there goes on until its orphan limit; clear this task once the host is back."
        ) from None
    seconds = time.monotonic() - began
    log.info("host answers again conn_id=%s seconds=%.0f", channel.address.ssh_conn_id, seconds)
