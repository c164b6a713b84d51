"""Speculative decoding in its plainest form: a draft chain, one verification, two caches.

It shares no code with training beyond the draft model's layer, and takes the target as
transformers runs it. What it emits has to be what the target alone would.

Shapes: B always 1, T tokens, A auxiliary hidden states, D hidden, N attention heads, K
key-value heads, E head size.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache

from eagle3_tasks.draft.model import DraftModel
from eagle3_tasks.engines.decoder import Decoder

# Weights of fewer bits are unpacked to one of these before anything is multiplied.
_ARITHMETIC_TYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculativeAnswer:
    """An answer and the rounds that it took.

    ``accepted`` counts, for each round, the draft tokens that are part of the answer. The
    first token comes from the prompt's own forward pass and belongs to no round.
    """

    ids: tuple[int, ...]
    accepted: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopTarget:
    """A target of transformers, with what the loop reads of it beside its logits."""

    model: Any
    decoder: Decoder
    aux_layer_ids: tuple[int, ...]

    @property
    def device(self) -> torch.device:
        return self.model.get_input_embeddings().weight.device

    @property
    def rounding(self) -> float:
        """Relative distance of neighbouring numbers in the coarsest type of the target's weights.

        Not that of its logits: many models compute in bfloat16 and return float32.
        """
        types = {one.dtype for one in self.model.parameters()}
        return max(torch.finfo(one).eps for one in types & _ARITHMETIC_TYPES)

    def run(self, ids: Sequence[int], cache: DynamicCache) -> tuple[list[int], Tensor]:
        """Read ``ids`` after what the cache holds.

        Returns:
            the greedy next id after each of them, and the auxiliary states [1, T, A, D].
        """
        ids_BT = torch.tensor([list(ids)], device=self.device)
        with self.decoder.caught_outputs(self.aux_layer_ids) as caught:
            logits = self.model(input_ids=ids_BT, past_key_values=cache, use_cache=True).logits
        aux_BTAD = torch.stack([caught[layer].to(self.device) for layer in self.aux_layer_ids], dim=2)
        return logits[0].argmax(dim=-1).tolist(), aux_BTAD

    def embed(self, ids: Sequence[int]) -> Tensor:
        """Look the embedding's rows up, [1, T, D], as engines do: without any scaling."""
        weight = self.model.get_input_embeddings().weight
        return functional.embedding(torch.tensor([list(ids)], device=weight.device), weight)


class CachedAttention:
    """Causal attention over all keys seen so far. ``crop`` forgets the newest."""

    def __init__(self) -> None:
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def __call__(self, query_BNTE: Tensor, key_BKTE: Tensor, value_BKTE: Tensor) -> Tensor:
        if self._keys is not None and self._values is not None:
            key_BKTE = torch.cat((self._keys, key_BKTE), dim=2)
            value_BKTE = torch.cat((self._values, value_BKTE), dim=2)
        self._keys, self._values = key_BKTE, value_BKTE
        num_queries, num_keys = query_BNTE.shape[2], key_BKTE.shape[2]
        groups = query_BNTE.shape[1] // key_BKTE.shape[1]
        scores = query_BNTE @ key_BKTE.repeat_interleave(groups, dim=1).transpose(-1, -2)
        is_later = torch.ones(num_queries, num_keys, dtype=torch.bool, device=scores.device)
        is_later = is_later.triu(num_keys - num_queries + 1)
        scores = (scores.float() / math.sqrt(query_BNTE.shape[-1])).masked_fill(is_later, -torch.inf)
        weights = torch.softmax(scores, dim=-1).to(value_BKTE.dtype)
        return weights @ value_BKTE.repeat_interleave(groups, dim=1)

    def crop(self, length: int) -> None:
        if self._keys is not None and self._values is not None:
            self._keys, self._values = self._keys[:, :, :length], self._values[:, :, :length]


