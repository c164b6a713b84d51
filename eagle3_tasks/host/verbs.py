"""What the agent does for each verb. Every answer can be given again: nothing here runs twice."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import subprocess
import time
from collections.abc import Generator, Mapping
from pathlib import Path

from eagle3_tasks.contracts.errors import ErrorRecord, PipelineError, UnexpectedFailure
from eagle3_tasks.contracts.jobs import (
    MAX_LOG_PIECE_BYTES,
    AcknowledgeBody,
    CancelBody,
    JobSpec,
    JobState,
    JobStatus,
    PollBody,
    PollItem,
    PollReply,
    SubmitBody,
)
from eagle3_tasks.contracts.paths import RootLayout
from eagle3_tasks.host import job_folder as jobs
from eagle3_tasks.host import job_records as records
from eagle3_tasks.host.disk_errors import disk_problem
from eagle3_tasks.host.files import PRIVATE_FILE, file_lock, make_private_folder, read_json, write_json
from eagle3_tasks.host.launch import launch_detached
from eagle3_tasks.host.log_delivery import (
    MAX_REPLY_LOG_BYTES,
    MIN_PIECE_BYTES,
    LogTurns,
    confirm,
    last_lines,
    read_piece,
)
from eagle3_tasks.host.machine import host_name
from eagle3_tasks.host.process import find_job_processes, terminate_tree
from eagle3_tasks.host.root_folder import prepare_root

START_SECONDS = 15.0
"""How long a submit waits for the runner to say that it runs. A slower one is still QUEUED."""
SUBMIT_LOCK_SECONDS = 45.0
_LOOK_SECONDS = 0.02


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobVerbs:
    """The verbs on jobs, for one ROOT on the machine of that identity.

    ``runners`` are those that this agent started and has to collect when they end. With
    ``make_root`` a submit makes a ROOT that isn't there.
    """

    root: Path
    make_root: bool
    machine_id: str
    environment: Mapping[str, str]
    log_turns: LogTurns = dataclasses.field(default_factory=LogTurns)
    runners: list[subprocess.Popen[bytes]] = dataclasses.field(default_factory=list[subprocess.Popen[bytes]])

    def submit(self, body: SubmitBody) -> JobStatus:
        """Make sure that the job runs or has ended well, exactly once at a time.

        Running or queued: joined. Succeeded and not acknowledged: handed over. Anything
        else: the next generation is started, after what lives of the one before is gone.

        Raises:
            InvalidSettings: no job can live under this ROOT.
            DiskProblem: ROOT is not there, or its disk is broken.
            UnexpectedFailure: processes of the generation before can't be ended, or the
                runner does not start. Nothing runs then.
        """
        spec = body.spec
        root = prepare_root(self.root, make_root=self.make_root)
        job_folder = make_private_folder(RootLayout(root).job(spec.key))
        with _submit_lock(job_folder):
            jobs.lease_path(job_folder).touch(mode=PRIVATE_FILE)
            view = jobs.read_job(job_folder, machine_id=self.machine_id)
            is_wanted = view.state is JobState.SUCCEEDED and not view.acknowledged
            if view.state in (JobState.QUEUED, JobState.RUNNING) or is_wanted:
                return jobs.status_of(view)
            with self._empty_job(job_folder, view, spec) as lock:
                generation = view.generation + 1
                folder = jobs.make_generation(job_folder, generation, spec)
                runner = launch_detached(folder, lock, self.environment)
            self.runners.append(runner)
            _wait_for_start(folder, runner)
            return jobs.status_of(jobs.read_job(job_folder, machine_id=self.machine_id))

    def poll(self, body: PollBody) -> PollReply:
        """Tell the state of each job, with the next piece of its log, and renew its lease.

        Many loud jobs share what a reply may hold of logs.
        """
        # A set of Popen objects is polled by whoever comes by; ended ones are forgotten.
        self.runners[:] = [runner for runner in self.runners if runner.poll() is None]
        statuses: dict[int, JobStatus] = {}
        errors: dict[str, ErrorRecord] = {}
        num_left = MAX_REPLY_LOG_BYTES
        for index in self.log_turns.order([item.key for item in body.jobs]):
            item = body.jobs[index]
            try:
                status = self._poll_one(
                    item, max_bytes=max(MIN_PIECE_BYTES, min(num_left, MAX_LOG_PIECE_BYTES))
                )
            except PipelineError as error:
                errors[item.key] = error.record()
            except OSError as error:
                errors[item.key] = disk_problem(error).record()
            else:
                statuses[index] = status
                if num_left > 0:
                    self.log_turns.last = item.key
                num_left -= status.log.stop - status.log.start if status.log else 0
        return PollReply(jobs=tuple(statuses[index] for index in sorted(statuses)), errors=errors)

    def cancel(self, body: CancelBody) -> JobStatus:
        """Record that a person wants the job to stop; its runner obeys within half a second.

        Where the runner is dead, what lives of the job is ended here. A submit that is under
        way is waited for: what it starts is meant as well.
        """
        job_folder = RootLayout(self.root).job(body.key)
        view = self._record_cancel(job_folder, body.reason)
        if view.state not in (JobState.QUEUED, JobState.RUNNING) and job_folder.is_dir():
            with _submit_lock(job_folder):
                view = self._record_cancel(job_folder, body.reason)
                if view.state is JobState.LOST:
                    self._end_remains(job_folder, view, grace_seconds=_grace_seconds(view, 0.0))
        return jobs.status_of(jobs.read_job(job_folder, machine_id=self.machine_id))

    def acknowledge(self, body: AcknowledgeBody) -> JobStatus:
        """Note that Airflow has recorded a success: the next submit runs the job anew."""
        job_folder = RootLayout(self.root).job(body.key)
        view = jobs.read_job(job_folder, machine_id=self.machine_id)
        is_meant = view.generation == body.generation and view.state is JobState.SUCCEEDED
        if is_meant and view.folder is not None and not view.acknowledged:
            write_json(view.folder / records.ACKNOWLEDGED_FILE, records.AcknowledgedRecord(at=time.time()))
            view = jobs.read_job(job_folder, machine_id=self.machine_id)
        return jobs.status_of(view)

    def _record_cancel(self, job_folder: Path, reason: str) -> jobs.JobView:
        """Record the cancel if the job lives, and tell how it stands after that: its runner may have died."""
        view = jobs.read_job(job_folder, machine_id=self.machine_id)
        if view.folder is None or view.state.is_final:
            return view
        path = view.folder / records.CANCEL_FILE
        if not path.exists():
            write_json(path, records.CancelRecord(reason=reason, at=time.time()))
        return jobs.read_job(job_folder, machine_id=self.machine_id)

    def _poll_one(self, item: PollItem, *, max_bytes: int) -> JobStatus:
        job_folder = RootLayout(self.root).job(item.key)
        # The state is read before the log: what a final state sees of the log is all of it.
        view = jobs.read_job(job_folder, machine_id=self.machine_id)
        if view.folder is None:
            return jobs.status_of(view)
        if not view.state.is_final:
            jobs.lease_path(job_folder).touch(mode=PRIVATE_FILE)
        if item.confirmed is not None and 0 < item.generation <= view.generation:
            confirm(jobs.generation_folder(job_folder, item.generation), item.confirmed)
        piece = read_piece(view.folder, is_final=view.state.is_final, max_bytes=max_bytes)
        return dataclasses.replace(jobs.status_of(view), log=piece)

    @contextlib.contextmanager
    def _empty_job(self, job_folder: Path, view: jobs.JobView, spec: JobSpec) -> Generator[int]:
        """Hold the job's lock with nothing of it alive, for as long as a runner is started."""
        if view.generation:
            self._end_remains(job_folder, view, grace_seconds=_grace_seconds(view, spec.grace_seconds))
        path = jobs.lock_path(job_folder)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UnexpectedFailure(
                    f"{host_name()}: {path} is held by a process that can't be seen from here, perhaps of "
                    "another user or container. Nothing was started. Find it with `fuser` and end it."
                ) from error
            yield descriptor
        finally:
            os.close(descriptor)

    def _end_remains(self, job_folder: Path, view: jobs.JobView, *, grace_seconds: float) -> None:
        marks = jobs.job_marks(view, job_folder, machine_id=self.machine_id)
        living = terminate_tree(lambda: find_job_processes(marks), grace_seconds=grace_seconds)
        if living:
            pids = ", ".join(str(identity.pid) for identity in living)
            raise UnexpectedFailure(
                f"{host_name()}: {len(living)} process(es) of an earlier attempt survive KILL (pid {pids}), "
                "as on a stalled disk or a hung GPU driver. Nothing was started. Reboot the host if so."
            )


@contextlib.contextmanager
def _submit_lock(job_folder: Path) -> Generator[None]:
    deadline = time.monotonic() + SUBMIT_LOCK_SECONDS
    while True:
        with file_lock(jobs.submit_lock_path(job_folder), is_blocking=False) as descriptor:
            if descriptor is not None:
                yield
                return
        if time.monotonic() > deadline:
            raise UnexpectedFailure(
                f"{host_name()}: another submit of {job_folder.name} has been under way for "
                f"{SUBMIT_LOCK_SECONDS:g} s. Nothing was started."
            )
        time.sleep(_LOOK_SECONDS)


def _grace_seconds(view: jobs.JobView, default: float) -> float:
    spec = read_json(JobSpec, view.folder / records.SPEC_FILE) if view.folder else None
    return spec.grace_seconds if spec else default


def _wait_for_start(folder: Path, runner: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        has_ended = runner.poll() is not None
        if (folder / records.STARTED_FILE).exists():
            return
        if has_ended:
            raise UnexpectedFailure(
                f"{host_name()}: the job's runner could not start (exit code {runner.returncode}): "
                f"{last_lines(folder / records.LOG_FILE)}"
            )
        time.sleep(_LOOK_SECONDS)
