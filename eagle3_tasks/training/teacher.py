"""What the target would say at each trained position, in the draft vocabulary.

Shapes: P trained positions, D hidden, V draft vocabulary, W target vocabulary.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from eagle3_tasks.contracts.errors import DamagedData
from eagle3_tasks.draft.model import DraftModel
from eagle3_tasks.draft.target_weights import TargetWeights

_HEAD_ROWS_AT_ONCE = 16_384


@dataclasses.dataclass(frozen=True, kw_only=True)
class Teacher:
    """The frozen part of the target that training needs, on the training device.

    ``draft_head_VD`` is the head's rows of the draft vocabulary in float32.
    """

    embedding_WD: Tensor
    head_WD: Tensor
    draft_head_VD: Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answers:
    """The target's distribution over the draft vocabulary, and its first choice.

    Attributes:
        probabilities_PV: softmax over the draft vocabulary alone, float32.
        draft_id_P: draft id of the target's first choice; meaningless where not inside.
        is_inside_P: whether the first choice of the whole target vocabulary has a draft id.
    """

    probabilities_PV: Tensor
    draft_id_P: Tensor
    is_inside_P: Tensor


def make_teacher(weights: TargetWeights, model: DraftModel, device: torch.device) -> Teacher:
    """Copy embedding and head to ``device``; on the CPU both stay memory-mapped."""
    ids_V = model.d2t.cpu() + torch.arange(len(model.d2t))
    return Teacher(
        embedding_WD=weights.embedding_WD.to(device),
        head_WD=weights.head_WD.to(device),
        draft_head_VD=weights.head_WD[ids_V].to(device=device, dtype=torch.float32),
    )


@torch.no_grad()
def ask_teacher(teacher: Teacher, model: DraftModel, last_hidden_PD: Tensor) -> Answers:
    """Compute the target's answers once for all TTT steps, in float32.

    Raises:
        DamagedData: a state is not finite; its answer would silently count as outside.
    """
    hidden_PD = last_hidden_PD.float()
    if not bool(torch.isfinite(hidden_PD).all()):
        raise DamagedData("a captured last hidden state is not finite. Clear verify, then extract.")
    with torch.autocast(hidden_PD.device.type, enabled=False):
        first_choice_P = _first_choice(teacher.head_WD, hidden_PD, len(model.t2d))
        logits_PV = hidden_PD @ teacher.draft_head_VD.T
    # The number of draft ids below a target id is its own draft id.
    draft_id_P = (model.t2d.cumsum(0) - 1).clamp(min=0)[first_choice_P]
    return Answers(
        probabilities_PV=torch.softmax(logits_PV, dim=-1),
        draft_id_P=draft_id_P,
        is_inside_P=model.t2d[first_choice_P],
    )


def _first_choice(head_WD: Tensor, hidden_PD: Tensor, vocab_size: int) -> Tensor:
    """Argmax over the whole vocabulary, some rows of the head at a time.

    So memory doesn't grow with the target's vocabulary. Rows from ``vocab_size`` on are
    padding of the weight and no tokens.
    """
    best_P = torch.full(hidden_PD.shape[:1], -torch.inf, device=hidden_PD.device)
    choice_P = torch.zeros(hidden_PD.shape[:1], dtype=torch.int64, device=hidden_PD.device)
    for start in range(0, vocab_size, _HEAD_ROWS_AT_ONCE):
        rows = head_WD[start : min(start + _HEAD_ROWS_AT_ONCE, vocab_size)].float()
        value_P, index_P = (hidden_PD @ rows.T).max(dim=-1)
        is_better_P = value_P > best_P
        best_P = torch.where(is_better_P, value_P, best_P)
        choice_P = torch.where(is_better_P, index_P + start, choice_P)
    return choice_P
