"""A real sshd, a ROOT of one's own, and operators driven as Airflow drives them, without Airflow."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

CHECKOUT = Path(__file__).parents[2]
os.environ.setdefault("AIRFLOW_HOME", str(CHECKOUT / ".tmp" / "airflow"))
os.environ.setdefault("AIRFLOW__CORE__LOAD_EXAMPLES", "False")

from airflow.sdk.bases.operator import ExecutorSafeguard  # noqa: E402 - AIRFLOW_HOME comes first
from airflow.sdk.exceptions import TaskDeferred  # noqa: E402
from airflow.sdk.module_loading import import_string  # noqa: E402

from eagle3_airflow.hooks.host_channel import HostChannel  # noqa: E402
from eagle3_airflow.operators.remote_job import RemoteJobOperator  # noqa: E402
from eagle3_airflow.triggers.host_probe import HostProbeTrigger  # noqa: E402
from eagle3_airflow.triggers.host_trigger import HostTrigger  # noqa: E402
from eagle3_airflow.triggers.host_wait import HostWaitTrigger  # noqa: E402
from eagle3_airflow.triggers.remote_job import RemoteJobTrigger  # noqa: E402
from tests.integration.openssh import OpenSshServer  # noqa: E402

CONN_ID = "eagle3_test_host"


@pytest.fixture(scope="session")
def sshd_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenSshServer]:
    server = OpenSshServer.make(tmp_path_factory.mktemp("sshd"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def sshd(sshd_session: OpenSshServer, monkeypatch: pytest.MonkeyPatch) -> OpenSshServer:
    """The server, running, and an Airflow connection that leads to it."""
    if sshd_session.process is None:
        sshd_session.start()
    monkeypatch.setenv(f"AIRFLOW_CONN_{CONN_ID.upper()}", sshd_session.connection())
    monkeypatch.setattr(HostChannel, "first_retry_seconds", 0.2)
    monkeypatch.setattr(HostChannel, "last_retry_seconds", 0.5)
    # No scheduler looks on here.
    monkeypatch.setattr(HostTrigger, "settle_seconds", 0.0)
    monkeypatch.setattr(ExecutorSafeguard, "test_mode", True)
    return sshd_session


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A ROOT that doesn't exist yet."""
    return tmp_path / "root"


@pytest.fixture(scope="session")
def shared_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One ROOT for all tests that don't look at it: the release is shipped to it once."""
    root = tmp_path_factory.mktemp("shared") / "root"
    (root / "jobs").mkdir(parents=True)
    return root


@dataclasses.dataclass
class TaskInstance:
    """What operator and trigger see of Airflow's task instance."""

    dag_id: str = "d"
    run_id: str = dataclasses.field(default_factory=lambda: f"manual__{uuid.uuid4()}")
    task_id: str = "t"
    map_index: int | None = -1
    id: uuid.UUID = dataclasses.field(default_factory=uuid.uuid4)
    xcom: dict[str, Any] = dataclasses.field(default_factory=dict)

    def xcom_push(self, key: str, value: Any) -> None:
        self.xcom[key] = value


class AirflowTask:
    """One task: executes, defers, runs the trigger in an event loop, resumes, until the end."""

    def __init__(self, make_operator: Callable[[], Any], params: dict[str, Any] | None = None) -> None:
        self.make_operator = make_operator
        self.ti = TaskInstance(task_id=make_operator().task_id)
        self.params = params or {}
        self.deferrals: list[str] = []
        self.operator: Any = None

    def start(self) -> tuple[Any, Any]:
        """Execute; give (result, None), or (None, deferral)."""
        return self._call("execute", {})

    def resume(self, deferral: Any, event: Any) -> tuple[Any, Any]:
        return self._call(deferral.method_name, {"event": event})

    def run(self) -> Any:
        result, deferral = self.start()
        while deferral is not None:
            result, deferral = self.resume(deferral, asyncio.run(first_event(self.trigger(deferral))))
        return result

    def trigger(self, deferral: Any) -> Any:
        """Make the trigger anew from what the database would keep of it."""
        path, kwargs = deferral.trigger.serialize()
        trigger = import_string(path)(**kwargs)
        trigger.task_instance = self.ti
        return trigger

    def succeed(self) -> None:
        """Do what Airflow does after it has recorded the success."""
        for callback in self.operator.on_success_callback:
            callback({"task": self.operator, "ti": self.ti})

    def next_attempt(self) -> None:
        self.ti.id = uuid.uuid4()

    def _call(self, method: str, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        # Each part of a deferred task runs in a process of its own, with an operator of its own.
        self.operator = self.make_operator()
        context = {"ti": self.ti, "params": self.params, "task": self.operator}
        try:
            return getattr(self.operator, method)(context=context, **kwargs), None
        except TaskDeferred as deferral:
            self.deferrals.append(type(deferral.trigger).__name__)
            return None, deferral


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Let the event loop run until ``condition`` holds."""
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        await asyncio.sleep(0.02)


async def first_event(trigger: Any) -> Any:
    async for event in trigger.run():
        return event.payload
    raise AssertionError("the trigger ended without an event")


def make_task(root: Path, script: str, **more: Any) -> AirflowTask:
    """Give the task of a shell script that runs under ``root``."""

    def make() -> RemoteJobOperator:
        return RemoteJobOperator(
            ssh_conn_id=CONN_ID,
            root=str(root),
            argv=["/bin/sh", "-c", script],
            poll_seconds=0.1,
            **{"task_id": "t", **more},
        )

    return AirflowTask(make)


def count(file: Path) -> int:
    """Tell how often a script has written its x."""
    return file.read_text().count("x") if file.exists() else 0


@pytest.fixture
def log_lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Everything that operator, triggers and libraries log, as Airflow's task log would hold it."""
    caplog.set_level(logging.INFO)
    for kind in (RemoteJobOperator, RemoteJobTrigger, HostWaitTrigger, HostProbeTrigger):
        monkeypatch.setattr(kind, "log", logging.getLogger(f"task.{kind.__name__}"))
    return lambda: [record.getMessage() for record in caplog.records]
