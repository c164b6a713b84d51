"""The real sshd behind a fault proxy, and how thorough a run of these tests is."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from eagle3_airflow.hooks import agent_link, agent_session, connections
from eagle3_airflow.hooks.agent_link import AgentLink
from eagle3_airflow.hooks.host_channel import HostChannel
from eagle3_airflow.operators.remote_job import RemoteJobOperator
from tests.faults.proxy import FaultProxy
from tests.integration.conftest import AirflowTask, log_lines, shared_root, sshd, sshd_session
from tests.integration.openssh import OpenSshServer, children_of

__all__ = ["log_lines", "shared_root", "sshd", "sshd_session"]

SOAK_ROUNDS = int(os.environ.get("EAGLE3_SOAK_ROUNDS", "0"))
"""How often random faults are tried; 0 is the quick tier, where each fault comes once or a few times."""
IS_SOAK = SOAK_ROUNDS > 0


@dataclasses.dataclass(kw_only=True)
class Line:
    """A way to a server of which every part can fail; ``conn_id`` is the Airflow connection over it."""

    conn_id: str
    proxy: FaultProxy
    server: OpenSshServer

    def task(self, root: Path, script: str) -> AirflowTask:
        def make() -> RemoteJobOperator:
            return RemoteJobOperator(
                task_id="t", ssh_conn_id=self.conn_id, root=str(root), poll_seconds=0.1,
                argv=["/bin/sh", "-c", script],
            )  # fmt: skip

        return AirflowTask(make)

    def stop_server(self) -> None:
        """End the listener and every connection, as the loss of the host would."""
        self.server.cut_connections()
        self.server.stop()

    def signal_server(self, number: signal.Signals) -> None:
        """Signal the listener and the sshd process of each connection, but not what they run."""
        assert self.server.process is not None
        waiting = [self.server.process.pid]
        while waiting:
            pid = waiting.pop()
            waiting += [child for child in children_of(pid) if _name_of(child).startswith("sshd")]
            # The connection of whoever has just been answered may be ending.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def _name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text()
    except OSError:
        return ""


@pytest.fixture
def make_line(sshd: OpenSshServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Line]]:
    """Make lines to the common sshd, or to another one."""
    lines: list[Line] = []

    def make(server: OpenSshServer = sshd) -> Line:
        proxy = FaultProxy(server.port)
        proxy.__enter__()
        line = Line(conn_id=f"fault_line_{len(lines)}", proxy=proxy, server=server)
        lines.append(line)
        connection = json.loads(server.connection()) | {"port": proxy.port}
        monkeypatch.setenv(f"AIRFLOW_CONN_{line.conn_id.upper()}", json.dumps(connection))
        return line

    yield make
    for line in lines:
        line.proxy.__exit__()


@pytest.fixture
def line(make_line: Callable[..., Line]) -> Line:
    return make_line()


@pytest.fixture
def _short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Notice silence within seconds, not minutes. The limits themselves are tested as they are."""
    for module in (connections, agent_link, agent_session):
        monkeypatch.setattr(module, "CONNECT_SECONDS", 2)
    monkeypatch.setattr(connections, "KEEPALIVE_SECONDS", 1)
    monkeypatch.setattr(agent_session, "ANSWER_SECONDS", 8.0)
    monkeypatch.setattr(agent_session, "SUBMIT_SECONDS", 8.0)
    for method in (AgentLink.request, HostChannel.request):
        monkeypatch.setitem(method.__kwdefaults__, "seconds", 8.0)
