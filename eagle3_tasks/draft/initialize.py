"""Fresh weights of a draft model: near the target where that can be, else small noise.

Shapes: D hidden, V draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from eagle3_tasks.draft.config import DraftConfig
from eagle3_tasks.draft.model import DraftModel
from eagle3_tasks.draft.target_weights import TargetWeights, head_rows

WEIGHT_STD = 0.02
FUSION_NOISE_STD = 0.01
"""Of fc beside the identity, so that the two lower states aren't exact zeros to begin with."""


def initialize_draft_model(
    config: DraftConfig, weights: TargetWeights, *, d2t: Tensor, t2d: Tensor, seed: int
) -> DraftModel:
    """Make the draft model that training starts from; equal seeds give equal weights.

    It begins as "the target's late state, read by the target's own head": fc is the identity
    on the last auxiliary state plus noise, norm and head are copies. What training adds is
    the step from this token to the next.
    """
    model = random_draft_model(config, d2t=d2t, t2d=t2d, seed=seed)
    size_D = config.hidden_size
    with torch.no_grad():
        model.fc.weight.mul_(FUSION_NOISE_STD / WEIGHT_STD)
        model.fc.weight[:, -size_D:] += torch.eye(size_D)
        model.norm.weight.copy_(weights.final_norm_D)
        model.lm_head.weight.copy_(head_rows(weights, d2t + torch.arange(config.draft_vocab_size)))
    return model


def random_draft_model(config: DraftConfig, *, d2t: Tensor, t2d: Tensor, seed: int) -> DraftModel:
    """Make a draft model that knows nothing of the target but the ids."""
    generator = torch.Generator().manual_seed(seed)
    model = DraftModel(config)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(std=WEIGHT_STD, generator=generator)
        model.d2t.copy_(d2t)
        model.t2d.copy_(t2d)
    return model
