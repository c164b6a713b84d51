"""The three weights of the target that the draft model needs, read by the index alone.

A target of 600 GB is not loaded for its embedding, head and final norm: their safetensors
files are memory-mapped. Pickled weights are refused: reading them can run code.

Shapes: W target vocabulary, D hidden.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.utils.hub import cached_file

from eagle3_tasks.contracts.errors import DamagedData, InvalidInput
from eagle3_tasks.contracts.settings import Settings
from eagle3_tasks.draft.target_config import read_whole_config

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
_HEADS = ("lm_head.weight", "embed_out.weight")
_NORMS = ("norm.weight", "final_layernorm.weight", "final_layer_norm.weight", "ln_f.weight")
# The final norms of these store w and multiply by 1 + w; the draft model multiplies by what it
# stores. Named by the text configuration's model type.
_ONE_PLUS_NORMS = frozenset(
    {
        "gemma", "gemma2", "gemma3_text", "minimax_m3_vl_text", "nemotron", "qwen3_5_moe_text",
        "qwen3_5_text", "qwen3_next", "step3p5", "vaultgemma",
    }
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetWeights:
    """Memory-mapped, in the stored type: embedding and head [W, D], final norm's factor [D]."""

    embedding_WD: Tensor
    head_WD: Tensor
    final_norm_D: Tensor


def read_target_weights(settings: Settings) -> TargetWeights:
    """Find and map embedding, head (perhaps tied to it) and final norm.

    Cheap, so planning calls it too: what training can't read is refused before extraction.

    Raises:
        InvalidInput: no safetensors files, or none of the keys that a weight can have.
        DamagedData: a file does not hold what its index says.
    """
    whole = read_whole_config(settings)
    config = cast("PreTrainedConfig", whole.get_text_config())
    files = _weight_files(settings)
    embedding_key = _only(files, _EMBEDDINGS, "embedding", settings)
    norm_key = _norm_key(files, embedding_key, settings)
    head_key = embedding_key
    if not _is_tied((whole, config), files):
        head_key = _only(files, _HEADS, "head", settings)
    weights = TargetWeights(
        embedding_WD=_map(settings, files, embedding_key),
        head_WD=_map(settings, files, head_key),
        final_norm_D=_map(settings, files, norm_key),
    )
    if str(config.model_type) in _ONE_PLUS_NORMS:
        weights = dataclasses.replace(weights, final_norm_D=weights.final_norm_D.float() + 1.0)
    width = int(config.hidden_size)
    for key, weight in ((embedding_key, weights.embedding_WD), (head_key, weights.head_WD)):
        if weight.dim() != 2 or weight.shape[0] < int(config.vocab_size) or weight.shape[1] != width:
            raise InvalidInput(
                f"{settings.target.target_model}: {key} has shape {list(weight.shape)}, "
                f"[{config.vocab_size}, {width}] is needed. Check the target's folder."
            )
    return weights


def _is_tied(configs: Sequence[PreTrainedConfig], files: dict[str, str]) -> bool:
    """Say whether the embedding is the head too. A wrapper may say so where its text part doesn't."""
    has_head = any(_has_ending(key, _HEADS) for key in files)
    return not has_head and any(getattr(one, "tie_word_embeddings", False) for one in configs)


def _only(files: dict[str, str], endings: tuple[str, ...], what: str, settings: Settings) -> str:
    """Find the one key of the language model that has one of the endings."""
    found = [key for key in files if _has_ending(key, endings)]
    if len(found) > 1:
        # Extra prediction layers and encoders bring embeddings of their own, deeper down.
        depth = min(key.count(".") for key in found)
        found = [key for key in found if key.count(".") == depth]
    if len(found) != 1:
        raise InvalidInput(
            f"{settings.target.target_model}: {len(found)} tensors could be the target's {what}; exactly one "
            f"key that ends in {' or '.join(endings)} is needed. Found: {', '.join(sorted(found)) or 'none'}."
        )
    return found[0]


def _norm_key(files: dict[str, str], embedding_key: str, settings: Settings) -> str:
    """The final norm stands beside the embedding, whatever wraps the language model."""
    prefix = next(embedding_key.removesuffix(one) for one in _EMBEDDINGS if embedding_key.endswith(one))
    for ending in _NORMS:
        if prefix + ending in files:
            return prefix + ending
    raise InvalidInput(
        f"{settings.target.target_model}: the final norm is missing: none of "
        f"{', '.join(prefix + ending for ending in _NORMS)} is in the weights' index."
    )


def _has_ending(key: str, endings: tuple[str, ...]) -> bool:
    return any(key == ending or key.endswith("." + ending) for ending in endings)


def _weight_files(settings: Settings) -> dict[str, str]:
    """Give the file name of each tensor."""
    index = _find(settings, _INDEX)
    if index is not None:
        try:
            weight_map = cast("dict[str, Any]", json.loads(index.read_text(encoding="utf-8")))["weight_map"]
            return {str(key): str(name) for key, name in weight_map.items()}
        except (ValueError, KeyError, AttributeError) as error:
            raise DamagedData(
                f"{index}: not an index of safetensors files ({error}). Fetch it again."
            ) from error
    single = _find(settings, _SINGLE)
    if single is None:
        raise InvalidInput(
            f"target_model {settings.target.target_model!r} holds neither {_INDEX} nor {_SINGLE}. Only "
            "safetensors are read, since pickled weights can run code: convert them with save_pretrained."
        )
    with _open(single) as file:
        return dict.fromkeys(file.keys(), _SINGLE)


def _map(settings: Settings, files: dict[str, str], key: str) -> Tensor:
    path = _find(settings, files[key])
    if path is None:
        raise DamagedData(
            f"{settings.target.target_model}: {files[key]}, which should hold {key}, is missing. "
            "Fetch it again."
        )
    with _open(path) as file:
        if key not in set(file.keys()):
            raise DamagedData(
                f"{path}: tensor {key} is missing, though the index names it. Fetch the file again."
            )
        return cast("Tensor", file.get_tensor(key))


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise DamagedData(f"{path}: not a whole safetensors file ({error}). Fetch it again.") from error


def _find(settings: Settings, name: str) -> Path | None:
    """Find a file of the target in its folder or on the hub; None where it has none."""
    target = settings.target
    try:
        found = cached_file(
            target.target_model,
            name,
            revision=target.target_revision or None,
            _raise_exceptions_for_missing_entries=False,
        )
    except OSError as error:
        raise InvalidInput(f"target_model {target.target_model!r} can't be read: {error}") from error
    return None if found is None else Path(found)


def head_rows(weights: TargetWeights, target_ids: Tensor) -> Tensor:
    """Copy the head's rows of ``target_ids`` in float32: [len(target_ids), D]."""
    return weights.head_WD[target_ids].to(torch.float32)
