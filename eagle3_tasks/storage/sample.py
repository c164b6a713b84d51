"""One sample as an engine hands it over and as a capture gives it back.

Shapes: T tokens, A auxiliary states (3), D hidden size of the target.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

NUM_AUX_STATES = 3
TENSORS = ("token_ids", "aux_hidden", "last_hidden")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CapturedSample:
    """The hidden states of one sample, in the stored data type.

    Attributes:
        token_ids: int32 [T].
        aux_hidden: [T, A, D], the output of the chosen decoder layers, low to high.
        last_hidden: [T, D], after the target's final norm.
    """

    token_ids: torch.Tensor
    aux_hidden: torch.Tensor
    last_hidden: torch.Tensor


def bytes_per_token(hidden_size: int, itemsize: int) -> int:
    """Count the tensor bytes that one token takes: its states and its id."""
    return (NUM_AUX_STATES + 1) * hidden_size * itemsize + 4
