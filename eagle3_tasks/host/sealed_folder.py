"""Folders that appear whole: built beside their name, renamed into place, sealed by ``complete.json``.

A folder without a seal, or with a file of another size than the seal says, does not
count as finished. Nothing in it is ever changed afterwards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import shutil
from collections.abc import Generator
from pathlib import Path

from eagle3_tasks.contracts.errors import DamagedData, RequestRefused
from eagle3_tasks.host.files import (
    PRIVATE_FILE,
    PRIVATE_FOLDER,
    file_lock,
    make_private_folder,
    read_json,
    sync_folder,
    temporary_sibling,
    write_json,
)

logger = logging.getLogger(__name__)

SEAL_FILE = "complete.json"
SEAL_VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seal:
    """``complete.json``: what the finished folder holds; ``files`` gives each file's bytes."""

    version: int = SEAL_VERSION
    digest: str
    files: dict[str, int]


def is_sealed(folder: Path) -> bool:
    """Say whether ``folder`` is finished: a seal, and every file of the size that it names."""
    try:
        seal = read_json(Seal, folder / SEAL_FILE)
    except RequestRefused:
        return False
    return seal is not None and not _damage(folder, seal)


def check_sealed(folder: Path) -> None:
    """Refuse a folder that is not finished.

    Raises:
        DamagedData: no seal, or a file that is missing or of another size.
    """
    seal = read_json(Seal, folder / SEAL_FILE)
    if seal is None:
        raise DamagedData(
            f"{folder} is not finished: {SEAL_FILE} is missing. Run the stage that makes it again."
        )
    damage = _damage(folder, seal)
    if damage:
        raise DamagedData(f"{folder}: {damage} Run the stage that makes it again.")


@contextlib.contextmanager
def building(folder: Path) -> Generator[Path | None]:
    """Give an empty temporary folder that becomes ``folder`` when the block ends well.

    One builder at a time: another one waits, and then finds the work done. What a killed
    builder left under a temporary name is removed by the next one.

    Yields:
        the temporary folder, or None when ``folder`` is finished already.
    """
    make_private_folder(folder.parent)
    with file_lock(folder.with_name(f".{folder.name}.lock")):
        for leftover in folder.parent.glob(f".{folder.name}.*.tmp"):
            logger.info("leftover of a killed attempt removed folder=%s", leftover)
            shutil.rmtree(leftover)
        if is_sealed(folder):
            yield None
            return
        temporary = temporary_sibling(folder)
        temporary.mkdir(mode=PRIVATE_FOLDER)
        try:
            yield temporary
            _seal(temporary, digest=folder.name)
            if folder.exists():
                logger.warning("unfinished or damaged folder replaced folder=%s", folder)
                shutil.rmtree(folder)
            temporary.rename(folder)
            sync_folder(folder.parent)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def _seal(folder: Path, *, digest: str) -> None:
    # Data first, seal last: a power cut may leave files without a seal, never the reverse.
    sizes: dict[str, int] = {}
    for path in sorted(folder.iterdir()):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fchmod(descriptor, PRIVATE_FILE)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        sizes[path.name] = path.stat().st_size
    write_json(folder / SEAL_FILE, Seal(digest=digest, files=sizes))


def _damage(folder: Path, seal: Seal) -> str:
    for name, num_bytes in seal.files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing."
        size = path.stat().st_size
        if size != num_bytes:
            return f"{name} has {size} bytes, {num_bytes} were written."
    return ""