class DraftChain:
    """The draft model while one answer is written: its cache, and how far it has read."""

    def __init__(self, draft: DraftModel, target: LoopTarget) -> None:
        self._draft = draft
        self._target = target
        self._attention = CachedAttention()
        self._length = 0

    def propose(self, next_ids: Sequence[int], aux_BTAD: Tensor, draft_steps: int) -> list[int]:
        """Read the target's states of newly known positions, then guess ``draft_steps`` tokens.

        ``next_ids`` holds, for each of these positions, the token after it; the last one is
        the newest known.
        """
        draft = self._draft
        dtype = draft.fc.weight.dtype
        hidden_BTD = draft.fuse(aux_BTAD.to(dtype))
        hidden_BTD = self._layer(next_ids, hidden_BTD, self._length)[:, -1:]
        self._length += len(next_ids)
        proposed: list[int] = []
        for step in range(draft_steps):
            if step > 0:
                # The chain's own state stands for the target's, one position further.
                hidden_BTD = self._layer(proposed[-1:], hidden_BTD, self._length + step - 1)
            draft_id = draft.logits(hidden_BTD[:, -1]).argmax(dim=-1)
            proposed.append(int(draft.target_ids(draft_id)))
        # Guesses leave no trace: the next round reads the target's true states instead.
        self._attention.crop(self._length)
        return proposed

    def _layer(self, next_ids: Sequence[int], hidden_BTD: Tensor, first_position: int) -> Tensor:
        positions_BT = torch.arange(first_position, first_position + len(next_ids), device=hidden_BTD.device)[
            None
        ]
        embedded_BTD = self._target.embed(next_ids).to(hidden_BTD.dtype)
        return self._draft.midlayer(
            embedded_BTD, hidden_BTD, self._draft.rotary(positions_BT), self._attention
        )


@torch.inference_mode()
def speculate(
    target: LoopTarget,
    draft: DraftModel,
    prompt_ids: Sequence[int],
    *,
    draft_steps: int,
    max_new_tokens: int,
    end_ids: Collection[int],
) -> SpeculativeAnswer:
    """Answer greedily, with the draft model guessing ``draft_steps`` tokens a round."""
    cache = DynamicCache()
    chain = DraftChain(draft, target)
    choices, aux_BTAD = target.run(prompt_ids, cache)
    ids = [choices[-1]]
    unread = [*prompt_ids[1:], ids[0]]
    accepted: list[int] = []
    while len(ids) < max_new_tokens and ids[-1] not in end_ids:
        proposed = chain.propose(unread, aux_BTAD, draft_steps)
        choices, aux_BTAD = target.run([ids[-1], *proposed], cache)
        num_right = 0
        while num_right < draft_steps and proposed[num_right] == choices[num_right]:
            num_right += 1
        unread = choices[: num_right + 1]
        aux_BTAD = aux_BTAD[:, : num_right + 1]
        if num_right < draft_steps:
            cache.crop(num_right - draft_steps)
        kept = _until_end(unread, max_new_tokens - len(ids), end_ids)
        ids += kept
        accepted.append(min(num_right, len(kept)))
    return SpeculativeAnswer(ids=tuple(ids), accepted=tuple(accepted))


@torch.inference_mode()
def decode_greedily(
    target: LoopTarget, prompt_ids: Sequence[int], *, max_new_tokens: int, end_ids: Collection[int]
) -> tuple[int, ...]:
    """Answer with the target alone, one token at a time."""
    cache = DynamicCache()
    choices, _ = target.run(prompt_ids, cache)
    ids = [choices[-1]]
    while len(ids) < max_new_tokens and ids[-1] not in end_ids:
        choices, _ = target.run(ids[-1:], cache)
        ids.append(choices[-1])
    return tuple(ids)


def _until_end(ids: Sequence[int], limit: int, end_ids: Collection[int]) -> list[int]:
    kept: list[int] = []
    for one in ids[:limit]:
        kept.append(one)
        if one in end_ids:
            break
    return kept
