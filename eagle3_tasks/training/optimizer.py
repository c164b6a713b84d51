"""AdamW on float32 masters, its schedule, and its state by name."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from eagle3_tasks.contracts.settings import TrainingSettings
from eagle3_tasks.draft.model import DraftModel

_BETAS = (0.9, 0.95)
_MOMENTS = ("exp_avg", "exp_avg_sq")


def make_optimizer(model: DraftModel, settings: TrainingSettings) -> torch.optim.AdamW:
    """Make the optimizer; norms' factors don't decay."""
    matrices = [one for one in model.parameters() if one.dim() > 1]
    factors = [one for one in model.parameters() if one.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": factors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=_BETAS, fused=True)
    for parameter in model.parameters():
        # Made now, not in the first step, so that a checkpoint always finds them.
        optimizer.state[parameter] = {
            "step": torch.zeros((), device=parameter.device),
            **{moment: torch.zeros_like(parameter) for moment in _MOMENTS},
        }
    return optimizer


def learning_rate_at(step: int, num_steps: int, settings: TrainingSettings) -> float:
    """Give the rate of ``step``, counted from 0: linear warm-up, then a cosine down to 0."""
    warmup_steps = math.ceil(num_steps * settings.warmup_percent / 100)
    if step < warmup_steps:
        return settings.learning_rate * (step + 1) / warmup_steps
    share = (step - warmup_steps) / max(1, num_steps - warmup_steps)
    return settings.learning_rate * 0.5 * (1 + math.cos(math.pi * share))


def clip_gradients(gradients: Tensor, clip_norm: float) -> float:
    """Scale the flat gradients down to ``clip_norm`` (0: never); give the norm before.

    A norm that is not finite is given back as it is, for the caller to stop.
    """
    norm = float(torch.linalg.vector_norm(gradients))
    if clip_norm and norm > clip_norm and math.isfinite(norm):
        gradients.mul_(clip_norm / norm)
    return norm


def state_tensors(model: DraftModel, optimizer: torch.optim.AdamW) -> dict[str, Tensor]:
    """Name all tensors that training changes: masters and both moments."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        tensors[f"model.{name}"] = parameter.detach()
        for moment in _MOMENTS:
            tensors[f"{moment}.{name}"] = optimizer.state[parameter][moment]
    return tensors


def restore_tensors(
    model: DraftModel, optimizer: torch.optim.AdamW, tensors: Mapping[str, Tensor], step: int
) -> None:
    """Put back what :func:`state_tensors` gave; KeyError names a tensor that is missing."""
    own = state_tensors(model, optimizer)
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
    for parameter in model.parameters():
        optimizer.state[parameter]["step"].fill_(float(step))
