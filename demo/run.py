"""``make demo``: the whole pipeline on a tiny target, over SSH, driven by a real Airflow.

Everything lies in ``.demo/``: the world (target and conversations), the GPU host's ROOT,
Airflow's home, keys. A second run reuses what exists and makes a new run.
"""

from __future__ import annotations

import argparse
import datetime
import getpass
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from demo import processes, ssh_server
from demo.airflow_client import AirflowClient
from demo.airflow_services import PROJECT, USER, AirflowServices
from demo.follow import follow_run
from demo.ports import choose_port
from demo.report import print_report

FOLDER = PROJECT / ".demo"
HOST_PYTHON = PROJECT / ".venv/host/bin/python"
DAG_ID = "eagle3_train"
CONNECTION_ID = "eagle3_demo_host"


def main() -> int:
    """Run the demo; 0 only when the run succeeded."""
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="leave the UI up until Ctrl-C")
    arguments = parser.parse_args()
    os.umask(0o077)
    FOLDER.mkdir(exist_ok=True, mode=0o700)
    signal.signal(signal.SIGTERM, _interrupt)
    began = time.monotonic()
    try:
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
    children: list[subprocess.Popen[bytes]] = []
    try:
        print(f"Airflow UI    {services.url}    login {USER}    password {services.password}", flush=True)
        children.append(_start_ssh_server(port))
        services.migrate()
        services.start()
        world = _build_world()
        services.wait_until_ready()
        client = AirflowClient(url=services.url, user=USER, password=services.password)
        client.wait_for_dag(DAG_ID)
        run_id = f"demo_{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H-%M-%S}"
        client.trigger(DAG_ID, run_id=run_id, conf=demo_conf(world, root=FOLDER / "root"))
        print(f"run           {services.url}/dags/{DAG_ID}/runs/{run_id}", flush=True)
        state = follow_run(client, DAG_ID, run_id, check_services=services.check)
        print_report(client, DAG_ID, run_id, root=FOLDER / "root", seconds=time.monotonic() - began)
        if keep:
            print(f"The UI stays up at {services.url} until Ctrl-C.", flush=True)
            while True:
                services.check()
                time.sleep(1)
        return 0 if state == "success" else 1
    finally:
        services.stop()
        processes.stop(children)


def _build_world() -> Path:
    """Make the tiny target and its conversations, or find them; their folder is the last line printed."""
    print("world         a target model that talks is trained on first use (2 to 3 minutes)", flush=True)
    with subprocess.Popen(
        [HOST_PYTHON, "-m", "demo.world", "--folder", FOLDER / "world"],
        stdout=subprocess.PIPE, text=True, cwd=PROJECT,
    ) as child:  # fmt: skip
        last = ""
        for line in child.stdout or ():
            last = line.rstrip()
            print(f"  {last}", flush=True)
    if child.returncode:
        raise RuntimeError(
            f"the world could not be built (exit code {child.returncode}); see the lines above"
        )
    return Path(last)


def _start_ssh_server(port: int) -> subprocess.Popen[bytes]:
    return processes.start(
        [sys.executable, "-m", "demo.ssh_server", "--folder", str(FOLDER / "ssh"), "--port", str(port)],
        log=FOLDER / "ssh-server.log",
        environment={name: value for name, value in os.environ.items() if not name.startswith("AIRFLOW")},
        cwd=PROJECT,
    )


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
