"""Child processes that end when the demo ends, whatever ends it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1
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
