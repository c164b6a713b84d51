"""The loss of a batch, as sums that ranks can add up, and what the draft model got right.

Shapes: B samples, T tokens, D hidden, V draft vocabulary, P trained positions, R those of
them that a step can reach, C some of these, K TTT steps.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from eagle3_tasks.draft.model import DraftModel
from eagle3_tasks.training.batch import Batch
from eagle3_tasks.training.teacher import Answers, Teacher, ask_teacher
from eagle3_tasks.training.unroll import unroll

STEP_DECAY = 0.8
# Above this many positions a step's logits are computed some positions at a time and once more
# in the backward pass: kept for all steps, they would fill the memory.
_POSITIONS_AT_ONCE = 1024


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
        hidden_RD = hidden_BTD[batch.sample_P[index_R], origin_P[index_R]]
        cross_entropy, num_correct = _compare(model, answers, hidden_RD, index_R)
        loss = loss + STEP_DECAY**step * cross_entropy
        correct.append(num_correct)
    return BatchSums(
        loss=loss,
        num_valid=answers.is_inside_P.sum(),
        num_correct_K=torch.stack(correct),
        num_trained_K=torch.stack(trained),
    )


def _compare(
    model: DraftModel, answers: Answers, hidden_RD: Tensor, index_R: Tensor
) -> tuple[Tensor, Tensor]:
    """Sum cross entropies and right first choices over the positions ``index_R`` of the answers."""
    if len(index_R) <= _POSITIONS_AT_ONCE:
        return _compare_at_once(model, answers, hidden_RD, index_R)
    parts = [
        checkpoint(
            _compare_at_once,
            model,
            answers,
            hidden_CD,
            index_C,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        for hidden_CD, index_C in zip(
            hidden_RD.split(_POSITIONS_AT_ONCE), index_R.split(_POSITIONS_AT_ONCE), strict=True
        )
    ]
    cross_entropies, num_correct = zip(*parts, strict=True)
    return torch.stack(cross_entropies).sum(), torch.stack(num_correct).sum()


def _compare_at_once(
    model: DraftModel, answers: Answers, hidden_CD: Tensor, index_C: Tensor
) -> tuple[Tensor, Tensor]:
    logits_CV = model.logits(hidden_CD).float()
    cross_entropy = -(answers.probabilities_PV[index_C] * torch.log_softmax(logits_CV, dim=-1)).sum()
    return cross_entropy, (logits_CV.argmax(dim=-1) == answers.draft_id_P[index_C]).sum()
