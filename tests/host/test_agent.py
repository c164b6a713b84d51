"""The agent as the orchestrator meets it: a process, lines in, frames out."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eagle3_tasks.contracts import codec
from eagle3_tasks.contracts.digests import release_digest
from eagle3_tasks.contracts.errors import DiskProblem
from eagle3_tasks.contracts.jobs import (
    AcknowledgeBody,
    Answer,
    CancelBody,
    Hello,
    HelloBody,
    JobState,
    PollBody,
    PollItem,
    ProbeBody,
    Request,
    SubmitBody,
    find_frames,
)
from eagle3_tasks.host.agent import MAX_REQUEST_BYTES
from eagle3_tasks.host.launch import package_folder
from eagle3_tasks.host.machine import machine_id
from eagle3_tasks.host.process import identity_of
from tests.host.job_host import JobHost, pids_in, wait_until

NONCE = "7f3a99"


@dataclasses.dataclass
class Agent:
    process: subprocess.Popen[bytes]
    answers: dict[int, Answer] = dataclasses.field(default_factory=dict)
    rest: str = ""
    num_requests: int = 0

    def send(self, verb: str, body: object) -> int:
        self.num_requests += 1
        self.write(codec.dumps(Request(id=self.num_requests, verb=verb, body=codec.to_plain(body))) + "\n")  # type: ignore[arg-type]
        return self.num_requests

    def write(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text.encode())
        self.process.stdin.flush()

    def wait(self, request_id: int, seconds: float = 20.0) -> Answer:
        assert self.process.stdout is not None
        deadline = time.monotonic() + seconds
        while request_id not in self.answers:
            readable, _, _ = select.select(
                [self.process.stdout], [], [], max(0.0, deadline - time.monotonic())
            )
            assert readable, f"no answer to request {request_id} within {seconds} s"
            piece = os.read(self.process.stdout.fileno(), 1 << 16)
            assert piece, "the agent has ended"
            answers, self.rest = find_frames(NONCE, self.rest + piece.decode())
            self.answers |= {answer.id: answer for answer in answers}
        return self.answers.pop(request_id)

    def ask(self, verb: str, body: object) -> dict[str, Any]:
        answer = self.wait(self.send(verb, body))
        assert answer.error is None, answer.error
        assert answer.body is not None
        return dict(answer.body)


@contextlib.contextmanager
def running_agent(
    root: Path, *, release: str = "", environment: dict[str, str] | None = None
) -> Iterator[Agent]:
    hello = Hello(
        nonce=NONCE, root=str(root), release=release or release_digest(package_folder()), make_root=True
    )
    process = subprocess.Popen(
        # A noisy login: what comes before the agent must do no harm.
        [
            "sh",
            "-c",
            'echo "Welcome <<<EAGLE:other {}"; exec "$@"',
            "sh",
            sys.executable,
            "-P",
            "-m",
            "eagle3_tasks.host.agent",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ
        | {"EAGLE3_AGENT_HELLO": codec.dumps(hello), "PYTHONPATH": str(Path.cwd())}
        | (environment or {}),
    )
    try:
        yield Agent(process)
    finally:
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        process.wait(10)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[JobHost]:
    host = JobHost(root=tmp_path / "root")
    yield host
    host.close()


def test_a_job_goes_through_the_agent_from_submit_to_acknowledgement(host: JobHost):
    spec = host.spec("echo hello; echo '{\"rows\": 1}' > report.json")
    host.keys.add(spec.key)
    with running_agent(host.root) as agent:
        hello = agent.ask("hello", HelloBody())
        assert hello["machine_id"] == machine_id(os.environ)
        assert hello["python"] == sys.executable
        assert agent.ask("submit", SubmitBody(spec=spec))["generation"] == 1
        items = (PollItem(key=spec.key), PollItem(key=host.spec("", name="absent").key))

        def poll() -> list[dict[str, Any]]:
            return agent.ask("poll", PollBody(jobs=items))["jobs"]

        assert wait_until(lambda: poll()[0]["state"] == "SUCCEEDED")
        present, absent = poll()
        assert present["report"] == {"rows": 1}
        assert absent["state"] == "ABSENT"
        assert agent.ask("acknowledge", AcknowledgeBody(key=spec.key, generation=1))["acknowledged"] is True
        assert agent.ask("cancel", CancelBody(key=spec.key, reason="late"))["state"] == "SUCCEEDED"


def test_whatever_is_asked_the_agent_answers_and_goes_on(host: JobHost):
    with running_agent(host.root) as agent:
        agent.write("this is no request\n")
        assert (error := agent.wait(0).error) is not None
        assert error.code == "REQUEST_REFUSED"
        agent.write('{"id": 77, "verb": "reboot", "body": {}}\n')
        assert (error := agent.wait(77).error) is not None
        assert "reboot" in error.message
        agent.write('{"id": 78, "verb": "poll", "body": {"jobs": [], "jbos": 1}}\n')
        assert (error := agent.wait(78).error) is not None
        assert "Did you mean 'jobs'" in error.message
        error = agent.wait(agent.send("cancel", CancelBody(key="../../etc", reason=""))).error
        assert error is not None
        assert error.code == "REQUEST_REFUSED"
        reply = agent.ask("poll", PollBody(jobs=(PollItem(key="../x"), PollItem(key=host.spec("").key))))
        assert list(reply["errors"]) == ["../x"]
        assert [job["state"] for job in reply["jobs"]] == ["ABSENT"]
        assert agent.ask("hello", HelloBody())["host_name"]


def test_a_request_that_is_too_long_is_refused_by_its_number_and_the_next_one_answered(host: JobHost):
    with running_agent(host.root) as agent:
        agent.write('{"id": 7, "verb": "submit", "body": {"text": "' + "x" * MAX_REQUEST_BYTES + '"}}\n')
        assert (error := agent.wait(7).error) is not None
        assert error.code == "REQUEST_REFUSED"
        assert f"{MAX_REQUEST_BYTES + 49} bytes; {MAX_REQUEST_BYTES} are possible" in error.message
        agent.write("x" * (MAX_REQUEST_BYTES + 1) + "\n")
        assert (error := agent.wait(0).error) is not None
        assert f"{MAX_REQUEST_BYTES + 1} bytes" in error.message
        assert agent.ask("hello", HelloBody())["host_name"]


def test_an_agent_that_may_not_make_its_root_submits_nothing_where_it_has_vanished(host: JobHost):
    host.root.mkdir()
    host.make_root = False
    with pytest.raises(DiskProblem, match="Is the data disk mounted"):
        host.submit(host.spec("true"))
    assert list(host.root.iterdir()) == []


def test_other_code_than_was_asked_for_does_not_answer_requests(host: JobHost):
    with running_agent(host.root, release="0" * 24) as agent:
        error = agent.wait(0).error
        assert error is not None
        assert error.code == "INCOMPATIBLE_RELEASE"
        assert agent.process.wait(10) == 14


def test_the_agent_ends_with_its_channel_and_the_job_lives_on(host: JobHost):
    spec = host.spec("while [ ! -e go ]; do sleep 0.05; done")
    host.keys.add(spec.key)
    with running_agent(host.root) as agent:
        agent.ask("submit", SubmitBody(spec=spec))
        assert agent.process.stdin is not None
        agent.process.stdin.close()
        assert agent.process.wait(2) == 0
    host.wait_for(spec.key, JobState.RUNNING)
    (host.generation(spec.key) / "go").touch()
    assert host.wait_for_end(spec.key).state is JobState.SUCCEEDED


def test_a_killed_agent_harms_no_job(host: JobHost):
    spec = host.spec("while [ ! -e go ]; do sleep 0.05; done")
    host.keys.add(spec.key)
    with running_agent(host.root) as agent:
        agent.ask("submit", SubmitBody(spec=spec))
        os.kill(agent.process.pid, signal.SIGKILL)
        agent.process.wait(5)
    assert host.submit(spec).generation == 1
    (host.generation(spec.key) / "go").touch()
    assert host.wait_for_end(spec.key).state is JobState.SUCCEEDED


def test_two_agents_asked_at_once_start_one_job(host: JobHost):
    spec = host.spec("echo started >> ../count; sleep 0.5")
    host.keys.add(spec.key)
    with running_agent(host.root) as one, running_agent(host.root) as other:
        sent = [(agent, agent.send("submit", SubmitBody(spec=spec))) for agent in (one, other, one, other)]
        answers = [agent.wait(request) for agent, request in sent]
        assert [answer.body and answer.body["generation"] for answer in answers] == [1, 1, 1, 1]
    host.wait_for_end(spec.key)
    assert (host.folder(spec.key) / "count").read_text() == "started\n"


def test_a_request_in_flight_when_standard_input_ends_is_still_answered(host: JobHost):
    with running_agent(host.root) as agent:
        request = agent.send("hello", HelloBody())
        assert agent.process.stdin is not None
        agent.process.stdin.close()
        assert agent.wait(request).body is not None


def test_a_probe_that_hangs_is_ended_at_its_deadline_and_holds_up_nothing(host: JobHost, tmp_path: Path):
    # A release whose probe hangs, as on a stalled disk, with a child of its own.
    release = tmp_path / "release"
    release.mkdir()
    subprocess.run(["cp", "-r", str(package_folder()), str(release / "eagle3_tasks")], check=True)
    (release / "eagle3_tasks" / "commands" / "main.py").write_text(
        "import os, subprocess, sys, pathlib\n"
        "child = subprocess.Popen(['sleep', '60'])\n"
        f"pathlib.Path({str(tmp_path / 'child')!r}).write_text(str(child.pid))\n"
        "print('asking the driver', flush=True)\n"
        "child.wait()\n"
    )
    digest = release_digest(release / "eagle3_tasks")
    with running_agent(host.root, release=digest, environment={"PYTHONPATH": str(release)}) as agent:
        request = agent.send("probe", ProbeBody(spec={}, deadline_seconds=1.0))
        assert agent.ask("hello", HelloBody())["release"] == digest
        [child] = pids_in(tmp_path, "child")
        error = agent.wait(request).error
        assert error is not None
        assert "did not end within 1 s" in error.message
        assert "asking the driver" in error.message
        assert wait_until(lambda: identity_of(child) is None)
