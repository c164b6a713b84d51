"""Open connections to the GPU host with the SSH provider's hooks, bounded in time and checked.

Credentials and host keys come from the Airflow connection. The host key is always
checked: against the extra ``host_key`` if there is one, else against the known_hosts file
of the user that runs Airflow. Only ``"no_host_key_check": true`` in the extra switches the
check off, and each connection then logs a warning.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from airflow.providers.common.compat.connection import get_async_connection
from airflow.providers.ssh.hooks.ssh import SSHHook, SSHHookAsync

from eagle3_airflow.hooks.ssh_errors import Place, translate_ssh_error

if TYPE_CHECKING:
    import asyncssh
    import paramiko

CONNECT_SECONDS = 15
"""Limit for each of: reaching the port, the server's banner, the login."""
KEEPALIVE_SECONDS = 15

# Both libraries log each handshake at INFO: nine lines of ten in a task's log would be theirs.
for _library in ("asyncssh", "paramiko"):
    logging.getLogger(_library).setLevel(logging.WARNING)


def open_client(conn_id: str) -> paramiko.SSHClient:
    """Connect from an operator.

    Raises:
        ConnectionProblem: the connection is missing, refused, or shows another host key.
        HostUnreachable: anything else; nothing is known of the host.
    """
    place = Place(conn_id=conn_id)
    try:
        hook = SSHHook(
            ssh_conn_id=conn_id,
            keepalive_interval=KEEPALIVE_SECONDS,
            banner_timeout=CONNECT_SECONDS,
            auth_timeout=CONNECT_SECONDS,
            # An unreachable host is waited for without holding a worker: no sleeping here.
            conn_retry_attempts=1,
        )
        place = Place(conn_id=conn_id, host=hook.remote_host, port=hook.port or 22)
        hook.conn_timeout = hook.conn_timeout or CONNECT_SECONDS
        # The other hook has no such switch: with it, one would trust what the other refuses.
        hook.allow_host_key_change = False
        return hook.get_conn()
    except Exception as error:
        raise translate_ssh_error(error, place) from error


async def open_connection(conn_id: str) -> asyncssh.SSHClientConnection:
    """Connect from a trigger; the hook itself would wait without a limit.

    Raises:
        ConnectionProblem: as :func:`open_client`.
        HostUnreachable: as :func:`open_client`.
    """
    place = Place(conn_id=conn_id)
    try:
        known = await get_async_connection(conn_id)
        place = Place(conn_id=conn_id, host=known.host or "", port=known.port or 22)
        hook = SSHHookAsync(ssh_conn_id=conn_id, keepalive_interval=KEEPALIVE_SECONDS)
        return await asyncio.wait_for(hook.get_conn(), timeout=2 * CONNECT_SECONDS)
    except Exception as error:
        raise translate_ssh_error(error, place) from error
