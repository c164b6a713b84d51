"""What a new writer does before its first byte: fence off the past, then clear its litter."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from eagle3_tasks.contracts.receipts import Fence
from eagle3_tasks.host.files import TEMPORARY_SUFFIX, sync_folder, write_json
from eagle3_tasks.storage import names
from eagle3_tasks.storage.fault_points import fault_point
from eagle3_tasks.storage.receipts import counted_bytes, read_shard, whole_bytes

logger = logging.getLogger(__name__)


def begin_generation(folder: Path) -> int:
    """Open a shard's folder for a new writer; the caller holds its lock.

    Torn last lines are cut off, the fence is written, and files that no receipt names
    are removed. Each step may be repeated after a crash.

    Returns:
        the new writer's generation.
    """
    older = read_shard(folder)
    generation = older.newest_generation + 1
    cut_torn_line(folder / names.receipts_name(older.newest_generation))
    cut_torn_line(folder / names.quarantine_name(older.newest_generation))
    fence = Fence(generation=generation, counted_bytes=counted_bytes(folder))
    write_json(folder / names.fence_name(generation), fence)
    fault_point("fence_written", folder.name)
    _remove_litter(folder, generation)
    return generation


def cut_torn_line(path: Path) -> None:
    """Cut off a last line that a crash left without its end."""
    if not path.exists():
        return
    whole, size = whole_bytes(path), path.stat().st_size
    if whole == size:
        return
    logger.warning("torn line cut off file=%s bytes=%d", path, size - whole)
    with path.open("r+b") as file:
        file.truncate(whole)
        os.fsync(file.fileno())


def _remove_litter(folder: Path, generation: int) -> None:
    """Remove temporary files, older fences, and segments that no counted receipt names.

    Where a receipt's line is damaged nothing is judged litter but temporary files: the
    line may have named any segment.
    """
    records = read_shard(folder)
    receipted = {str(receipt["segment"]) for receipt in records.receipts}
    for path in sorted(folder.iterdir()):
        if path.name.startswith("fence-") and path.name != names.fence_name(generation):
            path.unlink()
            continue
        is_orphan = names.is_segment(path.name) and path.name not in receipted
        if path.name.endswith(TEMPORARY_SUFFIX) or (is_orphan and not records.num_damaged_lines):
            logger.info("uncommitted file removed file=%s bytes=%d", path, path.stat().st_size)
            path.unlink()
    sync_folder(folder)
