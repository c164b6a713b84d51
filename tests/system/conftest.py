"""One Airflow, one sshd, one ROOT for the system tests."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from demo.airflow_client import AirflowClient
from demo.airflow_services import PROJECT, USER, AirflowServices
from demo.follow import follow_run
from demo.run import HOST_PYTHON, demo_conf
from eagle3_tasks.contracts import codec
from eagle3_tasks.contracts.jobs import run_key
from eagle3_tasks.contracts.paths import RootLayout
from tests.integration.openssh import OpenSshServer

DAG_ID = "eagle3_train"
R = TypeVar("R")

# Airflow's own recovery takes minutes by default; the behaviour is the same at these speeds.
QUICK_RECOVERY = {
    "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "20",
    "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "5",
    "AIRFLOW__SCHEDULER__ORPHANED_TASKS_CHECK_INTERVAL": "5",
    "AIRFLOW__SCHEDULER__SCHEDULER_HEALTH_CHECK_THRESHOLD": "10",
    "AIRFLOW__TRIGGERER__TRIGGERER_HEALTH_CHECK_THRESHOLD": "10",
    "AIRFLOW__TRIGGERER__JOB_HEARTBEAT_SEC": "2",
}


class Pipeline:
    """What a test needs: Airflow's client, the host's ROOT, and a way to cause faults."""

    def __init__(self, *, folder: Path, world: Path, services: AirflowServices, fault_file: Path) -> None:
        self.project = PROJECT
        self.root = folder / "root"
        self.layout = RootLayout(self.root)
        self.services = services
        self._world = world
        self._fault_file = fault_file

    def start_airflow(self) -> None:
        self.services.start()
        self.services.wait_until_ready()
        self.client = AirflowClient(url=self.services.url, user=USER, password=self.services.password)
        self.client.wait_for_dag(DAG_ID)

    def conf(self, **changes: Any) -> dict[str, Any]:
        return {
            **demo_conf(self._world, root=self.root, host_python=HOST_PYTHON),
            "ssh_conn_id": "eagle3_test_host",
            **changes,
        }

    def wait(self, run_id: str) -> str:
        return follow_run(self.client, DAG_ID, run_id, check_services=self.services.check)

    def inject(self, faults: list[dict[str, Any]]) -> None:
        """Set the faults of ``eagle3_tasks.storage.fault_points`` for what runs from now on."""
        temporary = self._fault_file.with_suffix(".tmp")
        temporary.write_text(json.dumps(faults))
        temporary.replace(self._fault_file)

    def record(self, kind: type[R], run_id: str, name: str) -> R:
        path = self.layout.run(run_key(dag_id=DAG_ID, run_id=run_id)) / name
        return codec.loads(kind, path.read_bytes(), where=str(path))


@pytest.fixture(scope="session")
def world() -> Path:
    """The demo's target and conversations, built on first use and shared with the demo."""
    done = subprocess.run(
        [HOST_PYTHON, "-m", "demo.world", "--folder", PROJECT / ".demo/world"],
        cwd=PROJECT, stdout=subprocess.PIPE, text=True, check=True, timeout=600,
    )  # fmt: skip
    return Path(done.stdout.splitlines()[-1])


@pytest.fixture(scope="session")
def pipeline(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    folder = tmp_path_factory.mktemp("pipeline")
    fault_file = folder / "faults.json"
    fault_file.write_text("[]")
    sshd = OpenSshServer.make(folder / "sshd", {"EAGLE3_FAULT_POINTS": str(fault_file)})
    other = OpenSshServer.make(folder / "other-sshd")
    sshd.start()
    try:
        services = AirflowServices(
            home=folder / "airflow",
            connections={
                "eagle3_test_host": json.loads(sshd.connection()),
                "eagle3_changed_host": json.loads(sshd.connection(host_key=other.host_key)),
            },
            options=QUICK_RECOVERY,
            preferred_port=0,
        )
        services.migrate()
        pipeline = Pipeline(folder=folder, world=world, services=services, fault_file=fault_file)
        try:
            pipeline.start_airflow()
            yield pipeline
        finally:
            services.stop()
    finally:
        sshd.stop()
