"""The jobs that the demo leaves on its GPU host, stopped by the host's own agent."""

from __future__ import annotations

import os
import secrets
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import eagle3_tasks
from eagle3_tasks.contracts import codec
from eagle3_tasks.contracts.digests import release_digest
from eagle3_tasks.contracts.jobs import CancelBody, Hello, JobStatus, Request, find_frames

REASON = "the demo was ended"
STOP_SECONDS = 60.0
"""A job has 20 s between TERM and KILL."""
_LOOK_SECONDS = 0.5


def stop_jobs(root: Path, *, python: Path, seconds: float = STOP_SECONDS) -> list[str]:
    """Cancel every job under ``root`` that has not ended, and wait for its end.

    Airflow has to be stopped before, or it would submit further ones.

    Returns:
        the keys of the jobs that had not ended after ``seconds``.

    Raises:
        RuntimeError: the agent did not answer.
    """
    folder = root / "jobs"
    keys = sorted(entry.name for entry in folder.iterdir() if entry.is_dir()) if folder.is_dir() else []
    deadline = time.monotonic() + seconds
    while keys:
        keys = [status.key for status in _cancel(root, keys, python) if not status.state.is_final]
        if keys and time.monotonic() > deadline:
            return keys
        if keys:
            time.sleep(_LOOK_SECONDS)
    return []


def _cancel(root: Path, keys: Sequence[str], python: Path) -> list[JobStatus]:
    """Ask an agent on this machine to cancel each job; one that has ended, or is ending, stays as it is."""
    package = Path(eagle3_tasks.__path__[0])
    hello = Hello(nonce=secrets.token_hex(8), root=str(root), release=release_digest(package))
    requests = [
        Request(id=number, verb="cancel", body=codec.to_plain(CancelBody(key=key, reason=REASON)))
        for number, key in enumerate(keys, start=1)
    ]
    done = subprocess.run(
        [python, "-P", "-m", "eagle3_tasks.host.agent"],
        input="".join(f"{codec.dumps(request)}\n" for request in requests),
        capture_output=True, text=True, timeout=STOP_SECONDS, check=False,
        env={**os.environ, "PYTHONPATH": str(package.parent), "EAGLE3_AGENT_HELLO": codec.dumps(hello)},
    )  # fmt: skip
    answers, _ = find_frames(hello.nonce, done.stdout)
    statuses = [codec.from_plain(JobStatus, one.body, where="cancel") for one in answers if one.body]
    if len(statuses) < len(keys):
        problem = next((one.error.message for one in answers if one.error), done.stderr.strip())
        raise RuntimeError(f"the agent answers for {len(statuses)} of {len(keys)} jobs: {problem}")
    return statuses
