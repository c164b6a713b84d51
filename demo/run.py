"""``make demo``: the whole pipeline on a tiny target, over SSH, driven by a real Airflow.

Everything lies in ``.demo/``: the world (target and conversations), the GPU host's ROOT,
Airflow's home, keys. A second run reuses what exists and makes a new run.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import fcntl
import getpass
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from demo import processes, ssh_server
from demo.airflow_client import AirflowClient
from demo.airflow_services import PROJECT, USER, AirflowServices
from demo.follow import follow_run
from demo.host_jobs import stop_jobs
from demo.ports import choose_port
from demo.report import print_report
from eagle3_tasks.contracts.errors import PipelineError

FOLDER = PROJECT / ".demo"
HOST_PYTHON = PROJECT / ".venv/host/bin/python"
DAG_ID = "eagle3_train"
CONNECTION_ID = "eagle3_demo_host"
RUN_PREFIX = "demo_"
SSH_LOG = FOLDER / "ssh-server.log"
SSH_SECONDS = 20.0
EMPTIED = "/tmp/"  # noqa: S108 - refused, not used
ORPHAN_MINUTES = 5
"""Jobs of a demo that was killed with -9 end by themselves after so long."""


def main() -> int:
    """Run the demo; 0 only when the run succeeded."""
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="leave the UI up until Ctrl-C")
    arguments = parser.parse_args()
    os.umask(0o077)
    FOLDER.mkdir(exist_ok=True, mode=0o700)
    for number in (signal.SIGTERM, signal.SIGHUP):
        # Under nohup the end of the terminal is to be ignored.
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _interrupt)
    began = time.monotonic()
    try:
        if f"{FOLDER}/".startswith(EMPTIED):
            raise RuntimeError(f"{PROJECT} lies where a reboot may empty it. Clone to a durable disk.")
        # Two demos at once would share one database, and the end of one would cancel the other's jobs.
        lock = (FOLDER / "lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError("another `make demo` runs in this folder. Wait for it or stop it.") from None
        return _run_demo(keep=arguments.keep, began=began)
    except KeyboardInterrupt:
        print("\nstopped; `make demo` goes on from what exists", flush=True)
        return 130
    except RuntimeError as error:
        print(f"\nthe demo failed: {error}", file=sys.stderr, flush=True)
        return 1


def _run_demo(*, keep: bool, began: float) -> int:
    port = choose_port(2222)
    host_key, client_key = ssh_server.make_keys(FOLDER / "ssh")
    services = AirflowServices(
        home=FOLDER / "airflow", connections={CONNECTION_ID: ssh_connection(port, host_key, client_key)}
    )
    others = _Others()
    try:
        print(f"Airflow UI    {services.url}    login {USER}    password {services.password}", flush=True)
        others.start_ssh_server(port)
        services.migrate()
        services.start()

        def check() -> None:
            services.check()
            others.check()

        world = others.build_world(check)
        services.wait_until_ready()
        client = AirflowClient(url=services.url, user=USER, password=services.password)
        client.wait_for_dag(DAG_ID)
        # The run of a demo that was interrupted would go on beside this one.
        client.end_runs(DAG_ID, prefix=RUN_PREFIX)
        run_id = f"{RUN_PREFIX}{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H-%M-%S}"
        client.trigger(DAG_ID, run_id=run_id, conf=demo_conf(world, root=FOLDER / "root"))
        print(f"run           {services.url}/dags/{DAG_ID}/runs/{run_id}", flush=True)
        state = follow_run(client, DAG_ID, run_id, check_services=check)
        print_report(client, DAG_ID, run_id, root=FOLDER / "root", seconds=time.monotonic() - began)
        if keep:
            print(f"The UI stays up at {services.url} until Ctrl-C.", flush=True)
            while True:
                check()
                time.sleep(1)
        return 0 if state == "success" else 1
    finally:
        _stop_everything(services, others)


def _stop_everything(services: AirflowServices, others: _Others) -> None:
    """Stop what was started, jobs on the GPU host included. Half a minute at most: not to be cut short."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    services.stop()
    others.stop()
    try:
        left = stop_jobs(FOLDER / "root", python=HOST_PYTHON)
        problem = f"still running: {', '.join(left)}" if left else ""
    except (RuntimeError, PipelineError, OSError, subprocess.SubprocessError) as error:
        problem = str(error)
    if problem:
        # The terminal may be gone.
        with contextlib.suppress(OSError):
            print(
                f"not all jobs could be stopped; they end within {ORPHAN_MINUTES} min: {problem}",
                file=sys.stderr, flush=True,
            )  # fmt: skip


