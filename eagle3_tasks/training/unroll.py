"""Training-time test: the draft model run on its own states, as serving will run it.

Shapes: B samples, T tokens, D hidden, A auxiliary hidden states, N attention heads, K
key-value heads, E head size, Q queries at once, S earlier steps' own keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from eagle3_tasks.draft.model import DraftModel

# Above this many tokens the scores of all queries would fill the memory: then they are
# computed some queries at a time and once more in the backward pass.
_QUERIES_AT_ONCE = 1024


def unroll(
    model: DraftModel, embedded_BTD: Tensor, aux_hidden_BTAD: Tensor, ttt_steps: int
) -> Iterator[Tensor]:
    """Yield the hidden states [B, T, D] of each TTT step, before the final norm.

    At step k, position t reads the embedding of token t + 1 + k (what was really said) and
    its own state of step k - 1, stands at rotary position t + k, and says what it expects
    at t + 2 + k. Positions whose token lies beyond the end yield numbers without meaning;
    no other position sees them.
    """
    hidden_BTD = model.fuse(aux_hidden_BTAD)
    positions_BT = torch.arange(embedded_BTD.shape[1], device=embedded_BTD.device)[None]
    attention = UnrolledAttention()
    for step in range(ttt_steps):
        shifted_BTD = _shift_left(embedded_BTD, step + 1)
        rotary = model.rotary(positions_BT + step)
        hidden_BTD = model.midlayer(shifted_BTD, hidden_BTD, rotary, attention)
        yield hidden_BTD


class UnrolledAttention:
    """Attention of one unrolling: causal over step 0's keys, plus own keys of later steps.

    In serving, the keys before a round come from the target's true states, which are step
    0's; only the round's own guesses add keys of later steps. Call it once a step.
    """

    def __init__(self) -> None:
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def __call__(self, query_BNTE: Tensor, key_BKTE: Tensor, value_BKTE: Tensor) -> Tensor:
        groups = query_BNTE.shape[1] // key_BKTE.shape[1]
        self._keys.append(key_BKTE.repeat_interleave(groups, dim=1))
        self._values.append(value_BKTE.repeat_interleave(groups, dim=1))
        num_tokens = query_BNTE.shape[2]
        if num_tokens <= _QUERIES_AT_ONCE:
            return _attend(query_BNTE, 0, *self._keys, *self._values)
        blocks = [
            checkpoint(_attend, query_BNTE[:, :, start : start + _QUERIES_AT_ONCE], start,
                       *self._keys, *self._values, use_reentrant=False)
            for start in range(0, num_tokens, _QUERIES_AT_ONCE)
        ]  # fmt: skip
        return torch.cat(blocks, dim=2)


def _attend(query_BNQE: Tensor, start: int, *keys_then_values: Tensor) -> Tensor:
    """Attend from the queries that stand at positions ``start`` and after."""
    half = len(keys_then_values) // 2
    keys, values = keys_then_values[:half], keys_then_values[half:]
    num_queries = query_BNQE.shape[2]
    stop = start + num_queries
    query_BNQE = query_BNQE / math.sqrt(query_BNQE.shape[-1])
    scores_BNQT = (query_BNQE @ keys[0][:, :, :stop].transpose(-1, -2)).float()
    is_later_QT = torch.ones(num_queries, stop, dtype=torch.bool, device=query_BNQE.device).triu(start + 1)
    scores_BNQT = scores_BNQT.masked_fill(is_later_QT, -torch.inf)
    own_BNQS = [(query_BNQE * key[:, :, start:stop]).sum(-1, keepdim=True).float() for key in keys[1:]]
    weights = torch.softmax(torch.cat((scores_BNQT, *own_BNQS), dim=-1), dim=-1).to(values[0].dtype)
    mixed_BNQE = weights[..., :stop] @ values[0][:, :, :stop]
    for step, value in enumerate(values[1:]):
        mixed_BNQE = mixed_BNQE + weights[..., stop + step, None] * value[:, :, start:stop]
    return mixed_BNQE


def _shift_left(states_BTD: Tensor, count: int) -> Tensor:
    """Move token t + count to t; zeros follow the end."""
    return torch.nn.functional.pad(states_BTD[:, count:], (0, 0, 0, min(count, states_BTD.shape[1])))
