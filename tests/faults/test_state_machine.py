"""Any order of submits, polls, acknowledgements, cancels, crashes and reboots, with real processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from eagle3_tasks.contracts.jobs import JobSpec, JobState, JobStatus
from tests.faults.conftest import IS_SOAK, SOAK_ROUNDS
from tests.faults.witness import Witness
from tests.host.job_host import JobHost

FAILING = "exit 3"
BODIES = [":", "sleep 0.2", "setsid sh -c 'trap \"\" TERM; sleep 0.4' & sleep 0.1", FAILING]


class OneJob(RuleBasedStateMachine):
    """One job as Airflow, a user and bad luck treat it.

    What the host says is compared with what has been done to it and with what the commands
    themselves have written down.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.host = JobHost(root=folder / "root")
        self.witness = Witness(folder / "witness")
        self.key = self.spec(":").key
        self.generation = 0
        self.bodies: dict[int, str] = {}
        self.disturbed: set[int] = set()
        """Generations whose runner was killed, or whose machine went down."""
        self.cancelled: set[int] = set()
        self.promised: int | None = None
        """The generation whose success was told and not yet acknowledged."""

    def spec(self, body: str) -> JobSpec:
        return self.host.spec(self.witness.script(body), grace_seconds=0.1)

    def see(self, status: JobStatus) -> None:
        assert status.generation >= self.generation
        self.generation = status.generation
        if self.promised is not None:
            assert (status.state, status.generation) == (JobState.SUCCEEDED, self.promised)
        if status.state is JobState.LOST:
            assert self.generation in self.disturbed, "lost, though nothing had happened to it"
        elif status.state is JobState.CANCELLED:
            assert self.generation in self.cancelled
        elif status.state is JobState.FAILED:
            assert self.bodies[self.generation] == FAILING or self.generation in self.disturbed
        elif status.state is JobState.SUCCEEDED:
            assert f"gen-{self.generation:04d}" in self.witness.lines("done")
            if not status.acknowledged:
                self.promised = self.generation

    def note_submit(self, status: JobStatus, body: str) -> None:
        self.bodies.setdefault(status.generation, body)
        self.see(status)

    @rule(body=st.sampled_from(BODIES))
    def submit(self, body: str) -> None:
        self.note_submit(self.host.submit(self.spec(body)), body)

    @rule(body=st.sampled_from(BODIES))
    def submit_from_two_supervisors(self, body: str) -> None:
        with ThreadPoolExecutor(2) as pool:
            statuses = list(pool.map(self.host.submit, [self.spec(body)] * 2))
        first, second = sorted(statuses, key=lambda status: (status.generation, status.state.is_final))
        self.note_submit(first, body)
        if second.generation != first.generation:
            # The first one's job had ended, without success, before the second one looked.
            is_hopeless = self.bodies[first.generation] == FAILING
            assert is_hopeless or first.generation in self.cancelled | self.disturbed
        self.note_submit(second, body)

    @rule()
    def poll(self) -> None:
        status = self.host.poll(self.key)
        self.see(status)
        if status.state.is_final and status.state is not JobState.LOST:
            assert self.witness.living() == [], "it has ended, but its processes have not"

    @precondition(lambda self: self.promised is not None)
    @rule(offset=st.sampled_from([0, 0, -1, 1]))
    def acknowledge(self, offset: int) -> None:
        """Acknowledge what was told, or, as a late message would, something else."""
        assert self.promised is not None
        if offset == 0:
            self.promised = None
        self.host.acknowledge(self.key, self.generation + offset)

    @rule()
    def cancel(self) -> None:
        self.cancelled.add(self.generation)
        was_lost = self.host.poll(self.key).state is JobState.LOST
        self.see(self.host.cancel(self.key))
        if was_lost:
            assert self.witness.living() == []

    @precondition(lambda self: self.generation > 0)
    @rule()
    def kill_runner(self) -> None:
        record = json.loads((self.host.generation(self.key, self.generation) / "started.json").read_text())
        if record["runner"]["pid"] in self.living():
            self.disturbed.add(self.generation)
            with contextlib.suppress(ProcessLookupError):
                os.kill(record["runner"]["pid"], signal.SIGKILL)

    @precondition(lambda self: self.generation > 0)
    @rule(is_container=st.booleans())
    def reboot(self, is_container: bool) -> None:
        """Be another machine. What ran is gone, unless a container shared its processes with others."""
        self.disturbed.add(self.generation)
        if not is_container:
            while living := self.living():
                # Stopped first: nobody is to see another die and draw conclusions.
                for number in (signal.SIGSTOP, signal.SIGKILL):
                    for pid in living:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, number)
                time.sleep(0.01)
        self.host.reboot()

    @rule(seconds=st.sampled_from([0.02, 0.1, 0.3]))
    def pass_time(self, seconds: float) -> None:
        time.sleep(seconds)

    @precondition(lambda self: self.generation > 0)
    @rule()
    def wait(self) -> None:
        self.see(self.host.wait_for_end(self.key))

    @invariant()
    def never_two_commands_at_once_and_none_twice(self) -> None:
        self.witness.check()
        if self.promised is not None:
            assert self.witness.begun[-1] == f"gen-{self.promised:04d}"

    def living(self) -> list[int]:
        """List the job's processes by their environment."""
        wanted = f"EAGLE3_GENERATION_FOLDER={self.host.folder(self.key)}/".encode()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if wanted in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
        return found

    def teardown(self) -> None:
        try:
            if self.generation:
                self.see(self.host.wait_for_end(self.key))
                self.witness.check()
        finally:
            self.host.close()


def test_no_order_of_events_runs_a_job_twice_or_loses_it_without_a_crash(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    run_state_machine_as_test(
        lambda: OneJob(tmp_path_factory.mktemp("job")),
        settings=settings(
            max_examples=SOAK_ROUNDS or 10,
            stateful_step_count=20 if IS_SOAK else 10,
            derandomize=not IS_SOAK,
            database=None,
            deadline=None,
            # Ten steps are read more quickly than they are shortened.
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
