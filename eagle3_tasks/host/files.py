"""Files that are whole or absent, private to the user, and still there after a power cut."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, TypeVar

from eagle3_tasks.contracts import codec
from eagle3_tasks.contracts.errors import DamagedData

T = TypeVar("T")

PRIVATE_FOLDER = 0o700
PRIVATE_FILE = 0o600
TEMPORARY_SUFFIX = ".tmp"


def make_private_folder(path: Path) -> Path:
    """Make ``path`` and its missing parents, readable by the user alone."""
    for folder in (*reversed(path.parents), path):
        if not folder.is_dir():
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=PRIVATE_FOLDER)
    return path


def sync_folder(path: Path) -> None:
    """Make renames inside ``path`` survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def temporary_sibling(path: Path) -> Path:
    """Name a temporary neighbour of ``path`` on the same file system."""
    return path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")


def write_atomically(path: Path, content: bytes, *, is_durable: bool = True) -> None:
    """Write ``content`` so that readers see the old file or the whole new one, never a part.

    The folder is synced too: without that, a power cut can undo the rename after success
    has been reported. What is not ``is_durable`` is not synced: heartbeats, which say
    nothing after a power cut.
    """
    temporary = temporary_sibling(path)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE_FILE)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            if is_durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if is_durable:
        sync_folder(path.parent)


def write_json(path: Path, value: object, *, is_durable: bool = True) -> None:
    """Write a dataclass or plain value as JSON, atomically."""
    content = (codec.dumps(value, indent=1) + "\n").encode("utf-8", "surrogatepass")
    write_atomically(path, content, is_durable=is_durable)


def read_json(kind: type[T], path: Path) -> T | None:
    """Read a dataclass back; None if the file does not exist.

    Raises:
        RequestRefused: the file is not of the declared form; the message names it.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    return codec.loads(kind, content, where=str(path))


def append_line(path: Path, value: object) -> None:
    """Append one JSON line durably. A torn last line is the reader's to cut off."""
    line = (codec.dumps(value) + "\n").encode("utf-8", "surrogatepass")
    is_new = not path.exists()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, PRIVATE_FILE)
    try:
        written = os.write(descriptor, line)
        if written != len(line):
            raise DamagedData(f"{path}: only {written} of {len(line)} bytes could be appended.")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if is_new:
        sync_folder(path.parent)


def read_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield ``(byte offset after the line, value)`` of each whole JSON line.

    A last line without its newline was torn by a crash and is left out.

    Raises:
        DamagedData: a whole line is not JSON; the message names file and line.
    """
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            try:
                yield offset, json.loads(line)
            except ValueError as error:
                raise DamagedData(f"{path} line {number}: not JSON ({error}).") from error


@contextlib.contextmanager
def file_lock(path: Path, *, is_blocking: bool = True) -> Generator[int | None]:
    """Hold an exclusive lock on ``path`` while the block runs; the kernel frees it on death.

    Yields:
        the lock's descriptor, or None when somebody else holds it and ``is_blocking`` is false.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if is_blocking else fcntl.LOCK_NB))
        except BlockingIOError:
            yield None
            return
        yield descriptor
    finally:
        os.close(descriptor)
