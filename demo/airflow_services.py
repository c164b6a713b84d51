"""A private Airflow: api-server, scheduler, dag-processor and triggerer on SQLite.

Every service is a process of its own, so that one can be stopped and started again
while the others live, as in production.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
import urllib.error
from collections.abc import Mapping
from pathlib import Path

from demo import processes
from demo.airflow_client import open_url
from demo.ports import choose_port

PROJECT = Path(__file__).resolve().parent.parent
SERVICES: Mapping[str, tuple[str, ...]] = {
    "api-server": ("api-server", "--workers", "1"),
    "scheduler": ("scheduler",),
    "dag-processor": ("dag-processor",),
    "triggerer": ("triggerer",),
}
USER = "admin"


class AirflowServices:
    """Starts, watches and stops the services of one AIRFLOW_HOME.

    Args:
        home: AIRFLOW_HOME; made if missing, reused if there.
        connections: Airflow connections by id, as JSON; they travel in the environment of
            the services, never on a command line.
        options: further environment variables, such as ``AIRFLOW__SCHEDULER__...``.
        preferred_port: of the UI; another one is taken if it is in use.
    """

    def __init__(
        self,
        *,
        home: Path,
        connections: Mapping[str, Mapping[str, object]],
        options: Mapping[str, str] | None = None,
        preferred_port: int = 8080,
    ) -> None:
        self.home = home.resolve()
        self.log_folder = self.home / "service-logs"
        self.log_folder.mkdir(parents=True, exist_ok=True)
        self.home.chmod(0o700)
        self.port = choose_port(preferred_port)
        self.url = f"http://127.0.0.1:{self.port}"
        self.password = self._password()
        self.environment = self._environment(connections, options or {})
        self.children: dict[str, subprocess.Popen[bytes]] = {}

    def _password(self) -> str:
        # The simple auth manager reads this file, and makes it where it is missing.
        path = self.home / "passwords.json"
        if path.exists():
            return str(json.loads(path.read_text())[USER])
        password = secrets.token_urlsafe(9)
        path.touch(mode=0o600)
        path.write_text(json.dumps({USER: password}))
        return password

    def _environment(
        self, connections: Mapping[str, Mapping[str, object]], options: Mapping[str, str]
    ) -> dict[str, str]:
        secret_path = self.home / "secret"
        if not secret_path.exists():
            secret_path.touch(mode=0o600)
            secret_path.write_text(secrets.token_urlsafe(48))
        secret = secret_path.read_text()
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("AIRFLOW") and name not in ("PYTHONPATH", "VIRTUAL_ENV")
        }
        return {
            **inherited,
            **_without_proxy(inherited),
            "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}",
            "PYTHONPATH": f"{PROJECT}:{PROJECT / 'plugins'}",
            "PYTHONWARNINGS": "ignore",
            "AIRFLOW_HOME": str(self.home),
            "AIRFLOW__CORE__DAGS_FOLDER": str(PROJECT / "dags"),
            "AIRFLOW__CORE__PLUGINS_FOLDER": str(PROJECT / "plugins"),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__CORE__EXECUTOR": "LocalExecutor",
            "AIRFLOW__CORE__PARALLELISM": "6",
            "AIRFLOW__CORE__DAGS_ARE_PAUSED_AT_CREATION": "False",
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": f"{USER}:admin",
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(self.home / "passwords.json"),
            "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"{self.url}/execution/",
            "AIRFLOW__API__BASE_URL": self.url,
            "AIRFLOW__API__HOST": "127.0.0.1",
            "AIRFLOW__API__PORT": str(self.port),
            "AIRFLOW__API__SECRET_KEY": secret,
            "AIRFLOW__API_AUTH__JWT_SECRET": secret,
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{self.home}/airflow.db",
            "AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL": "30",
            "AIRFLOW__LOGGING__NAMESPACE_LEVELS": "asyncssh=WARNING paramiko=WARNING",
            # A worker's end is noticed within this time; every stage waits for it once.
            "AIRFLOW__WORKERS__MIN_HEARTBEAT_INTERVAL": "1",
            "AIRFLOW__SCHEDULER__SCHEDULER_IDLE_SLEEP_TIME": "0.3",
            "AIRFLOW__TRIGGERER__JOB_HEARTBEAT_SEC": "2",
            "EAGLE3_PROGRESS_SECONDS": "2",
            "AIRFLOW__SCHEDULER__SCHEDULER_HEARTBEAT_SEC": "1",
            "AIRFLOW__SCHEDULER__ENABLE_HEALTH_CHECK": "False",
            **{f"AIRFLOW_CONN_{name.upper()}": json.dumps(value) for name, value in connections.items()},
            **options,
        }

    def migrate(self) -> None:
        """Make or upgrade the metadata database.

        Raises:
            RuntimeError: it failed; the message ends with the log's last lines.
        """
        log = self.log_folder / "migrate.log"
        with log.open("wb") as output:
            done = subprocess.run(
                ["airflow", "db", "migrate"], env=self.environment, cwd=PROJECT,
                stdout=output, stderr=subprocess.STDOUT, check=False,
            )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"`airflow db migrate` failed:\n{processes.log_tail(log)}")

    def start(self, *names: str) -> None:
        """Start the named services, or all of them."""
        for name in names or SERVICES:
            self.children[name] = processes.start(
                ["airflow", *SERVICES[name]],
                log=self.log_folder / f"{name}.log", environment=self.environment, cwd=PROJECT,
            )  # fmt: skip

    def stop(self) -> None:
        """Stop everything that was started."""
        processes.stop(list(self.children.values()))
        self.children.clear()

    def kill(self) -> None:
        """Kill every process of every service at once, as a power cut would."""
        processes.kill(list(self.children.values()))
        self.children.clear()

    def check(self) -> None:
        """Notice a service that has ended by itself.

        Raises:
            RuntimeError: names it, with the last lines of its log.
        """
        for name, child in self.children.items():
            processes.check(child, name=f"Airflow's {name}", log=self.log_folder / f"{name}.log")

    def wait_until_ready(self, *, seconds: float = 240.0) -> None:
        """Wait for the api-server, and for scheduler, dag-processor and triggerer to report health.

        Raises:
            RuntimeError: not within ``seconds``, or a service ended.
        """
        deadline = time.monotonic() + seconds
        state: object = None
        while time.monotonic() < deadline:
            self.check()
            try:
                with open_url(f"{self.url}/api/v2/monitor/health", timeout=10) as reply:
                    state = json.load(reply)
                if isinstance(state, dict) and all(
                    part.get("status") in ("healthy", None) and (name == "metadatabase" or part.get("status"))
                    for name, part in state.items()
                ):
                    return
            except (OSError, urllib.error.URLError, ValueError) as error:
                state = error
            time.sleep(0.5)
        raise RuntimeError(f"Airflow is not healthy after {seconds:.0f} s: {state}. Logs: {self.log_folder}")


def _without_proxy(environment: Mapping[str, str]) -> dict[str, str]:
    """Keep loopback out of a proxy that the environment may name: the services talk to one another."""
    others = environment.get("no_proxy") or environment.get("NO_PROXY")
    hosts = ",".join([*([others] if others else []), "127.0.0.1", "localhost"])
    return {"no_proxy": hosts, "NO_PROXY": hosts}
