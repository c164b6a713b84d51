"""Child processes that end when the demo ends, whatever ends it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1
_LOOK_SECONDS = 0.2
_LIBC = ctypes.CDLL(None, use_errno=True)


def _die_with_parent() -> None:
    # Without this, a demo killed with -9 leaves a scheduler and an SSH server behind.
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def start(
    argv: Sequence[str], *, log: Path, environment: Mapping[str, str], cwd: Path
) -> subprocess.Popen[bytes]:
    """Start a child in a session of its own, its output appended to ``log``."""
    with log.open("ab") as output:
        return subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd=cwd,
            env=dict(environment), start_new_session=True, preexec_fn=_die_with_parent,  # noqa: PLW1509 - one prctl, no locks
        )  # fmt: skip


def check(child: subprocess.Popen[bytes], *, name: str, log: Path) -> None:
    """Notice a child that has ended by itself.

    Raises:
        RuntimeError: names it, with the last lines of its log.
    """
    if child.poll() is not None:
        raise RuntimeError(f"{name} ended with code {child.returncode}. {log}:\n{log_tail(log)}")


def follow_log(child: subprocess.Popen[bytes], log: Path, check: Callable[[], None]) -> Iterator[str]:
    """Give the lines of a child's log as they come, until it has ended; ``check`` is called meanwhile."""
    rest = ""
    with log.open(errors="replace") as output:
        while True:
            # Asked before the rest is read: what it wrote last must not be missed.
            has_ended = child.poll() is not None
            *lines, rest = (rest + output.read()).split("\n")
            yield from lines
            if has_ended:
                yield from [rest] if rest else []
                return
            check()
            time.sleep(_LOOK_SECONDS)


def log_tail(log: Path, lines: int = 15) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def stop(children: Sequence[subprocess.Popen[bytes]], *, grace_seconds: float = 10.0) -> None:
    """TERM to each child's session, then KILL to what is left of it."""
    for child in children:
        _signal_session(child.pid, signal.SIGTERM)
    deadline = time.monotonic() + grace_seconds
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(max(0.1, deadline - time.monotonic()))
    kill(children)


def kill(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """KILL each child's session at once."""
    for child in children:
        _signal_session(child.pid, signal.SIGKILL)
        child.wait()


def _signal_session(session: int, number: signal.Signals) -> None:
    # Airflow's services put workers into process groups of their own, in the same session.
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError, IndexError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                os.kill(int(entry.name), number)
