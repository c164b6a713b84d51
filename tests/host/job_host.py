"""A GPU host in a temporary folder: real agents' verbs, real runners, real commands."""

from __future__ import annotations

import base64
import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eagle3_tasks.contracts.jobs import (
    AcknowledgeBody,
    CancelBody,
    JobSpec,
    JobState,
    JobStatus,
    PollBody,
    PollItem,
    SubmitBody,
    job_key,
    run_key,
)
from eagle3_tasks.contracts.paths import RootLayout
from eagle3_tasks.host import job_folder as jobs
from eagle3_tasks.host.files import read_json
from eagle3_tasks.host.job_records import StartedRecord
from eagle3_tasks.host.machine import MACHINE_ID_VARIABLE, machine_id
from eagle3_tasks.host.process import JobMarks, find_job_processes, terminate_tree
from eagle3_tasks.host.verbs import JobVerbs

RUN_KEY = run_key(dag_id="tests", run_id="one")


@dataclasses.dataclass
class JobHost:
    root: Path
    make_root: bool = True
    keys: set[str] = dataclasses.field(default_factory=set)
    environment: dict[str, str] = dataclasses.field(default_factory=lambda: dict(os.environ))

    @property
    def verbs(self) -> JobVerbs:
        identity = machine_id(self.environment)
        return JobVerbs(
            root=self.root, make_root=self.make_root, machine_id=identity, environment=self.environment
        )

    def spec(
        self, script: str, *, name: str = "job", argv: tuple[str, ...] | None = None, **more: Any
    ) -> JobSpec:
        key = job_key(dag_id="tests", run_id="one", stage=name)
        return JobSpec(
            **{
                "key": key,
                "stage": name,
                "run_key": RUN_KEY,
                "argv": argv or ("sh", "-c", script),
                "grace_seconds": 2.0,
            }
            | more
        )

    def submit(self, spec: JobSpec) -> JobStatus:
        self.keys.add(spec.key)
        return self.verbs.submit(SubmitBody(spec=spec))

    def poll(self, key: str, *, generation: int = 0, confirmed: int | None = None) -> JobStatus:
        item = PollItem(key=key, generation=generation, confirmed=confirmed)
        reply = self.verbs.poll(PollBody(jobs=(item,)))
        assert not reply.errors
        return reply.jobs[0]

    def cancel(self, key: str, reason: str = "a test says so") -> JobStatus:
        return self.verbs.cancel(CancelBody(key=key, reason=reason))

    def acknowledge(self, key: str, generation: int) -> JobStatus:
        return self.verbs.acknowledge(AcknowledgeBody(key=key, generation=generation))

    def wait_for(self, key: str, *states: JobState, seconds: float = 15.0) -> JobStatus:
        found: list[JobStatus] = []

        def is_there() -> bool:
            found.append(self.poll(key))
            return found[-1].state in states

        assert wait_until(is_there, seconds), f"{key} is {found[-1]}, not {states}"
        return found[-1]

    def wait_for_end(self, key: str, seconds: float = 15.0) -> JobStatus:
        return self.wait_for(key, *(state for state in JobState if state.is_final), seconds=seconds)

    def run(self, spec: JobSpec) -> JobStatus:
        self.submit(spec)
        return self.wait_for_end(spec.key)

    def folder(self, key: str) -> Path:
        return RootLayout(self.root).job(key)

    def generation(self, key: str, number: int = 1) -> Path:
        return jobs.generation_folder(self.folder(key), number)

    def started(self, key: str, number: int = 1) -> StartedRecord:
        record = read_json(StartedRecord, self.generation(key, number) / "started.json")
        assert record is not None
        return record

    def reboot(self) -> None:
        """Be another machine from now on; what runs is not ended."""
        self.environment[MACHINE_ID_VARIABLE] = f"after-{machine_id(self.environment)}"

    def close(self) -> None:
        """End everything this host runs."""
        for key in self.keys:
            folder = self.folder(key)
            marks = JobMarks(job_folder=folder, lock_path=jobs.lock_path(folder), roots=())
            assert terminate_tree(lambda marks=marks: find_job_processes(marks), grace_seconds=0.0) == []


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def log_bytes(status: JobStatus) -> bytes:
    assert status.log is not None
    return base64.b64decode(status.log.data)


def pids_in(folder: Path, *names: str) -> list[int]:
    """Read the numbers that processes of a test wrote into files."""
    assert wait_until(
        lambda: all((folder / name).exists() and (folder / name).read_text().strip() for name in names)
    )
    return [int((folder / name).read_text()) for name in names]
