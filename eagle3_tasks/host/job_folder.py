"""A job's folder, and its state as a pure function of what lies there and what lives.

::

    ROOT/jobs/KEY/
        lock           held by every process of the job that inherited it
        submit.lock    held while one agent decides what a submit means
        lease          touched by each poll
        gen-0001/      one attempt: spec.json, started.json, heartbeat.json, progress.json,
                       output.log, log_marks.json, report.json, error.json, delivered.json,
                       cancel.json, exit.json (written last), acknowledged.json
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from eagle3_tasks.contracts import codec
from eagle3_tasks.contracts.errors import RequestRefused
from eagle3_tasks.contracts.jobs import MAX_PROGRESS_BYTES, ExitRecord, JobSpec, JobState, JobStatus, Progress
from eagle3_tasks.contracts.stages import PROGRESS_FILE, REPORT_FILE
from eagle3_tasks.host import job_records as records
from eagle3_tasks.host.files import PRIVATE_FOLDER, read_json, sync_folder, temporary_sibling, write_json
from eagle3_tasks.host.machine import boot_seconds
from eagle3_tasks.host.process import JobMarks, is_alive, is_held_open

RUNNER_DIED = "the runner died"
MACHINE_RESTARTED = "the machine restarted"
STARTING = "starting"

_GENERATION = re.compile(r"gen-(\d{4,})")
T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobView:
    """What a job's folder says of its newest generation.

    ``folder`` is that generation's folder, None where the job is absent.
    """

    key: str
    state: JobState
    generation: int = 0
    folder: Path | None = None
    detail: str = ""
    acknowledged: bool = False
    started: records.StartedRecord | None = None
    exit: ExitRecord | None = None


def lock_path(job_folder: Path) -> Path:
    return job_folder / "lock"


def submit_lock_path(job_folder: Path) -> Path:
    return job_folder / "submit.lock"


def lease_path(job_folder: Path) -> Path:
    return job_folder / "lease"


def generation_folder(job_folder: Path, generation: int) -> Path:
    return job_folder / f"gen-{generation:04d}"


def newest_generation(job_folder: Path) -> int:
    """Give the number of the newest attempt; 0 where there is none."""
    try:
        names = [path.name for path in job_folder.iterdir()]
    except FileNotFoundError:
        return 0
    return max((int(match[1]) for match in map(_GENERATION.fullmatch, names) if match), default=0)


def make_generation(job_folder: Path, generation: int, spec: JobSpec) -> Path:
    """Make the folder of the next attempt with its spec in it, whole or not at all."""
    folder = generation_folder(job_folder, generation)
    temporary = temporary_sibling(folder)
    temporary.mkdir(mode=PRIVATE_FOLDER)
    write_json(temporary / records.SPEC_FILE, spec)
    temporary.rename(folder)
    sync_folder(job_folder)
    return folder


def read_job(job_folder: Path, *, machine_id: str) -> JobView:
    """Tell the state of a job.

    A job without an exit record is lost as soon as its runner is: on another boot, or
    dead on this one. Whether processes of it live on is a question of its own.
    """
    key = job_folder.name
    generation = newest_generation(job_folder)
    if generation == 0:
        return JobView(key=key, state=JobState.ABSENT)
    folder = generation_folder(job_folder, generation)
    started = read_json(records.StartedRecord, folder / records.STARTED_FILE)

    def view(state: JobState, **more: Any) -> JobView:
        return JobView(key=key, state=state, generation=generation, folder=folder, started=started, **more)

    ended = _ended(folder, view)
    if ended is not None:
        return ended
    if started is None:
        # The lock is taken before the folder is made; it is passed on to the runner.
        if is_held_open(lock_path(job_folder)):
            return view(JobState.QUEUED, detail=STARTING)
    elif started.machine_id == machine_id and is_alive(started.runner):
        heartbeat = read_leniently(records.HeartbeatRecord, folder / records.HEARTBEAT_FILE)
        detail = heartbeat.detail if heartbeat else STARTING
        return view(JobState.QUEUED if started.command is None else JobState.RUNNING, detail=detail)
    # It may have ended, or begun, between the looks above.
    ended = _ended(folder, view)
    if ended is not None:
        return ended
    if started is None and (folder / records.STARTED_FILE).exists():
        return read_job(job_folder, machine_id=machine_id)
    is_other_boot = started is not None and started.machine_id != machine_id
    return view(JobState.LOST, detail=MACHINE_RESTARTED if is_other_boot else RUNNER_DIED)


def status_of(view: JobView) -> JobStatus:
    """Make the agent's answer about a job, without its log."""
    if view.folder is None:
        return JobStatus(key=view.key, state=view.state)
    is_succeeded = view.state is JobState.SUCCEEDED
    heartbeat = read_leniently(records.HeartbeatRecord, view.folder / records.HEARTBEAT_FILE)
    is_living = not view.state.is_final and heartbeat is not None
    return JobStatus(
        key=view.key,
        state=view.state,
        generation=view.generation,
        detail=view.detail,
        heartbeat_age_seconds=max(0.0, boot_seconds() - heartbeat.boot_seconds)
        if is_living and heartbeat
        else None,
        acknowledged=view.acknowledged,
        progress=read_progress(view.folder),
        exit=view.exit,
        report=read_report(view.folder) if is_succeeded else None,
        log_path=str(view.folder / records.LOG_FILE),
    )


def job_marks(view: JobView, job_folder: Path, *, machine_id: str) -> JobMarks:
    """Say how the processes of the job's newest generation are known.

    Numbers and start times of another boot mean nothing on this one and are left out.
    """
    started = view.started
    roots = [started.runner, started.command] if started and started.machine_id == machine_id else []
    return JobMarks(
        job_folder=job_folder,
        lock_path=lock_path(job_folder),
        roots=tuple(root for root in roots if root is not None),
    )


def read_progress(folder: Path) -> Progress | None:
    """Read how far the job is; None where it has not said so, or not well."""
    path = folder / PROGRESS_FILE
    try:
        if path.stat().st_size > MAX_PROGRESS_BYTES:
            return None
    except OSError:
        return None
    return read_leniently(Progress, path)


def read_report(folder: Path) -> Mapping[str, Any]:
    """Read the report of a command that ended well; one that wrote none reports nothing.

    Raises:
        RequestRefused: the file is not a JSON object.
    """
    path = folder / REPORT_FILE
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return {}
    report = codec.loads_plain(content, where=str(path))
    if not isinstance(report, dict):
        raise RequestRefused(f"{path}: an object is needed.")
    return cast("dict[str, Any]", report)


def read_leniently(kind: type[T], path: Path) -> T | None:
    """Read a record that is renewed without fsync: a power cut may have torn it."""
    try:
        return read_json(kind, path)
    except RequestRefused:
        return None


def _ended(folder: Path, view: Any) -> JobView | None:
    record = read_json(ExitRecord, folder / records.EXIT_FILE)
    if record is None:
        return None
    detail = record.error.message if record.error else ""
    is_acknowledged = (folder / records.ACKNOWLEDGED_FILE).exists()
    return cast("JobView", view(record.state, exit=record, detail=detail, acknowledged=is_acknowledged))