class _Others:
    """The demo's child processes besides Airflow."""

    def __init__(self) -> None:
        self._children: list[subprocess.Popen[bytes]] = []
        self._ssh_server: subprocess.Popen[bytes] | None = None

    def start_ssh_server(self, port: int) -> None:
        """Start the GPU host's SSH server and wait until it greets.

        Raises:
            RuntimeError: it ended, or did not greet.
        """
        self._ssh_server = processes.start(
            [sys.executable, "-m", "demo.ssh_server", "--folder", str(FOLDER / "ssh"), "--port", str(port)],
            log=SSH_LOG,
            environment={n: value for n, value in os.environ.items() if not n.startswith("AIRFLOW")},
            cwd=PROJECT,
        )
        self._children.append(self._ssh_server)
        deadline = time.monotonic() + SSH_SECONDS
        while time.monotonic() < deadline:
            self.check()
            if ssh_server.greets(port):
                return
            time.sleep(0.1)
        raise RuntimeError(
            f"the SSH server does not greet on port {port} after {SSH_SECONDS:.0f} s. {SSH_LOG}:\n"
            f"{processes.log_tail(SSH_LOG)}"
        )

    def check(self) -> None:
        """Notice that the SSH server has ended.

        Raises:
            RuntimeError: it has; with the last lines of its log.
        """
        if self._ssh_server is not None:
            processes.check(self._ssh_server, name="the SSH server", log=SSH_LOG)

    def build_world(self, check: Callable[[], None]) -> Path:
        """Make the tiny target and its conversations, or find them; gives their folder.

        Raises:
            RuntimeError: it failed, or ``check`` found something else that did.
        """
        print("world         a target model that talks is trained on first use (2 to 3 minutes)", flush=True)
        log = FOLDER / "world.log"
        log.unlink(missing_ok=True)
        child = processes.start(
            [str(HOST_PYTHON), "-m", "demo.world", "--folder", str(FOLDER / "world")],
            log=log, environment={**os.environ, "PYTHONUNBUFFERED": "1"}, cwd=PROJECT,
        )  # fmt: skip
        self._children.append(child)
        # The builder prints its folder last; only a library's parting words could follow.
        folder = ""
        for line in processes.follow_log(child, log, check):
            print(f"  {line}", flush=True)
            folder = line if Path(line).is_absolute() and Path(line).is_dir() else folder
        if child.returncode or not folder:
            raise RuntimeError(
                f"the world could not be built (exit code {child.returncode}); see the lines above"
            )
        return Path(folder)

    def stop(self) -> None:
        processes.stop(self._children)


def ssh_connection(port: int, host_key: Path, client_key: Path) -> Mapping[str, Any]:
    """Give the Airflow connection to the SSH server on loopback, with its host key pinned."""
    kind, key = host_key.with_suffix(".pub").read_text().split()[:2]
    extra = {"key_file": str(client_key), "host_key": f"{kind} {key}", "no_host_key_check": False}
    return {"conn_type": "ssh", "host": "127.0.0.1", "port": port, "login": getpass.getuser(), "extra": extra}


def demo_conf(world: Path, *, root: Path, host_python: Path = HOST_PYTHON) -> dict[str, Any]:
    """Give the form's values: the preset ``demo`` and where its world lies."""
    return {
        "preset": "demo",
        "ssh_conn_id": CONNECTION_ID,
        "root": str(root),
        "python": str(host_python),
        "orphan_minutes": ORPHAN_MINUTES,
        "target_model": str(world / "target"),
        "conversations_path": str(world / "conversations.jsonl"),
        "evaluation_sets": [
            {"name": "reworded", "path": str(world / "reworded.jsonl"), "min_accept_length": 1.6},
            {"name": "new_questions", "path": str(world / "new.jsonl")},
        ],
    }


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
