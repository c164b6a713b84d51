"""The target's weight files: whether they are whole, and the name of each one's content."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import safetensors

from eagle3_tasks.contracts.digests import digest_of
from eagle3_tasks.contracts.errors import InvalidInput, RequestRefused
from eagle3_tasks.host.files import read_json, write_json
from eagle3_tasks.storage.disk_guard import disk_errors
from eagle3_tasks.storage.shard_lock import writer_lock

logger = logging.getLogger(__name__)

_READERS = 4
_BLOCK_BYTES = 1 << 22
_LOG_SECONDS = 10.0
_NAMED = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileState:
    """What the file system says of a file: while all of it stays, so does the content.

    ``changed_ns`` is the inode's: a copy that brings an old time of modification along changes it.
    """

    num_bytes: int
    modified_ns: int
    changed_ns: int
    inode: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class KnownDigest:
    """One file of the cache. ``name`` is for people; the path is only in the file's own name."""

    name: str
    state: FileState
    sha256: str


def weight_files(folder: Path) -> list[Path]:
    """List the weights in the order of their names."""
    return sorted(folder.glob("*.safetensors"))


def check_whole(paths: Sequence[Path]) -> None:
    """Refuse files whose headers can't be read or don't fit their sizes: an interrupted copy.

    Raises:
        InvalidInput: the message names the files.
    """
    faults: list[str] = []
    for path in paths:
        try:
            with safetensors.safe_open(path, framework="numpy"):
                pass
        except (safetensors.SafetensorError, OSError) as error:
            size = path.stat().st_size if path.exists() else 0
            faults.append(f"{path.name} ({size} bytes: {error})")
    if faults:
        more = f" and {len(faults) - _NAMED} more" if len(faults) > _NAMED else ""
        raise InvalidInput(
            f"{paths[0].parent}: {len(faults)} of {len(paths)} weight files are cut short or damaged: "
            f"{', '.join(faults[:_NAMED])}{more}. Copy them again from the model's source."
        )


def content_digests(paths: Sequence[Path], cache: Path) -> list[str]:
    """Give the SHA-256 of each file's whole content, read once for each state of the file.

    Whoever asks while another process reads waits for its result.

    Args:
        paths: the files.
        cache: a folder for what is known, made if it is missing.

    Raises:
        InvalidInput: a file can't be read, or changes meanwhile.
        DiskProblem: the cache can't be written.
    """
    known = {path: _known_digest(path, cache) for path in paths}
    if None in known.values():
        with writer_lock(cache / ".lock"):
            unknown = [path for path in paths if known[path] is None]
            known |= {path: _known_digest(path, cache) for path in unknown}
            known |= _read_all([path for path in unknown if known[path] is None], cache)
    return [str(known[path]) for path in paths]


def _known_digest(path: Path, cache: Path) -> str | None:
    try:
        known = read_json(KnownDigest, _cache_path(path, cache))
    except RequestRefused as error:
        logger.warning("known digest ignored: %s", error)
        return None
    return known.sha256 if known is not None and known.state == _state_of(path) else None


def _read_all(paths: Sequence[Path], cache: Path) -> dict[Path, str]:
    reading = _Reading(sum(_state_of(path).num_bytes for path in paths))
    if paths:
        logger.info(
            "reading all weights to name their content files=%d bytes=%d: once, until the files change; "
            "takes minutes where they are hundreds of GB",
            len(paths), reading.total,
        )  # fmt: skip

    def read(path: Path) -> tuple[Path, str]:
        return path, _read_digest(path, cache, reading)

    with concurrent.futures.ThreadPoolExecutor(_READERS) as pool:
        try:
            return dict(pool.map(read, paths))
        except BaseException:
            reading.is_stopped = True
            raise


class _Reading:
    """Counts the bytes that all readers have read, and logs about every ten seconds."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.is_stopped = False
        self._done = 0
        self._began = self._logged = time.monotonic()
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self._done += num_bytes
            now = time.monotonic()
            if now - self._logged < _LOG_SECONDS:
                return
            self._logged = now
            rate = self._done / (now - self._began)
            logger.info(
                "reading all weights bytes=%d/%d bytes_per_second=%.0f eta_seconds=%.0f",
                self._done, self.total, rate, (self.total - self._done) / rate,
            )  # fmt: skip


def _read_digest(path: Path, cache: Path, reading: _Reading) -> str:
    hasher = hashlib.sha256()
    try:
        with path.open("rb", buffering=0) as file:
            before = _state_of(path)
            while not reading.is_stopped and (block := file.read(_BLOCK_BYTES)):
                hasher.update(block)
                reading.add(len(block))
    except OSError as error:
        raise InvalidInput(f"{path} can't be read ({error}). Copy it again from its source.") from error
    if _state_of(path) != before or reading.is_stopped:
        raise InvalidInput(f"{path} was changed while it was read. Wait until it is copied whole.")
    known = KnownDigest(name=path.name, state=before, sha256=hasher.hexdigest())
    with disk_errors(cache):
        write_json(_cache_path(path, cache), known)
    return known.sha256


def _state_of(path: Path) -> FileState:
    try:
        status = path.stat()
    except OSError as error:
        raise InvalidInput(f"{path} can't be looked at ({error}). Copy it again from its source.") from error
    return FileState(
        num_bytes=status.st_size,
        modified_ns=status.st_mtime_ns,
        changed_ns=status.st_ctime_ns,
        inode=status.st_ino,
    )


def _cache_path(path: Path, cache: Path) -> Path:
    # No absolute path lies under ROOT: its digest is enough to find the file by.
    return cache / f"{digest_of(str(path))}.json"
