"""Locks of folders that several runs may write: one writer at a time, of whatever run."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from eagle3_tasks.host.files import file_lock, make_private_folder, sync_folder
from eagle3_tasks.storage import names

logger = logging.getLogger(__name__)

_ASK_SECONDS = 0.25
_LOG_SECONDS = 30.0


@contextlib.contextmanager
def shard_lock(folder: Path, *, report_waiting: Callable[[float], None] | None = None) -> Iterator[None]:
    """Hold the lock of a shard's folder. See :func:`writer_lock`."""
    with writer_lock(folder / names.LOCK, report_waiting=report_waiting):
        yield


@contextlib.contextmanager
def writer_lock(path: Path, *, report_waiting: Callable[[float], None] | None = None) -> Iterator[None]:
    """Hold a lock; wait while another process, of this run or another, holds it.

    The kernel frees the lock when its holder dies, so waiting always ends. The lock's folder
    is made if it is missing.

    Args:
        path: the file that is locked.
        report_waiting: called about four times a second with the seconds waited.
    """
    folder = path.parent
    if not folder.is_dir():
        make_private_folder(folder)
        for parent in list(folder.parents)[:3]:
            # ROOT/captures/DIGEST: without this, a power cut can undo the folder and all receipts in it.
            sync_folder(parent)
    began = time.monotonic()
    logged = -_LOG_SECONDS
    while True:
        with file_lock(path, is_blocking=False) as held:
            if held is not None:
                yield
                return
        waited = time.monotonic() - began
        if waited - logged >= _LOG_SECONDS:
            logger.info("waiting for another writer lock=%s waited_seconds=%.0f", path, waited)
            logged = waited
        if report_waiting is not None:
            report_waiting(waited)
        time.sleep(_ASK_SECONDS)
