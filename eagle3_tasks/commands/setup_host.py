"""``eagle3 setup-host``: ROOT's own Python environment, from the lock file that ships with the release.

Runs under any Python 3.11 or later with its standard library alone. The environment is
built as ``ROOT/env-DIGEST`` and ``ROOT/env`` is a link to it that is switched at the end:
running jobs keep theirs, and an environment that is half built is never used.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle3_tasks.contracts.digests import DIGEST_DIGITS
from eagle3_tasks.contracts.errors import DiskProblem, InvalidSettings, MissingSoftware
from eagle3_tasks.contracts.jobs import Progress
from eagle3_tasks.host.files import file_lock, sync_folder, write_json
from eagle3_tasks.host.launch import package_folder
from eagle3_tasks.host.machine import host_name
from eagle3_tasks.host.root_folder import prepare_root
from eagle3_tasks.host.stage_context import StageContext

logger = logging.getLogger(__name__)

LOCK_FILE = "host_requirements.lock"
COMPLETE_FILE = "complete.json"
_LAST_LINES = 8


def run_setup_host(context: StageContext) -> dict[str, Any]:
    """Make sure that ROOT/env is the environment of this release's lock file.

    Raises:
        InvalidSettings: ROOT can't be used, or ROOT/env is somebody's folder.
        MissingSoftware: no venv, or a package that pip can't have.
        DiskProblem: no space is left, or ROOT's disk is broken.
    """
    root = prepare_root(Path(context.settings.host.root), make_root=True)
    requirements = package_folder() / LOCK_FILE
    began = time.monotonic()
    with file_lock(root / "env.lock"):
        folder = root / f"env-{environment_digest(requirements.read_bytes())}"
        is_built = (folder / COMPLETE_FILE).exists() and _runs(folder)
        if not is_built:
            _build(folder, requirements, root / "wheels", context)
        _link(context.layout.environment, folder)
    logger.info("environment ready folder=%s built=%s", folder, not is_built)
    return {
        "host": host_name(),
        "environment": str(folder),
        "was_built": not is_built,
        "seconds": round(time.monotonic() - began, 1),
    }


def environment_digest(requirements: bytes) -> str:
    """Name an environment by its lock file and the interpreter it is made with."""
    made_with = f"\0{platform.python_version()}\0{platform.machine()}".encode()
    return hashlib.sha256(requirements + made_with).hexdigest()[:DIGEST_DIGITS]


def pip_arguments(requirements: Path, wheels: Path) -> list[str]:
    """Give pip's arguments: from ``wheels`` alone where that folder exists, else from the index."""
    offline = ["--no-index", "--find-links", str(wheels)] if wheels.is_dir() else []
    quiet = ["--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
    return ["install", *quiet, *offline, "-r", str(requirements)]


def _build(folder: Path, requirements: Path, wheels: Path, context: StageContext) -> None:
    names = [line for line in requirements.read_text().splitlines() if "==" in line]
    logger.info("environment is built folder=%s packages=%d offline=%s", folder, len(names), wheels.is_dir())
    if not _runs(folder):
        # Begun and not finished, or its interpreter was upgraded away: what pip has cached stays.
        shutil.rmtree(folder, ignore_errors=True)
        if _run_logged([sys.executable, "-m", "venv", str(folder)], context, total=0)[0]:
            raise MissingSoftware(
                f"{host_name()}: {sys.executable} can't make a virtual environment. Install its venv module, "
                f"on Debian and Ubuntu `apt install python3.{sys.version_info.minor}-venv`."
            )
    code, lines = _run_logged(
        [str(folder / "bin" / "python"), "-m", "pip", *pip_arguments(requirements, wheels)],
        context,
        total=len(names),
    )
    if code:
        said = "\n".join(lines[-_LAST_LINES:])
        if any("No space left on device" in line for line in lines):
            raise DiskProblem(f"{host_name()}: no space is left for {folder}. Free some, then retry.\n{said}")
        source = f"the wheels in {wheels}" if wheels.is_dir() else "the package index"
        raise MissingSoftware(
            f"{host_name()}: pip could not install {requirements.name} from {source} (exit code {code}). "
            f"On a host without internet, put the wheels of that file into {wheels}; set-up goes on where it "
            f"stopped.\n{said}"
        )
    write_json(folder / COMPLETE_FILE, {"python": platform.python_version(), "packages": names})


def _run_logged(argv: Sequence[str], context: StageContext, *, total: int) -> tuple[int, list[str]]:
    """Run a program, put its lines into the log as they come, and count packages as progress."""
    lines: list[str] = []
    began = time.monotonic()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
    ) as process:
        for line in process.stdout or ():
            text = line.decode(errors="replace").rstrip()
            logger.info("%s", text)
            lines.append(text)
            if total:
                done = sum(
                    line.startswith(("Collecting", "Requirement already", "Processing")) for line in lines
                )
                context.report_progress(
                    Progress(
                        stage="setup-host",
                        done=min(done, total),
                        total=total,
                        unit="packages",
                        seconds=time.monotonic() - began,
                    )
                )
    return process.returncode, lines


def _runs(folder: Path) -> bool:
    python = folder / "bin" / "python"
    if not python.exists():
        return False
    return subprocess.run([python, "-c", "import pip"], capture_output=True, check=False).returncode == 0


def _link(link: Path, folder: Path) -> None:
    """Point ``link`` at its neighbour ``folder``, from one moment to the next."""
    if link.exists() and not link.is_symlink():
        raise InvalidSettings(
            f"{link} is a folder that set-up did not make. Move it away, then run set-up again."
        )
    if link.is_symlink() and link.readlink() == Path(folder.name):
        return
    temporary = link.with_name(f".env.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    # Relative, so that ROOT may be mounted elsewhere.
    temporary.symlink_to(folder.name)
    temporary.replace(link)
    sync_folder(link.parent)
