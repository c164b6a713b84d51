"""Finding embedding, head and final norm in a target's files, whatever wraps them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3_tasks.contracts.errors import DamagedData, InvalidInput
from eagle3_tasks.draft.target_weights import head_rows, read_target_weights
from tests.host.test_training_checkpoint import Marker
from tests.host.tiny_target import make_target
from tests.host.training_world import make_settings


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def write_shards(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Replace the folder's weights by one file a tensor and an index."""
    (folder / "model.safetensors").unlink()
    names = {key: f"model-{number:05d}.safetensors" for number, key in enumerate(tensors)}
    for key, name in names.items():
        save_file({key: tensors[key]}, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def test_only_the_files_that_the_index_names_for_the_three_weights_are_opened(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target")
    tensors = weights_of(target)
    write_shards(target, tensors)
    for path in target.glob("model-*.safetensors"):
        (key,) = load_file(path)
        if "layers" in key:
            path.write_bytes(b"not read")
    weights = read_target_weights(make_settings(tmp_path / "root", target))
    assert torch.equal(weights.embedding_WD, tensors["model.embed_tokens.weight"])
    assert torch.equal(weights.head_WD, tensors["lm_head.weight"])
    assert torch.equal(weights.final_norm_D, tensors["model.norm.weight"])
    assert torch.equal(head_rows(weights, torch.tensor([3, 5])), tensors["lm_head.weight"][[3, 5]])


@pytest.mark.parametrize("wrapper", ["language_model.", "model.language_model."])
def test_a_wrapped_language_model_is_found_beside_a_vision_tower(tmp_path: Path, wrapper: str) -> None:
    target = make_target(tmp_path / "target")
    tensors = weights_of(target)
    wrapped = {
        (wrapper + key if wrapper == "language_model." else key.replace("model.", wrapper, 1)): tensor
        for key, tensor in tensors.items()
    }
    vision = {
        "vision_tower.blocks.0.norm.weight": torch.zeros(4),
        # An extra prediction layer with an embedding of its own, deeper down.
        f"{wrapper}layers.9.shared.embed_tokens.weight": torch.zeros(4, 4),
    }
    write_shards(target, wrapped | vision)
    weights = read_target_weights(make_settings(tmp_path / "root", target))
    assert torch.equal(weights.embedding_WD, tensors["model.embed_tokens.weight"])
    assert torch.equal(weights.head_WD, tensors["lm_head.weight"])
    assert torch.equal(weights.final_norm_D, tensors["model.norm.weight"])


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target", tie_word_embeddings=True)
    assert "lm_head.weight" not in weights_of(target)
    weights = read_target_weights(make_settings(tmp_path / "root", target))
    assert torch.equal(weights.head_WD, weights.embedding_WD)


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        ("lm_head.weight", "head"),
        ("model.norm.weight", "model.norm.weight"),
        ("model.embed_tokens.weight", "embedding"),
    ],
)
def test_a_missing_weight_is_named(tmp_path: Path, missing: str, named: str) -> None:
    target = make_target(tmp_path / "target")
    tensors = weights_of(target)
    del tensors[missing]
    save_file(tensors, target / "model.safetensors")
    with pytest.raises(InvalidInput, match=named):
        read_target_weights(make_settings(tmp_path / "root", target))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_pickled_target_weights_are_refused_and_never_executed(tmp_path: Path, name: str) -> None:
    target = make_target(tmp_path / "target")
    (target / "model.safetensors").unlink()
    marker = tmp_path / "marker"
    torch.save({"lm_head.weight": Marker(marker)}, target / name)
    with pytest.raises((InvalidInput, DamagedData), match="safetensors"):
        read_target_weights(make_settings(tmp_path / "root", target))
    assert not marker.exists()
