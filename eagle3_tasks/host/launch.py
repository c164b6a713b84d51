"""Starting a job's runner so that it outlives the agent, the connection and the login."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import eagle3_tasks
from eagle3_tasks.contracts.stages import GENERATION_FOLDER_VARIABLE
from eagle3_tasks.host import job_records as records
from eagle3_tasks.host.files import PRIVATE_FILE

LOCK_DESCRIPTOR_VARIABLE = "EAGLE3_LOCK_DESCRIPTOR"
AGENT_HELLO_VARIABLE = "EAGLE3_AGENT_HELLO"


def package_folder() -> Path:
    """Give the folder of the ``eagle3_tasks`` that runs."""
    return Path(eagle3_tasks.__file__).resolve().parent


def release_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Copy ``environment`` so that a Python started with it imports this release first."""
    release = str(package_folder().parent)
    folders = [folder for folder in environment.get("PYTHONPATH", "").split(os.pathsep) if folder]
    python_path = os.pathsep.join([release, *(folder for folder in folders if folder != release)])
    wanted = {name: value for name, value in environment.items() if name != AGENT_HELLO_VARIABLE}
    return wanted | {"PYTHONPATH": python_path, "PYTHONUNBUFFERED": "1"}


def launch_detached(
    folder: Path, lock_descriptor: int, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start the runner of the generation ``folder`` in a session of its own.

    It inherits the job's lock, and writes what it has to say into the job's log. The
    caller polls what is returned now and then, or keeps a zombie.
    """
    log = os.open(folder / records.LOG_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, PRIVATE_FILE)
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "eagle3_tasks.host.runner", str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=folder,
            env=release_environment(environment)
            | {GENERATION_FOLDER_VARIABLE: str(folder), LOCK_DESCRIPTOR_VARIABLE: str(lock_descriptor)},
            pass_fds=(lock_descriptor,),
            start_new_session=True,
        )
    finally:
        os.close(log)
