"""A look at the machine in a process of its own, because the look itself may hang for ever."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from eagle3_tasks.host.launch import release_environment


def run_with_deadline(argv: Sequence[str], deadline_seconds: float) -> tuple[int | None, bytes]:
    """Run ``argv`` and give its exit code and standard output.

    The exit code is None where it did not end in time. It is then killed but not waited
    for: a process that is stuck in the kernel doesn't die before the kernel lets go.

    Raises:
        FileNotFoundError: there is no such program.
    """
    process = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=release_environment(os.environ),
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=deadline_seconds)
    except subprocess.TimeoutExpired as error:
        process.kill()
        if process.stdout is not None:
            process.stdout.close()
        return None, error.output or b""
    return process.returncode, output


def run_module(module: str, *arguments: str, deadline_seconds: float) -> tuple[int | None, bytes]:
    """Run a module of this release under this interpreter, as :func:`run_with_deadline` does."""
    return run_with_deadline([sys.executable, "-P", "-m", module, *arguments], deadline_seconds)
