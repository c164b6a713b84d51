"""How an exported config.json names auxiliary layers, so that SGLang and vLLM read the same ones.

This project counts the decoder layer whose OUTPUT is taken, from 0. vLLM reads the top-level
key and means the layer's INPUT, one more. SGLang reads ``eagle_config`` only and means
outputs, except in the DeepSeek family, where it means inputs, unless the list begins with
1, which it takes for outputs. With no ids at all both take the same default layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eagle3_tasks.contracts.errors import InvalidSettings
from eagle3_tasks.engines.interface import default_aux_layer_ids

_DEEPSEEK_FAMILY = frozenset(
    {"deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25", "glm4_moe_lite"}
)


def aux_layer_entries(aux_layer_ids: Sequence[int], num_layers: int, model_type: str) -> dict[str, Any]:
    """Give the entries of config.json for these layers; none for the default ones.

    Raises:
        InvalidSettings: SGLang would read other layers than vLLM, whatever is written.
    """
    if _are_default(aux_layer_ids, num_layers):
        return {}
    input_ids = [layer + 1 for layer in aux_layer_ids]
    if model_type not in _DEEPSEEK_FAMILY:
        engine_ids = list(aux_layer_ids)
    elif input_ids[0] == 1:
        raise InvalidSettings(
            f"aux_layer_ids {list(aux_layer_ids)} can't be served for a target of type {model_type}: SGLang "
            "takes a list of inputs that begins with 1 for outputs. Choose a first layer other than 0."
        )
    else:
        engine_ids = input_ids
    return {
        "eagle_aux_hidden_state_layer_ids": input_ids,
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": engine_ids},
    }


def _are_default(aux_layer_ids: Sequence[int], num_layers: int) -> bool:
    try:
        return tuple(aux_layer_ids) == default_aux_layer_ids(num_layers)
    except InvalidSettings:
        # Too shallow for default layers: whatever was chosen has to be named.
        return False
