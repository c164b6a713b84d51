"""Accept length without decoding: rounds walked over answers whose hidden states are captured.

Shapes: B always 1, T tokens, A auxiliary hidden states, D hidden, S draft steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eagle3_tasks.draft.model import DraftModel
from eagle3_tasks.training.unroll import unroll


@torch.inference_mode()
def simulate_rounds(
    draft: DraftModel,
    *,
    embedding_WD: Tensor,
    prompt_ids: Sequence[int],
    answer_ids: Sequence[int],
    aux_hidden_TAD: Tensor,
    draft_steps: int,
) -> tuple[int, ...]:
    """Count, for each round, the draft tokens that the target would have kept.

    By joint prefix: a guess counts only if all guesses before it in its round were right,
    and exactly then the unrolled draft model has read the same tokens as in serving. The
    next round begins after the target's own token.

    ``answer_ids`` is the target's answer, ``aux_hidden_TAD`` holds the states of
    prompt and answer.
    """
    ids_T = torch.tensor([*prompt_ids, *answer_ids])
    proposed_ST = _propose_everywhere(draft, embedding_WD, ids_T, aux_hidden_TAD, draft_steps)
    accepted: list[int] = []
    num_known = 1
    while num_known < len(answer_ids):
        # The newest known token follows position t.
        position = len(prompt_ids) + num_known - 2
        num_left = len(answer_ids) - num_known
        num_right = 0
        while (
            num_right < min(draft_steps, num_left)
            and proposed_ST[num_right][position] == answer_ids[num_known + num_right]
        ):
            num_right += 1
        accepted.append(num_right)
        num_known += num_right + 1
    return tuple(accepted)


def _propose_everywhere(
    draft: DraftModel, embedding_WD: Tensor, ids_T: Tensor, aux_hidden_TAD: Tensor, draft_steps: int
) -> list[list[int]]:
    """Give the guess of each step at every position, as target ids [S][T]."""
    weight = draft.fc.weight
    embedded_BTD = embedding_WD[ids_T.to(embedding_WD.device)].to(weight)[None]
    aux_BTAD = aux_hidden_TAD.to(weight)[None]
    return [
        draft.target_ids(draft.logits(hidden_BTD[0]).argmax(dim=-1)).tolist()
        for hidden_BTD in unroll(draft, embedded_BTD, aux_BTAD, draft_steps)
    ]
