"""The demo's own processes: noticed when they end, and nothing is left when the demo ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import demo.run
from demo import processes, ssh_server
from demo.host_jobs import REASON, stop_jobs
from demo.ports import choose_port
from eagle3_tasks.contracts import codec
from eagle3_tasks.contracts.digests import release_digest
from eagle3_tasks.contracts.jobs import Hello, JobSpec, Request, SubmitBody, find_frames, job_key, run_key

CHECKOUT = Path(__file__).parents[2]


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.05)


def submit(root: Path, stage: str, *argv: str) -> None:
    """Submit a job as Airflow would, over an agent of its own."""
    spec = JobSpec(
        key=job_key(dag_id="d", run_id="r", stage=stage),
        stage=stage,
        run_key=run_key(dag_id="d", run_id="r"),
        argv=argv,
    )
    hello = Hello(
        nonce="n", root=str(root), release=release_digest(CHECKOUT / "eagle3_tasks"), make_root=True
    )
    request = Request(id=1, verb="submit", body=codec.to_plain(SubmitBody(spec=spec)))
    done = subprocess.run(
        [sys.executable, "-P", "-m", "eagle3_tasks.host.agent"],
        input=codec.dumps(request) + "\n", capture_output=True, text=True, check=False, timeout=60,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT), "EAGLE3_AGENT_HELLO": codec.dumps(hello)},
    )  # fmt: skip
    answers, _ = find_frames("n", done.stdout)
    assert [one.error for one in answers] == [None], done.stderr


def test_every_job_that_still_runs_is_cancelled_and_seen_to_its_end(tmp_path: Path) -> None:
    root = tmp_path / "root"
    submit(root, "train", "/bin/sh", "-c", f"echo $$ > {tmp_path}/pid; exec sleep 300")
    submit(root, "plan", "/bin/true")
    wait_for((tmp_path / "pid").exists)
    wait_for(lambda: len(list(root.glob("jobs/plan-*/gen-0001/exit.json"))) == 1)
    assert stop_jobs(root, python=Path(sys.executable)) == []
    assert not Path("/proc", (tmp_path / "pid").read_text().strip()).exists()
    (train,) = root.glob("jobs/train-*/gen-0001")
    assert json.loads((train / "exit.json").read_text())["state"] == "CANCELLED"
    assert json.loads((train / "cancel.json").read_text())["reason"] == REASON
    assert not list(root.glob("jobs/plan-*/gen-0001/cancel.json")), "what has ended stays as it is"


def test_without_a_root_there_is_nothing_to_stop(tmp_path: Path) -> None:
    assert stop_jobs(tmp_path / "root", python=Path(sys.executable)) == []
    assert not (tmp_path / "root").exists()


def test_an_agent_that_cannot_answer_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "root/jobs/no key of a job").mkdir(parents=True)
    with pytest.raises(RuntimeError, match=r"0 of 1 jobs: .*not the key of a job"):
        stop_jobs(tmp_path / "root", python=Path(sys.executable))


@pytest.fixture
def others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[demo.run._Others]:
    monkeypatch.setattr(demo.run, "FOLDER", tmp_path)
    monkeypatch.setattr(demo.run, "SSH_LOG", tmp_path / "ssh-server.log")
    found = demo.run._Others()
    yield found
    found.stop()


def test_the_end_of_the_ssh_server_is_noticed(others: demo.run._Others) -> None:
    port = choose_port(0)
    others.start_ssh_server(port)
    assert ssh_server.greets(port)
    others.check()
    assert others._ssh_server is not None
    others._ssh_server.send_signal(signal.SIGKILL)
    others._ssh_server.wait()
    with pytest.raises(RuntimeError, match="the SSH server ended with code -9"):
        others.check()


def test_an_ssh_server_that_finds_its_port_taken_ends_the_demo_with_the_reason(
    others: demo.run._Others,
) -> None:
    with socket.socket() as somebody:
        somebody.bind(("127.0.0.1", 0))
        somebody.listen()
        with pytest.raises(
            RuntimeError, match=r"(?s)the SSH server ended with code 1\..*address already in use"
        ):
            others.start_ssh_server(somebody.getsockname()[1])


def test_a_builders_lines_come_as_it_writes_them_and_its_check_is_called(tmp_path: Path) -> None:
    log = tmp_path / "log"
    go_on = tmp_path / "go_on"
    script = f"printf 'one\\ntw'; while [ ! -e {go_on} ]; do sleep 0.05; done; printf 'o\\nthree'"
    child = processes.start(["/bin/sh", "-c", script], log=log, environment=os.environ, cwd=tmp_path)
    lines: list[str] = []

    def check() -> None:
        # Lines that came only at the child's end would never let it end.
        if lines:
            go_on.touch()

    try:
        for line in processes.follow_log(child, log, check):
            lines += [line]
    finally:
        processes.stop([child])
    assert lines == ["one", "two", "three"]


HANGING_DEMO = """
import sys, time
from pathlib import Path
import demo.run as run
from demo import processes

run.FOLDER = Path(sys.argv[1])
run.HOST_PYTHON = Path(sys.executable)

class Services:
    def stop(self): print("airflow stopped", flush=True)

def hang(*, keep, began):
    others = run._Others()
    try:
        log = run.FOLDER / "log"
        others._children.append(processes.start(["sleep", "300"], log=log, environment={}, cwd=run.FOLDER))
        (run.FOLDER / "child").write_text(str(others._children[0].pid))
        time.sleep(300)
    finally:
        run._stop_everything(Services(), others)

run._run_demo = hang
sys.argv = ["demo"]
sys.exit(run.main())
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_whatever_signal_ends_the_demo_its_children_and_jobs_end_too(
    tmp_path: Path, number: signal.Signals
) -> None:
    submit(tmp_path / "root", "train", "/bin/sh", "-c", f"echo $$ > {tmp_path}/pid; exec sleep 300")
    demo_process = subprocess.Popen(
        [sys.executable, "-c", HANGING_DEMO, str(tmp_path)], cwd=CHECKOUT, stdout=subprocess.PIPE, text=True
    )
    wait_for((tmp_path / "child").exists)
    wait_for((tmp_path / "pid").exists)
    demo_process.send_signal(number)
    time.sleep(0.1)
    # An impatient second one does not cut the stopping short.
    demo_process.send_signal(number)
    output, _ = demo_process.communicate(timeout=60)
    assert demo_process.returncode == 130, output
    assert "airflow stopped" in output
    for name in ("child", "pid"):
        assert not Path("/proc", (tmp_path / name).read_text().strip()).exists(), name
