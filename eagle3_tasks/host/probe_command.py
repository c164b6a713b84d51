"""Running ``eagle3 probe`` for the agent: a process with a deadline, because drivers and disks hang."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle3_tasks.contracts import codec
from eagle3_tasks.contracts.errors import (
    ErrorRecord,
    UnexpectedFailure,
    error_from_exit_code,
    error_from_record,
)
from eagle3_tasks.contracts.jobs import ProbeBody
from eagle3_tasks.contracts.stages import ERROR_FILE, GENERATION_FOLDER_VARIABLE, REPORT_FILE
from eagle3_tasks.host.files import read_json
from eagle3_tasks.host.job_folder import read_report
from eagle3_tasks.host.launch import release_environment
from eagle3_tasks.host.log_delivery import last_lines
from eagle3_tasks.host.machine import host_name

_OUTPUT_FILE = "output.log"


def run_probe_command(body: ProbeBody, environment: Mapping[str, str]) -> Mapping[str, Any]:
    """Give the report of ``eagle3 probe``.

    Its files lie in a temporary folder outside ROOT: the disk it asks about may be the
    one that hangs.

    Raises:
        PipelineError: the probe's own error, or that it did not end within the deadline.
    """
    with tempfile.TemporaryDirectory(prefix="eagle3-probe-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        return_code = _run(
            folder, body, release_environment(environment) | {GENERATION_FOLDER_VARIABLE: name}
        )
        if return_code is None:
            raise UnexpectedFailure(
                f"{host_name()}: the probe did not end within {body.deadline_seconds:g} s. A disk or the GPU "
                f"driver may hang. {last_lines(folder / _OUTPUT_FILE)}".rstrip()
            )
        if return_code != 0:
            record = read_json(ErrorRecord, folder / ERROR_FILE)
            if record is not None:
                raise error_from_record(record)
            raise error_from_exit_code(
                return_code,
                f"the probe ended with exit code {return_code}: {last_lines(folder / _OUTPUT_FILE)}",
            )
        if not (folder / REPORT_FILE).exists():
            raise UnexpectedFailure("the probe ended without a report.")
        return read_report(folder)


def _run(folder: Path, body: ProbeBody, environment: Mapping[str, str]) -> int | None:
    spec = codec.canonical(body.spec)
    with (folder / _OUTPUT_FILE).open("wb") as log, tempfile.TemporaryFile(dir=folder) as text:
        text.write(spec)
        text.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "eagle3_tasks.commands.main", "probe", "--spec", "-"],
            stdin=text,
            stdout=log,
            stderr=log,
            cwd=folder,
            env=dict(environment),
            start_new_session=True,
        )
    try:
        return process.wait(body.deadline_seconds)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            # Not collected yet, so the number is still its own.
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(2.0)
        return None
