"""The draft model's dimensions and rotary positions: from the settings, and to and from config.json.

Owns what stands in an exported config.json about the form of the model. Where the settings
say 0, the target's own value is taken.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any, cast

from transformers import PreTrainedConfig

from eagle3_tasks.contracts.errors import InvalidInput, InvalidSettings
from eagle3_tasks.contracts.settings import Settings

logger = logging.getLogger(__name__)

# What transformers, SGLang's and vLLM's Llama classes all read, and read alike. `mscale` and
# `mscale_all_dim` (DeepSeek, Kimi) are left out: transformers obeys them, the engines' Llama
# does not; without them all three scale by 0.1 ln(factor) + 1.
_ROPE_KEYS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """Everything that determines the shapes and positions of a draft model.

    The draft model's hidden size is the target's: the embedding and the auxiliary hidden
    states come from there. ``rope_scaling`` holds ``rope_type`` and its figures, or is None.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    target_vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None = None


def draft_config(settings: Settings, target: PreTrainedConfig) -> DraftConfig:
    """Choose the draft model's form for the target whose text configuration is ``target``.

    Raises:
        InvalidSettings: heads that don't divide, a draft vocabulary above the target's, or
            a width that neither settings nor target give.
    """
    draft = settings.draft
    hidden_size = _size(target, "hidden_size", 0, "")
    num_heads = _size(target, "num_attention_heads", draft.draft_num_heads, "draft_num_heads")
    num_kv_heads = draft.draft_num_kv_heads or getattr(target, "num_key_value_heads", None) or num_heads
    head_dim = draft.draft_head_dim or getattr(target, "head_dim", None) or hidden_size // num_heads
    if num_heads % num_kv_heads:
        raise InvalidSettings(
            f"{num_heads} attention heads are not a multiple of {num_kv_heads} key-value heads. "
            "Set draft_num_heads and draft_num_kv_heads together."
        )
    if draft.draft_vocab_size > target.vocab_size:
        raise InvalidSettings(
            f"draft_vocab_size is {draft.draft_vocab_size}, but the target's vocabulary has only "
            f"{target.vocab_size} tokens. Set it to at most {target.vocab_size}."
        )
    theta, scaling = _rope(target)
    return DraftConfig(
        hidden_size=hidden_size,
        intermediate_size=_size(
            target, "intermediate_size", draft.draft_intermediate_size, "draft_intermediate_size"
        ),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        target_vocab_size=int(target.vocab_size),
        draft_vocab_size=draft.draft_vocab_size,
        rms_norm_eps=float(getattr(target, "rms_norm_eps", None) or 1e-6),
        max_position_embeddings=int(getattr(target, "max_position_embeddings", None) or 32768),
        rope_theta=theta,
        rope_scaling=scaling,
    )


def to_config_json(config: DraftConfig, dtype: str) -> dict[str, Any]:
    """Give the keys of config.json that SGLang, vLLM and transformers read for this form."""
    rope_type = "default" if config.rope_scaling is None else config.rope_scaling["rope_type"]
    scaling = dict(config.rope_scaling or {})
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.target_vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope_theta,
        # Older readers know `type` only, newer ones `rope_type`; null means no scaling.
        "rope_scaling": {"type": rope_type, **scaling} if config.rope_scaling is not None else None,
        "rope_parameters": {"rope_type": rope_type, "rope_theta": config.rope_theta, **scaling},
        "attention_bias": False,
        "mlp_bias": False,
        "norm_before_residual": False,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "dtype": dtype,
    }


def from_config_json(values: Mapping[str, Any], *, where: str) -> DraftConfig:
    """Read an exported config.json back.

    Raises:
        InvalidInput: it is not one of a one-layer EAGLE-3 draft model.
    """
    if values.get("architectures") != ["LlamaForCausalLMEagle3"] or values.get("num_hidden_layers") != 1:
        raise InvalidInput(
            f"{where}: architectures {values.get('architectures')} with {values.get('num_hidden_layers')} "
            "layers; ['LlamaForCausalLMEagle3'] with 1 layer is needed. Export the draft model again."
        )
    try:
        scaling = cast("dict[str, Any] | None", values["rope_scaling"])
        return DraftConfig(
            hidden_size=values["hidden_size"],
            intermediate_size=values["intermediate_size"],
            num_heads=values["num_attention_heads"],
            num_kv_heads=values["num_key_value_heads"],
            head_dim=values["head_dim"],
            target_vocab_size=values["vocab_size"],
            draft_vocab_size=values["draft_vocab_size"],
            rms_norm_eps=values["rms_norm_eps"],
            max_position_embeddings=values["max_position_embeddings"],
            rope_theta=values["rope_theta"],
            rope_scaling=None if scaling is None else {k: v for k, v in scaling.items() if k != "type"},
        )
    except KeyError as error:
        raise InvalidInput(f"{where}: key {error} is missing. Export the draft model again.") from error


def _size(target: PreTrainedConfig, name: str, chosen: int, setting: str) -> int:
    value = chosen or getattr(target, name, None)
    if not isinstance(value, int) or value < 1:
        remedy = f" Set {setting}." if setting else " Choose a causal language model as target."
        raise InvalidSettings(f"the target's configuration has no usable {name} ({value!r}).{remedy}")
    return value


def _rope(target: PreTrainedConfig) -> tuple[float, Mapping[str, Any] | None]:
    """Take over the target's rotary positions as far as the engines' Llama class has them."""
    parameters = cast("dict[str, Any]", getattr(target, "rope_parameters", None) or {})
    if "full_attention" in parameters:
        parameters = cast("dict[str, Any]", parameters["full_attention"])
    theta = float(parameters.get("rope_theta") or getattr(target, "rope_theta", None) or 10_000.0)
    rope_type = str(parameters.get("rope_type", "default"))
    if rope_type not in _ROPE_KEYS:
        # Any positions work for a model trained with them; these exist in every engine.
        logger.warning(
            "rope type not portable, draft model uses plain rope type=%s theta=%s", rope_type, theta
        )
        return theta, None
    if rope_type == "default":
        return theta, None
    return theta, {"rope_type": rope_type} | {
        key: parameters[key] for key in _ROPE_KEYS[rope_type] if parameters.get(key) is not None
    }
