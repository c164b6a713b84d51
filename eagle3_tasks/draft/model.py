"""The EAGLE-3 draft model: one decoder layer between the target's states and a small head.

The names of its tensors are those of the exported file, so a state dict is an export.

Shapes: B samples, T tokens, A auxiliary hidden states (3), D hidden (the target's too),
C = 2 D, N attention heads, K key-value heads, E head size, V draft vocabulary, W target
vocabulary, X any leading sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eagle3_tasks.draft.config import DraftConfig

NUM_AUX_STATES = 3

Rotary = tuple[Tensor, Tensor]
"""cos and sin, both [B, T, E]."""

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Mixes values: query [B, N, T, E], key and value [B, K, T, E] -> [B, N, T, E].

What earlier keys it adds is the caller's: training unrolls, serving has a cache.
"""


class RmsNorm(nn.Module):
    """Root-mean-square norm, computed in float32 whatever comes in."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden_XD: Tensor) -> Tensor:
        normed_XD = functional.rms_norm(hidden_XD.float(), self.weight.shape, self.weight.float(), self.eps)
        return normed_XD.to(hidden_XD.dtype)


class DraftAttention(nn.Module):
    """Grouped-query attention whose input is twice as wide as its output."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width_C = 2 * config.hidden_size
        self.q_proj = nn.Linear(width_C, config.num_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(width_C, config.num_kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(width_C, config.num_kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, config.hidden_size, bias=False)

    def forward(self, input_BTC: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
        query_BNTE = rotate(self._heads(self.q_proj(input_BTC)), rotary)
        key_BKTE = rotate(self._heads(self.k_proj(input_BTC)), rotary)
        value_BKTE = self._heads(self.v_proj(input_BTC))
        mixed_BNTE = attend(query_BNTE, key_BKTE, value_BKTE)
        return self.o_proj(mixed_BNTE.transpose(1, 2).flatten(2))

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class DraftMlp(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden_XD: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(hidden_XD)) * self.up_proj(hidden_XD))


class DraftLayer(nn.Module):
    """A Llama decoder layer that reads an embedding beside the hidden state."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config)
        self.mlp = DraftMlp(config)
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, embedded_BTD: Tensor, hidden_BTD: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
        input_BTC = torch.cat((self.input_layernorm(embedded_BTD), self.hidden_norm(hidden_BTD)), dim=-1)
        # The residual is the state before its norm; with the normed one, engines that
        # serve this model would compute something else.
        hidden_BTD = hidden_BTD + self.self_attn(input_BTC, rotary, attend)
        return hidden_BTD + self.mlp(self.post_attention_layernorm(hidden_BTD))


class DraftModel(nn.Module):
    """The whole draft model, without the target's embedding."""

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(NUM_AUX_STATES * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = DraftLayer(config)
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config.target_vocab_size, dtype=torch.bool))
        self._rotary = rotary_embedding(config)

    def fuse(self, aux_hidden_BTAD: Tensor) -> Tensor:
        """Turn the three auxiliary hidden states into the first hidden state [B, T, D]."""
        return self.fc(aux_hidden_BTAD.flatten(2))

    def rotary(self, positions_BT: Tensor) -> Rotary:
        """Give float32 cos and sin for the positions."""
        anchor = torch.empty(0, device=positions_BT.device)
        return cast("Rotary", self._rotary(anchor, positions_BT))

    def logits(self, hidden_XD: Tensor) -> Tensor:
        """Give the draft vocabulary's logits [X, V] of hidden states as the layer leaves them."""
        return self.lm_head(self.norm(hidden_XD))

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Translate draft ids into target ids."""
        return draft_ids + self.d2t[draft_ids]


class Float32Rotary(LlamaRotaryEmbedding):
    """Rotary positions whose frequencies stay float32 whatever the model is cast to.

    Rounded to bfloat16 they would turn position 3,000 by another angle altogether. Engines
    compute them in float32.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        # All of nn.Module's moves and casts come through here; only the move is taken over.
        return super()._apply(lambda one: one.to(fn(one).device), recurse)


def rotary_embedding(config: DraftConfig) -> nn.Module:
    """Make transformers' rotary embedding, whose forms (YaRN and others) the engines share."""
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    parameters.update(config.rope_scaling or {})
    module = Float32Rotary(
        LlamaConfig(
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters=parameters,
        )
    )
    return cast("nn.Module", module)


def rotate(states_BNTE: Tensor, rotary: Rotary) -> Tensor:
    """Turn queries or keys by their positions, the two halves of a head against each other."""
    cos_BTE, sin_BTE = (one.unsqueeze(1).to(states_BNTE.dtype) for one in rotary)
    first, second = states_BNTE.chunk(2, dim=-1)
    return states_BNTE * cos_BTE + torch.cat((-second, first), dim=-1) * sin_BTE
