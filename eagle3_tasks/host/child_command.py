"""A look at the machine in a process of its own, because the look itself may hang for ever."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Sequence

from eagle3_tasks.host.launch import release_environment


@dataclasses.dataclass(frozen=True, kw_only=True)
class Look:
    """What a look gave: its exit code (None: it did not end in time) and what it printed.

    ``errors``, its standard error, is for messages alone: some hosts' loaders print a line of
    their own there for each process.
    """

    return_code: int | None
    output: bytes
    errors: bytes

    @property
    def said(self) -> str:
        """Everything it printed, for a message."""
        return b"\n".join(part for part in (self.output, self.errors) if part).decode(errors="replace")


def run_with_deadline(argv: Sequence[str], deadline_seconds: float) -> Look:
    """Run ``argv`` to its end or to the deadline.

    Late, it is killed but not waited for: a process that is stuck in the kernel doesn't
    die before the kernel lets go.

    Raises:
        FileNotFoundError: there is no such program.
    """
    process = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=release_environment(os.environ),
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=deadline_seconds)
    except subprocess.TimeoutExpired as error:
        process.kill()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        return Look(return_code=None, output=error.output or b"", errors=error.stderr or b"")
    return Look(return_code=process.returncode, output=output, errors=errors)


def run_module(module: str, *arguments: str, deadline_seconds: float) -> Look:
    """Run a module of this release under this interpreter, as :func:`run_with_deadline` does."""
    return run_with_deadline([sys.executable, "-P", "-m", module, *arguments], deadline_seconds)
