"""Processes by identity, never by name or bare number: finding a job's tree and ending it."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from eagle3_tasks.contracts.stages import GENERATION_FOLDER_VARIABLE

_PROC = Path("/proc")
_PR_SET_CHILD_SUBREAPER = 36
_LOOK_SECONDS = 0.05
KILL_SECONDS = 15.0
"""How long KILL may take to empty a tree. Longer means a process hangs inside the kernel."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessIdentity:
    """A process for all time: its number can come again, number and start time can't.

    ``start_ticks`` is field 22 of ``/proc/PID/stat``: clock ticks after boot.
    """

    pid: int
    start_ticks: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Process:
    identity: ProcessIdentity
    parent: int
    session: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobMarks:
    """How the processes of one job are known.

    ``job_folder`` is named by the environment of each of them, ``lock_path`` is held open
    by those that inherited it, ``roots`` (runner and command) are ancestors or leaders of
    the sessions of the rest.
    """

    job_folder: Path
    lock_path: Path
    roots: tuple[ProcessIdentity, ...]


def identity_of(pid: int) -> ProcessIdentity | None:
    """Identify the living process ``pid``; None when there is none or only a zombie."""
    process = _read_process(pid)
    return process.identity if process else None


def own_identity() -> ProcessIdentity:
    """Identify the calling process."""
    fields = _stat_fields(os.getpid())
    return ProcessIdentity(pid=os.getpid(), start_ticks=int(fields[19]) if fields else 0)


def is_alive(identity: ProcessIdentity) -> bool:
    """Tell whether that very process runs. A zombie doesn't; nor does a reused number."""
    return identity_of(identity.pid) == identity


def find_job_processes(marks: JobMarks) -> list[ProcessIdentity]:
    """List the living processes of a job, except the caller.

    Found are: descendants and session members of living roots, whoever holds the lock's
    file open, and whoever names the job's folder in its environment; so a grandchild with
    a session of its own is found even after its parents died. A process that belongs to
    another job is left alone with everything below it, although it may have been started
    from inside this one.
    """
    table = _read_table()
    job_folder = marks.job_folder.resolve()
    folders = {pid: _job_folder_of(pid) for pid in table}
    children: dict[int, list[int]] = {}
    for pid, process in table.items():
        children.setdefault(process.parent, []).append(pid)

    def is_foreign(pid: int) -> bool:
        return folders[pid] not in (None, job_folder)

    roots = [root for root in marks.roots if root.pid in table and table[root.pid].identity == root]
    # A session's number says something only while its leader is known to be the right one.
    sessions = {root.pid for root in roots}
    seeds = {root.pid for root in roots}
    for pid, process in table.items():
        if process.session in sessions or folders[pid] == job_folder:
            seeds.add(pid)
    seeds |= _holders(marks.lock_path, table)
    found: set[int] = set()
    waiting = [pid for pid in seeds if not is_foreign(pid)]
    while waiting:
        pid = waiting.pop()
        if pid in found:
            continue
        found.add(pid)
        waiting += [child for child in children.get(pid, ()) if not is_foreign(child)]
    found.discard(os.getpid())
    return [table[pid].identity for pid in sorted(found)]


def is_held_open(path: Path) -> bool:
    """Tell whether any living process has ``path`` open."""
    return bool(_holders(path, _read_table()))


def send(identity: ProcessIdentity, number: signal.Signals) -> None:
    """Signal that very process; nothing happens if it is gone or its number was reused."""
    with contextlib.suppress(ProcessLookupError):
        try:
            descriptor = os.pidfd_open(identity.pid)
        except OSError as error:
            if error.errno != errno.ENOSYS:
                raise
            # Kernels before 5.3: a number can't come again within this microsecond.
            if is_alive(identity):
                os.kill(identity.pid, number)
            return
        try:
            # The descriptor pins the process: what is checked now is what is signalled.
            if is_alive(identity):
                signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)


def terminate_tree(
    find: Callable[[], Iterable[ProcessIdentity]],
    *,
    grace_seconds: float,
    kill_seconds: float = KILL_SECONDS,
    sleep: Callable[[float], None] = time.sleep,
) -> list[ProcessIdentity]:
    """End all that ``find`` gives: TERM, ``grace_seconds``, KILL, until it gives nothing.

    ``find`` is asked again and again, so children born meanwhile are ended too.

    Returns:
        what lives on ``kill_seconds`` after KILL: processes stuck in the kernel, normally none.
    """
    termed: set[ProcessIdentity] = set()
    deadline = time.monotonic() + grace_seconds
    while living := list(find()):
        if time.monotonic() >= deadline:
            break
        for identity in living:
            if identity not in termed:
                send(identity, signal.SIGTERM)
                termed.add(identity)
        sleep(_LOOK_SECONDS)
    deadline = time.monotonic() + kill_seconds
    while living:
        for identity in living:
            send(identity, signal.SIGKILL)
        sleep(_LOOK_SECONDS)
        living = list(find())
        if time.monotonic() >= deadline:
            break
    return living


def adopt_orphans() -> None:
    """Become the parent of all descendants whose parents die, so that none is lost from sight."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _stat_fields(pid: int) -> list[str] | None:
    """Fields of ``/proc/PID/stat`` from the third on; the name before may hold anything."""
    try:
        return (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def _read_process(pid: int) -> _Process | None:
    fields = _stat_fields(pid)
    if not fields or fields[0] in "ZX":
        return None
    return _Process(
        identity=ProcessIdentity(pid=pid, start_ticks=int(fields[19])),
        parent=int(fields[1]),
        session=int(fields[3]),
    )


def _read_table() -> dict[int, _Process]:
    numbers = (int(folder.name) for folder in _PROC.iterdir() if folder.name.isdigit())
    processes = ((pid, _read_process(pid)) for pid in numbers)
    return {pid: process for pid, process in processes if process is not None}


def generation_folder_of(pid: int) -> Path | None:
    """Name the generation folder of the job that ``pid`` belongs to; None: to none, or hidden."""
    prefix = f"{GENERATION_FOLDER_VARIABLE}=".encode()
    try:
        content = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return None
    for entry in content.split(b"\0"):
        if entry.startswith(prefix):
            return Path(os.fsdecode(entry[len(prefix) :]))
    return None


def _job_folder_of(pid: int) -> Path | None:
    folder = generation_folder_of(pid)
    return folder.parent.resolve() if folder else None


def _holders(path: Path, table: Iterable[int]) -> set[int]:
    """Find who has ``path`` open, by device and inode: the root of the name may be another."""
    try:
        wanted = path.stat()
    except OSError:
        return set()
    ending = f"/{path.parent.name}/{path.name}"
    return {pid for pid in table if _has_open(pid, ending, wanted)}


def _has_open(pid: int, ending: str, wanted: os.stat_result) -> bool:
    try:
        descriptors = list((_PROC / str(pid) / "fd").iterdir())
    except OSError:
        return False
    for descriptor in descriptors:
        try:
            # Looking at the name first: a stat of some other file may hang on a dead network disk.
            if not str(descriptor.readlink()).endswith(ending):
                continue
            entry = descriptor.stat()
        except OSError:
            continue
        if (entry.st_dev, entry.st_ino) == (wanted.st_dev, wanted.st_ino):
            return True
    return False
