"""``python -m eagle3_tasks.host.runner GENERATION_FOLDER``: runs one attempt of a job.

It has a session of its own and outlives whoever started it. It waits for a place, runs the
command with all its output in the log, renews the heartbeat, obeys a cancellation and the
lease, ends whatever the command left behind, and writes the exit record last.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from eagle3_tasks.contracts.errors import MissingSoftware, PipelineError, RequestRefused, UnexpectedFailure
from eagle3_tasks.contracts.jobs import AGENT_PYTHON, ExitRecord, JobSpec
from eagle3_tasks.contracts.paths import RootLayout
from eagle3_tasks.contracts.stages import GENERATION_FOLDER_VARIABLE
from eagle3_tasks.host import job_folder as jobs
from eagle3_tasks.host import job_records as records
from eagle3_tasks.host.disk_errors import disk_problem, is_disk_error
from eagle3_tasks.host.files import read_json, write_json
from eagle3_tasks.host.job_end import (
    Stop,
    exit_record,
    failed_before_start,
    stop_for_cancel,
    stop_for_orphan,
    stop_for_signal,
)
from eagle3_tasks.host.launch import LOCK_DESCRIPTOR_VARIABLE, release_environment
from eagle3_tasks.host.log_delivery import MINUTE_SECONDS, LogMarks, close_log, close_minute
from eagle3_tasks.host.machine import boot_seconds, machine_id
from eagle3_tasks.host.memory_kills import count_memory_kills, memory_group_of
from eagle3_tasks.host.process import (
    JobMarks,
    ProcessIdentity,
    adopt_orphans,
    find_job_processes,
    identity_of,
    own_identity,
    terminate_tree,
)
from eagle3_tasks.host.slots import waiting_ticket

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 5.0
LOOK_SECONDS = 0.1
EXIT_RETRY_SECONDS = 1.0
_NO_PROGRAM = {errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ENOEXEC}


class Attempt:
    """One generation of a job while it runs: what the loops below share."""

    def __init__(self, folder: Path, spec: JobSpec, lock_descriptor: int) -> None:
        self.folder = folder
        self.job = folder.parent
        self.spec = spec
        self.descriptors = [lock_descriptor]
        self.command: ProcessIdentity | None = None
        self._detail = jobs.STARTING
        self._signal = 0
        self._last_heartbeat = float("-inf")
        self._marks = LogMarks()
        self._last_minute = time.monotonic()
        self._lease = self._read_lease()
        self._lease_seen = boot_seconds()

    def record_start(self) -> None:
        """Say who runs this attempt; from then on it is this process or nobody."""
        record = records.StartedRecord(
            machine_id=machine_id(os.environ),
            runner=own_identity(),
            command=self.command,
            started_at=time.time(),
        )
        write_json(self.folder / records.STARTED_FILE, record)

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._signal = number

    def beat(self, detail: str) -> None:
        """Renew the heartbeat if it is due or says something new."""
        now = time.monotonic()
        if detail == self._detail and now - self._last_heartbeat < HEARTBEAT_SECONDS:
            return
        self._detail, self._last_heartbeat = detail, now
        progress = jobs.read_progress(self.folder)
        record = records.HeartbeatRecord(
            at=time.time(),
            boot_seconds=boot_seconds(),
            detail=detail,
            done=progress.done if progress else None,
        )
        # A full disk must not end a job that may be the one to free it.
        with contextlib.suppress(OSError):
            write_json(self.folder / records.HEARTBEAT_FILE, record, is_durable=False)

    def mark_log(self, *, is_final: bool = False) -> None:
        """Mark once a minute, and at the end, what a flooding log leaves out of delivery."""
        now = time.monotonic()
        if not is_final and now - self._last_minute < MINUTE_SECONDS:
            return
        self._last_minute = now
        with contextlib.suppress(OSError):
            size = (self.folder / records.LOG_FILE).stat().st_size
            marks = (close_log if is_final else close_minute)(self._marks, size)
            if marks != self._marks:
                write_json(self.folder / records.LOG_MARKS_FILE, marks, is_durable=False)
                self._marks = marks

    def reason_to_stop(self) -> Stop | None:
        """Look whether somebody cancelled, nobody asks any more, or the machine goes down."""
        path = self.folder / records.CANCEL_FILE
        if path.exists():
            return stop_for_cancel(jobs.read_leniently(records.CancelRecord, path))
        if self._signal:
            return stop_for_signal(self._signal)
        # Only changes of the lease count, on a clock that nobody sets.
        lease = self._read_lease()
        if lease != self._lease:
            self._lease, self._lease_seen = lease, boot_seconds()
        if boot_seconds() - self._lease_seen > self.spec.orphan_minutes * 60:
            return stop_for_orphan(self.spec.orphan_minutes)
        return None

    def processes(self) -> list[ProcessIdentity]:
        reap_children(except_pid=self.command.pid if self.command else None)
        roots = (own_identity(), self.command) if self.command else (own_identity(),)
        marks = JobMarks(job_folder=self.job, lock_path=jobs.lock_path(self.job), roots=roots)
        return find_job_processes(marks)

    def end_tree(self) -> int:
        """End every process of the job but this one, however long the kernel takes.

        Returns:
            how many were found living at first.
        """
        num_found = len(self.processes())
        grace = self.spec.grace_seconds
        while living := terminate_tree(self.processes, grace_seconds=grace):
            grace = 0.0
            pids = ", ".join(str(identity.pid) for identity in living)
            self.beat(f"ending: {len(living)} process(es) survive KILL, stuck in the kernel: {pids}")
        return num_found

    def _read_lease(self) -> int:
        try:
            return jobs.lease_path(self.job).stat().st_mtime_ns
        except OSError:
            return 0


def main(arguments: list[str]) -> int:
    """Run the attempt whose folder is the only argument."""
    os.umask(0o077)
    logging.basicConfig(
        stream=sys.stdout, level=logging.INFO, format="%(asctime)s %(levelname)s runner: %(message)s"
    )
    folder = Path(arguments[0])
    spec = read_json(JobSpec, folder / records.SPEC_FILE)
    if spec is None or (folder / records.STARTED_FILE).exists():
        logger.error("nothing to run: %s has no spec, or was started before", folder)
        return RequestRefused.exit_code
    attempt = Attempt(
        folder, spec, inherited_lock(folder.parent, os.environ.get(LOCK_DESCRIPTOR_VARIABLE, ""))
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, attempt.on_signal)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    adopt_orphans()
    attempt.record_start()
    try:
        record = run_attempt(attempt)
    except Exception as error:
        logger.exception("the runner failed")
        attempt.end_tree()
        record = failed_before_start(problem_of(error))
    attempt.mark_log(is_final=True)
    write_exit(folder, record)
    return 0


def inherited_lock(job: Path, number: str) -> int:
    """Check that the descriptor which the agent passed on is the job's lock.

    Raises:
        RequestRefused: it is not: somebody started the runner by hand.
    """
    with contextlib.suppress(OSError, ValueError):
        if os.path.samestat(os.fstat(int(number)), jobs.lock_path(job).stat()):
            return int(number)
    raise RequestRefused(f"the lock of {job} was not passed on. Runners are started by the agent alone.")


def run_attempt(attempt: Attempt) -> ExitRecord:
    """Wait for a place, run the command to its end, and say what that end means."""
    stop = take_place(attempt)
    if stop is not None:
        return failed_before_start(stop.error)
    began = time.monotonic()
    process = start_command(attempt)
    group = memory_group_of(process.pid)
    kills_before = count_memory_kills(group)
    # A command that is already dead has no identity left; its number must still be known.
    attempt.command = identity_of(process.pid) or ProcessIdentity(pid=process.pid, start_ticks=0)
    attempt.record_start()
    while process.poll() is None and stop is None:
        attempt.beat("")
        attempt.mark_log()
        current = memory_group_of(process.pid)
        if current is not None and current != group:
            group, kills_before = current, count_memory_kills(current)
        stop = attempt.reason_to_stop()
        reap_children(except_pid=process.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LOOK_SECONDS)
    if stop is not None:
        logger.info("the command is ended reason=%s", stop.error)
        attempt.beat("ending")
    num_left = attempt.end_tree()
    if stop is None and num_left:
        logger.warning("processes that the command left behind were ended processes=%d", num_left)
    return_code = process.wait()
    return exit_record(
        attempt.folder,
        return_code=return_code,
        stop=stop,
        memory_kills=count_memory_kills(group) - kills_before,
        seconds=time.monotonic() - began,
    )


def take_place(attempt: Attempt) -> Stop | None:
    """Wait until the job may run; give the reason if it has to stop before."""
    rule = attempt.spec.slots
    if rule is None:
        return attempt.reason_to_stop()
    root = RootLayout(attempt.job.parent.parent)
    with waiting_ticket(root.slots(rule.name), rule, attempt.spec.key) as ticket:
        while True:
            stop = attempt.reason_to_stop()
            if stop is not None:
                return stop
            descriptor, detail = ticket.try_take()
            if descriptor is not None:
                attempt.descriptors.append(descriptor)
                return None
            attempt.beat(detail)
            time.sleep(2 * LOOK_SECONDS)


def start_command(attempt: Attempt) -> subprocess.Popen[bytes]:
    """Start the job's command, without a shell.

    Raises:
        MissingSoftware: there is no such program, or it can't be executed.
        OSError: anything else that keeps it from starting, such as a full disk.
    """
    spec = attempt.spec
    argv = [sys.executable if spec.argv[0] == AGENT_PYTHON else spec.argv[0], *spec.argv[1:]]
    inherited = {name: value for name, value in os.environ.items() if name != LOCK_DESCRIPTOR_VARIABLE}
    environment = release_environment(inherited | dict(spec.environment)) | {
        GENERATION_FOLDER_VARIABLE: str(attempt.folder),
    }
    log_path = attempt.folder / records.LOG_FILE
    with log_path.open("ab") as log, tempfile.TemporaryFile(dir=attempt.folder) as text:
        text.write(spec.stdin.encode("utf-8", "surrogatepass"))
        # The file's own pointer is the command's: nothing may still be in the buffer.
        text.seek(0)
        try:
            return subprocess.Popen(
                argv,
                stdin=text,
                stdout=log,
                stderr=log,
                cwd=attempt.folder,
                env=environment,
                pass_fds=attempt.descriptors,
            )
        except OSError as error:
            # The folder it shall run in is named as well where that is what can't be entered.
            if error.errno not in _NO_PROGRAM or error.filename == str(attempt.folder):
                raise
            raise MissingSoftware(
                f"{argv[0]!r} can't be started on the host: {error.strerror}. "
                "Install it, or name another program."
            ) from error


def problem_of(error: Exception) -> PipelineError:
    """Class what went wrong in the runner itself."""
    if isinstance(error, PipelineError):
        return error
    if isinstance(error, OSError) and is_disk_error(error):
        return disk_problem(error)
    return UnexpectedFailure(f"{type(error).__name__}: {error}.")


def reap_children(*, except_pid: int | None) -> None:
    """Collect dead children that this process adopted; the command's own end is left to be read."""
    while True:
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if found is None or found.si_pid == except_pid:
            return
        os.waitpid(found.si_pid, os.WNOHANG)


def write_exit(folder: Path, record: ExitRecord, *, sleep: Callable[[float], None] = time.sleep) -> None:
    """Write the exit record, trying until the disk takes it: without it the job counts as lost."""
    while True:
        try:
            write_json(folder / records.EXIT_FILE, record)
        except OSError as error:
            with contextlib.suppress(OSError):
                logger.error("the exit record can't be written yet: %s", error)
            sleep(EXIT_RETRY_SECONDS)
        else:
            return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
