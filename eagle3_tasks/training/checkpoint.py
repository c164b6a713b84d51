"""Checkpoints: one safetensors file a rank, made valid by a manifest that is written last.

``checkpoints/step_00001200/`` holds ``rank-0.safetensors``, ... and ``manifest.json``.
Nothing is pickled, so reading a checkpoint can't run code. Every rank holds all of the
training's state; each writes its share of the tensors, and every rank reads all shares.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from eagle3_tasks.contracts.errors import DamagedData, RequestRefused
from eagle3_tasks.draft.trained import read_tensors, write_tensors
from eagle3_tasks.host.files import make_private_folder, read_json, write_json
from eagle3_tasks.training.spec import HistoryEntry

logger = logging.getLogger(__name__)

CHECKPOINT_VERSION = 2
MANIFEST_FILE = "manifest.json"
NUM_KEPT = 2
_FOLDER = re.compile(r"step_(\d{8,})")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankFile:
    """One rank's file as it was written."""

    name: str
    num_bytes: int
    crc32: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointManifest:
    """``step`` is also the position in the plan, which ``plan_digest`` names.

    ``window`` holds the sums of the history line that was not yet full, ``last`` the newest
    full one: of a checkpoint at the plan's end it is the training's result.
    """

    version: int = CHECKPOINT_VERSION
    step: int
    plan_digest: str
    files: tuple[RankFile, ...]
    window: tuple[float, ...]
    last: HistoryEntry | None = None
    seconds: float


def share_tensors(tensors: Mapping[str, Tensor], num_ranks: int) -> list[list[str]]:
    """Deal tensor names to ranks so that each writes about as many bytes."""
    shares: list[list[str]] = [[] for _ in range(num_ranks)]
    sizes = [0] * num_ranks
    for name in sorted(tensors, key=lambda one: (-tensors[one].nbytes, one)):
        rank = sizes.index(min(sizes))
        shares[rank].append(name)
        sizes[rank] += tensors[name].nbytes
    return shares


def write_rank_file(
    checkpoints: Path, step: int, rank: int, tensors: Mapping[str, Tensor]
) -> tuple[int, int]:
    """Write one rank's share durably. Without the manifest it does not count yet.

    Returns:
        its bytes and its CRC-32.
    """
    folder = make_private_folder(checkpoints / _name(step))
    return write_tensors(folder / rank_file_name(rank), tensors)


def rank_file_name(rank: int) -> str:
    return f"rank-{rank}.safetensors"


def commit_checkpoint(checkpoints: Path, manifest: CheckpointManifest) -> None:
    """Make the checkpoint valid, then remove all but the last two valid ones."""
    write_json(checkpoints / _name(manifest.step) / MANIFEST_FILE, manifest)
    for step in committed_steps(checkpoints)[:-NUM_KEPT]:
        _remove(checkpoints / _name(step))


def committed_steps(checkpoints: Path) -> list[int]:
    """List the steps that have a manifest, ascending. Tells nothing about their bytes."""
    if not checkpoints.is_dir():
        return []
    found = ((_FOLDER.fullmatch(path.name), path) for path in checkpoints.iterdir())
    return sorted(int(match[1]) for match, path in found if match and (path / MANIFEST_FILE).is_file())


def newest_whole_checkpoint(checkpoints: Path, plan_digest: str) -> int:
    """Find the newest checkpoint whose every byte is as it was written; 0 for none.

    A damaged one, and one of another plan, is named in the log and passed over: the one
    before it costs minutes, starting over costs the run. What has no manifest is removed.
    """
    steps = committed_steps(checkpoints)
    for path in checkpoints.iterdir() if checkpoints.is_dir() else ():
        if _FOLDER.fullmatch(path.name) and not (path / MANIFEST_FILE).is_file():
            _remove(path)
    for step in reversed(steps):
        try:
            manifest, _ = read_checkpoint(checkpoints, step)
        except DamagedData as error:
            logger.warning("checkpoint damaged, passed over step=%d reason=%s", step, error)
            continue
        if manifest.plan_digest == plan_digest:
            return step
        logger.warning("checkpoint of another plan, passed over step=%d", step)
    return 0


def read_checkpoint(checkpoints: Path, step: int) -> tuple[CheckpointManifest, dict[str, Tensor]]:
    """Read a checkpoint, all ranks' tensors together.

    Raises:
        DamagedData: no manifest, another version, or a file with other bytes.
    """
    folder = checkpoints / _name(step)
    try:
        manifest = read_json(CheckpointManifest, folder / MANIFEST_FILE)
    except RequestRefused as error:
        raise DamagedData(str(error)) from error
    if manifest is None or manifest.version != CHECKPOINT_VERSION:
        raise DamagedData(f"{folder}: no manifest of version {CHECKPOINT_VERSION}.")
    tensors: dict[str, Tensor] = {}
    for file in manifest.files:
        tensors |= read_tensors(folder / file.name, num_bytes=file.num_bytes, crc32=file.crc32)
    return manifest, tensors


def _remove(folder: Path) -> None:
    # The manifest goes first: a folder half removed must not look valid.
    (folder / MANIFEST_FILE).unlink(missing_ok=True)
    shutil.rmtree(folder)


def _name(step: int) -> str:
    return f"step_{step:08d}"
