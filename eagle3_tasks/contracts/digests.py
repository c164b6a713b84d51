"""Names made from content: equal inputs give equal names, on both machines."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from eagle3_tasks.contracts import codec

DIGEST_DIGITS = 24


def digest_of(value: object) -> str:
    """Name a JSON-able value: 24 hexadecimal digits of the SHA-256 of its canonical form."""
    return hashlib.sha256(codec.canonical(value)).hexdigest()[:DIGEST_DIGITS]


def release_files(package: Path) -> list[Path]:
    """List the files of ``eagle3_tasks`` that make a release, relative to ``package``, sorted."""
    files = (path.relative_to(package) for path in package.rglob("*") if path.is_file())
    return sorted(path for path in files if "__pycache__" not in path.parts and path.suffix != ".pyc")


def release_digest(package: Path) -> str:
    """Name the code in the folder ``package`` by its relative paths and bytes."""
    return files_digest((path.as_posix(), (package / path).read_bytes()) for path in release_files(package))


def files_digest(files: Iterable[tuple[str, bytes]]) -> str:
    """Name files, given as relative path and content, sorted by path."""
    hasher = hashlib.sha256()
    for path, content in files:
        hasher.update(f"{path}\0{len(content)}\0".encode())
        hasher.update(content)
    return hasher.hexdigest()[:DIGEST_DIGITS]
