"""How long a host that tells nothing is waited for, and what a trigger says meanwhile."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from eagle3_airflow.hooks.host_channel import HostChannel, JobUnknown
from eagle3_airflow.retries import MAX_OUTAGE_HOURS
from eagle3_tasks.contracts.errors import HostUnreachable

if TYPE_CHECKING:
    from airflow.sdk.types import Logger


def patience_left(problem: HostUnreachable, *, since: float) -> float:
    """Give the seconds for which a host that has told nothing since ``since`` is still waited for.

    ``since`` is the time of the first problem, in seconds since the epoch: one outage may
    outlive triggers and workers, and however often it is met anew, it is one.

    Raises:
        HostUnreachable: none are left.
    """
    left = since + MAX_OUTAGE_HOURS * 3600 - time.time()
    if left <= 0:
        raise _given_up(problem)
    return left


async def wait_out(channel: HostChannel, problem: HostUnreachable, log: Logger, *, since: float) -> None:
    """Wait until the host answers again: two log lines, no retry used, nothing started.

    Raises:
        HostUnreachable: it has been away for longer than anybody waits.
        PipelineError: it answers, but with something that waiting doesn't mend.
    """
    timeout = patience_left(problem, since=since)
    began = time.monotonic()
    log.warning("host unreachable, waiting conn_id=%s: %s", channel.address.ssh_conn_id, problem)
    try:
        await asyncio.wait_for(channel.until_reachable(), timeout=timeout)
    except TimeoutError:
        raise _given_up(problem) from None
    seconds = time.monotonic() - began
    log.info("host answers again conn_id=%s seconds=%.0f", channel.address.ssh_conn_id, seconds)


def _given_up(problem: HostUnreachable) -> HostUnreachable:
    hours = f"for {MAX_OUTAGE_HOURS:.0f} hours"
    fact = (
        f"the GPU host could not tell {hours} how the job is ({problem})."
        if isinstance(problem, JobUnknown)
        else f"the GPU host has been unreachable {hours} ({problem})."
    )
    return HostUnreachable(
        f"{fact} A running job there goes on until its orphan limit; clear this task once the host is back."
    )
