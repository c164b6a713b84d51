"""Finding embedding, head and final norm in a target's files, whatever wraps them."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from eagle3_tasks.contracts.errors import DamagedData, InvalidInput
from eagle3_tasks.draft.target_weights import _ONE_PLUS_NORMS, head_rows, read_target_weights
from eagle3_tasks.extraction.plan_stage import run_plan
from tests.host.test_training_checkpoint import Marker
from tests.host.tiny_target import make_context, make_dataset, make_target
from tests.host.training_world import make_settings

_ADDS_ONE = re.compile(r"1(\.0)? \+ self\.weight|self\.weight \+ 1")


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


def test_a_head_that_only_the_wrapper_calls_tied_is_the_embedding(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target", tie_word_embeddings=True)
    text = json.loads((target / "config.json").read_text())
    text = {key: value for key, value in text.items() if key not in ("tie_word_embeddings", "architectures")}
    whole = {"model_type": "qwen2_5_vl", "tie_word_embeddings": True, "text_config": text}
    (target / "config.json").write_text(json.dumps(whole))
    weights = read_target_weights(make_settings(tmp_path / "root", target))
    assert torch.equal(weights.head_WD, weights.embedding_WD)
    (target / "config.json").write_text(json.dumps({**whole, "tie_word_embeddings": False}))
    with pytest.raises(InvalidInput, match="head"):
        read_target_weights(make_settings(tmp_path / "root", target))


def final_norms() -> list[tuple[str, str, str]]:
    """Module, class and model types of every final norm in transformers that may add one to its weight.

    T5Gemma is left out: an encoder and a decoder, no causal language model.

    A final norm is made by the class that makes the embedding of tokens. Only sources are
    read: importing all models takes a minute.
    """
    found: list[tuple[str, str, str]] = []
    for path in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        source = path.read_text(encoding="utf-8")
        if not _ADDS_ONE.search(source):
            continue
        config = path.with_name(path.name.replace("modeling_", "configuration_"))
        types = ",".join(re.findall(r'model_type = "(\w+)"', config.read_text(encoding="utf-8")))
        for body in source.split("\nclass "):
            norm = re.search(r"self\.norm = (\w+)\(", body)
            if norm is not None and "t5gemma" not in types and "self.embed_tokens =" in body:
                found.append((f"transformers.models.{path.parent.name}.{path.stem}", norm[1], types))
    return found


@pytest.mark.parametrize(("module", "name", "types"), final_norms(), ids=lambda one: one.rpartition(".")[2])
def test_norms_that_multiply_by_one_more_than_they_store_are_known_by_their_model_type(
    module: str, name: str, types: str
) -> None:
    norm = getattr(importlib.import_module(module), name)(4)
    with torch.no_grad():
        norm.weight.zero_()
        # Of mean square 1 and mean 0, so that a layer norm passes it on as well.
        adds_one = bool(norm(torch.tensor([1.0, -1.0, 1.0, -1.0])).any())
    assert adds_one == any(one in _ONE_PLUS_NORMS for one in types.split(","))


def test_a_norm_that_stores_one_less_is_read_as_the_factor_it_means(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target")
    stored = weights_of(target)["model.norm.weight"]
    config = json.loads((target / "config.json").read_text())
    for model_type, added in (("llama", 0.0), ("qwen3_5_text", 1.0), ("vaultgemma", 1.0)):
        (target / "config.json").write_text(json.dumps({**config, "model_type": model_type}))
        weights = read_target_weights(make_settings(tmp_path / "root", target))
        assert torch.equal(weights.final_norm_D, stored + added)


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


def test_a_weight_that_training_could_not_find_is_refused_when_planning(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target")
    context = make_context(make_settings(tmp_path / "root", target, draft_vocab_size=8))
    make_dataset(context, [list(range(10, 30))])
    run_plan(context)
    tensors = weights_of(target)
    tensors["model.last_norm.weight"] = tensors.pop("model.norm.weight")
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InvalidInput, match="the final norm is missing"):
        run_plan(context)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_pickled_target_weights_are_refused_and_never_executed(tmp_path: Path, name: str) -> None:
    target = make_target(tmp_path / "target")
    (target / "model.safetensors").unlink()
    marker = tmp_path / "marker"
    torch.save({"lm_head.weight": Marker(marker)}, target / name)
    with pytest.raises((InvalidInput, DamagedData), match="safetensors"):
        read_target_weights(make_settings(tmp_path / "root", target))
    assert not marker.exists()
