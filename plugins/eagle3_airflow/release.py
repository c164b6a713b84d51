"""The code that goes to the GPU host: the installed ``eagle3_tasks``, named by its content."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import eagle3_tasks
from eagle3_tasks.contracts.digests import files_digest, release_files


@dataclasses.dataclass(frozen=True, kw_only=True)
class Release:
    """The files of ``eagle3_tasks`` as ``(relative path, content)``, and their digest."""

    files: tuple[tuple[str, bytes], ...]
    digest: str


@functools.cache
def current_release() -> Release:
    """Read the installed code, once a process.

    It is kept in memory (half a MB): an upgrade on disk under a running worker must not
    ship files that are not those of the digest.
    """
    if eagle3_tasks.__file__ is None:
        raise RuntimeError("the package eagle3_tasks has no __init__.py. Install it again.")
    return read_release(Path(eagle3_tasks.__file__).parent)


def read_release(package: Path) -> Release:
    """Read the folder ``package``."""
    files = tuple((path.as_posix(), (package / path).read_bytes()) for path in release_files(package))
    return Release(files=files, digest=files_digest(files))
