"""The loss of a batch, as sums that ranks can add up, and what the draft model got right.

Shapes: B samples, T tokens, D hidden, V draft vocabulary, P trained positions, R those of
them that a step can reach, K TTT steps.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.nn import functional

from eagle3_tasks.draft.model import DraftModel
from eagle3_tasks.training.batch import Batch
from eagle3_tasks.training.teacher import Teacher, ask_teacher
from eagle3_tasks.training.unroll import unroll

STEP_DECAY = 0.8


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchSums:
    """Sums over a batch's positions; divided by counts of all ranks they become means.

    Attributes:
        loss: scalar with a gradient: over steps k, 0.8^k times the cross entropies' sum.
        num_valid: positions that count for the loss at step 0.
        num_correct_K: where the draft model's first choice was the target's.
        num_trained_K: positions under the loss mask, outside the draft vocabulary as well.
    """

    loss: Tensor
    num_valid: Tensor
    num_correct_K: Tensor
    num_trained_K: Tensor


def compute_sums(model: DraftModel, teacher: Teacher, batch: Batch, ttt_steps: int) -> BatchSums:
    """Unroll the draft model on a batch and compare it with the target.

    Position t takes part in step k if the target wrote token t + 1 + k, the newest that the
    draft model has seen: that is when serving asks it. The teacher is the target's
    distribution after that token, within the draft vocabulary. Where the target's first
    choice lies outside it, no draft could be right and the position is left out.
    """
    answers = ask_teacher(teacher, model, batch.last_hidden_PD)
    embedded_BTD = functional.embedding(batch.token_ids_BT, teacher.embedding_WD).to(torch.float32)
    aux_hidden_BTAD = batch.aux_hidden_BTAD.to(torch.float32)
    loss = embedded_BTD.new_zeros(())
    correct: list[Tensor] = []
    trained: list[Tensor] = []
    for step, hidden_BTD in enumerate(unroll(model, embedded_BTD, aux_hidden_BTAD, ttt_steps)):
        # Token t + 1 + k of a trained position stands at position_P, hence t:
        origin_P = batch.position_P - 1 - step
        index_R = (origin_P >= 0).nonzero().flatten()
        trained.append(origin_P.new_tensor(len(index_R)))
        index_R = index_R[answers.is_inside_P[index_R]]
        logits_RV = model.logits(hidden_BTD[batch.sample_P[index_R], origin_P[index_R]]).float()
        log_probabilities_RV = torch.log_softmax(logits_RV, dim=-1)
        cross_entropy = -(answers.probabilities_PV[index_R] * log_probabilities_RV).sum()
        loss = loss + STEP_DECAY**step * cross_entropy
        correct.append((logits_RV.argmax(dim=-1) == answers.draft_id_P[index_R]).sum())
    return BatchSums(
        loss=loss,
        num_valid=answers.is_inside_P.sum(),
        num_correct_K=torch.stack(correct),
        num_trained_K=torch.stack(trained),
    )
