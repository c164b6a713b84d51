"""Checkpoints: valid by a manifest written last, two kept, damage found, nothing unpickled."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eagle3_tasks.contracts.errors import DamagedData
from eagle3_tasks.draft.trained import TrainingResult, read_trained, write_trained
from eagle3_tasks.training.checkpoint import (
    CheckpointManifest,
    RankFile,
    commit_checkpoint,
    committed_steps,
    newest_whole_checkpoint,
    rank_file_name,
    read_checkpoint,
    share_tensors,
    write_rank_file,
)

PLAN = "a" * 24


def write_checkpoint(folder: Path, step: int, *, plan: str = PLAN) -> None:
    files = []
    for rank in range(2):
        num_bytes, crc32 = write_rank_file(folder, step, rank, {f"t{rank}": torch.full((5,), float(step))})
        files.append(RankFile(name=rank_file_name(rank), num_bytes=num_bytes, crc32=crc32))
    commit_checkpoint(
        folder,
        CheckpointManifest(step=step, plan_digest=plan, files=tuple(files), window=(0.5,), seconds=1.0),
    )


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step_{step:08d}"


class Marker:
    """Unpickled anywhere, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.path,)


def test_a_checkpoint_is_read_back_with_the_tensors_of_all_ranks(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 30)
    manifest, tensors = read_checkpoint(tmp_path, 30)
    assert (manifest.step, manifest.window) == (30, (0.5,))
    assert {name: one.tolist() for name, one in tensors.items()} == {"t0": [30.0] * 5, "t1": [30.0] * 5}


def test_only_the_last_two_are_kept(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        write_checkpoint(tmp_path, step)
    assert committed_steps(tmp_path) == [20, 30]
    assert not step_folder(tmp_path, 10).exists()


def test_a_checkpoint_without_its_manifest_does_not_exist_and_is_removed(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 10)
    write_rank_file(tmp_path, 20, 0, {"t0": torch.zeros(5)})
    assert newest_whole_checkpoint(tmp_path, PLAN) == 10
    assert not step_folder(tmp_path, 20).exists()


@pytest.mark.parametrize("damage", ["flip", "cut", "missing"])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path: Path, damage: str) -> None:
    write_checkpoint(tmp_path, 10)
    write_checkpoint(tmp_path, 20)
    path = step_folder(tmp_path, 20) / rank_file_name(1)
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(content if damage == "flip" else content[:-3])
    assert newest_whole_checkpoint(tmp_path, PLAN) == 10
    with pytest.raises(DamagedData, match="rank-1"):
        read_checkpoint(tmp_path, 20)


def test_a_checkpoint_of_another_plan_is_not_continued(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 10, plan="b" * 24)
    assert newest_whole_checkpoint(tmp_path, PLAN) == 0


def test_a_pickle_in_a_checkpoint_is_refused_and_never_executed(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 10)
    marker, path = tmp_path / "marker", step_folder(tmp_path, 10) / rank_file_name(0)
    torch.save({"t0": Marker(marker)}, path)
    content = path.read_bytes()
    # Even one that the manifest vouches for.
    files = (RankFile(name=path.name, num_bytes=len(content), crc32=zlib.crc32(content)),)
    commit_checkpoint(
        tmp_path, CheckpointManifest(step=10, plan_digest=PLAN, files=files, window=(), seconds=0.0)
    )
    with pytest.raises(DamagedData, match="can't be read"):
        read_checkpoint(tmp_path, 10)
    assert newest_whole_checkpoint(tmp_path, PLAN) == 0
    assert not marker.exists()


def test_trained_weights_that_changed_since_are_not_exported(tmp_path: Path) -> None:
    result = TrainingResult(
        num_steps=1, num_samples=1, num_trained_tokens=1, final_loss=0.5, acceptance=(0.5,), seconds=1.0,
        num_bytes=0, crc32=0,
    )  # fmt: skip
    with pytest.raises(DamagedData, match="not finished"):
        read_trained(tmp_path)
    written = write_trained(tmp_path, {"fc.weight": torch.ones(3)}, result)
    tensors, read = read_trained(tmp_path)
    assert read == written
    assert tensors["fc.weight"].tolist() == [1.0, 1.0, 1.0]
    path = tmp_path / "trained" / "weights.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(DamagedData, match="CRC-32"):
        read_trained(tmp_path)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=30), st.integers(1, 5))
def test_ranks_share_all_tensors_about_equally(sizes: list[int], num_ranks: int) -> None:
    tensors = {f"t{index}": torch.empty(size) for index, size in enumerate(sizes)}
    shares = share_tensors(tensors, num_ranks)
    assert sorted(name for share in shares for name in share) == sorted(tensors)
    loads = [sum(tensors[name].nbytes for name in share) for share in shares]
    assert max(loads) - min(loads) <= max(one.nbytes for one in tensors.values())
