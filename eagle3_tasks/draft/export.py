"""The folder that engines serve: config.json and model.safetensors, and our own check of both.

SGLang ignores unknown keys and a missing d2t; vLLM takes a missing d2t as "the first ids".
So nothing is left to them: the key set, shapes and values are checked here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from eagle3_tasks.contracts.errors import DamagedData, InvalidInput
from eagle3_tasks.draft.config import DraftConfig, from_config_json, to_config_json
from eagle3_tasks.draft.model import DraftModel
from eagle3_tasks.draft.trained import write_tensors
from eagle3_tasks.host.files import write_atomically

CONFIG_FILE = "config.json"
MODEL_FILE = "model.safetensors"
CARD_FILE = "README.md"
DTYPES: Mapping[str, torch.dtype] = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def write_export(
    folder: Path,
    tensors: Mapping[str, Tensor],
    config: DraftConfig,
    *,
    dtype: str,
    aux_layers: Mapping[str, Any],
    token_ids: Mapping[str, Any],
    card: str,
) -> None:
    """Write config, weights and model card into ``folder``, which exists, and check them.

    ``tensors`` are float32 weights with d2t and t2d by their exported names; written are
    they as ``dtype``, "bfloat16" or "float32". ``aux_layers`` (from ``aux_layer_entries``)
    and ``token_ids`` (such as ``eos_token_id``) are further entries of config.json.
    """
    cast_tensors = {
        name: one.to(DTYPES[dtype]) if one.is_floating_point() else one for name, one in tensors.items()
    }
    write_tensors(folder / MODEL_FILE, cast_tensors)
    values = {**to_config_json(config, dtype), **token_ids, **aux_layers}
    write_atomically(folder / CONFIG_FILE, (json.dumps(values, indent=2) + "\n").encode())
    write_atomically(folder / CARD_FILE, card.encode())
    load_export(folder)


def load_export(folder: Path) -> DraftModel:
    """Load the draft model from its two files alone, as written; everything is checked.

    Raises:
        InvalidInput: config.json is not one of a draft model.
        DamagedData: tensors missing, too many, of another shape or type, not finite, or
            maps that don't agree.
    """
    path = folder / CONFIG_FILE
    try:
        values = cast("dict[str, Any]", json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{path} can't be read ({error}). Run export-candidate again.") from error
    config = from_config_json(values, where=str(path))
    dtype = DTYPES.get(str(values.get("dtype")))
    if dtype is None or values.get("torch_dtype") != values.get("dtype"):
        raise InvalidInput(
            f"{path}: dtype {values.get('dtype')!r} and torch_dtype {values.get('torch_dtype')!r}."
        )
    weights_path = folder / MODEL_FILE
    try:
        tensors = load_file(weights_path)
    except (OSError, SafetensorError) as error:
        raise DamagedData(f"{weights_path} can't be read ({error}). Run export-candidate again.") from error
    problem = _problem(tensors, config, dtype)
    if problem:
        raise DamagedData(f"{weights_path}: {problem} Run export-candidate again.")
    model = DraftModel(config).to(dtype)
    model.load_state_dict(tensors)
    return model.eval()


def _problem(tensors: Mapping[str, Tensor], config: DraftConfig, dtype: torch.dtype) -> str:
    with torch.device("meta"):
        wanted = DraftModel(config).state_dict()
    if set(tensors) != set(wanted):
        missing, added = sorted(set(wanted) - set(tensors)), sorted(set(tensors) - set(wanted))
        return f"tensors missing: {missing}, unknown: {added}."
    for name, tensor in tensors.items():
        if tensor.shape != wanted[name].shape:
            return f"{name} has shape {list(tensor.shape)}, {list(wanted[name].shape)} is needed."
        kind = dtype if wanted[name].is_floating_point() else wanted[name].dtype
        if tensor.dtype != kind:
            return f"{name} is {tensor.dtype}, {kind} is needed."
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            return f"{name} holds numbers that are not finite."
    target_ids = tensors["d2t"] + torch.arange(config.draft_vocab_size)
    if not torch.equal(target_ids, tensors["t2d"].nonzero().flatten()):
        return "d2t and t2d name different target ids, or d2t's are not ascending."
    return ""
