"""What a sample must be before it may be committed.

Shapes: T tokens, A auxiliary states (3), D hidden size of the target.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from eagle3_tasks.storage.sample import NUM_AUX_STATES, CapturedSample


def find_fault(
    sample: CapturedSample, *, token_ids: Sequence[int], hidden_size: int, dtype: torch.dtype
) -> str | None:
    """Say in words what is wrong with a captured sample; None if it may be committed.

    Args:
        sample: what the engine gave.
        token_ids: what the engine was asked for.
        hidden_size: the target's, D.
        dtype: the capture's.
    """
    num_tokens = len(token_ids)
    states = {"aux_hidden": sample.aux_hidden, "last_hidden": sample.last_hidden}
    for name, tensor in states.items():
        if tensor.shape[0] != num_tokens:
            return f"{name} has {tensor.shape[0]} rows for {num_tokens} tokens"
        if tensor.dtype != dtype:
            return f"{name} is {tensor.dtype}, the capture is {dtype}"
    if tuple(sample.aux_hidden.shape[1:]) != (NUM_AUX_STATES, hidden_size):
        return f"aux_hidden has the shape {tuple(sample.aux_hidden.shape)} for width {hidden_size}"
    if tuple(sample.last_hidden.shape[1:]) != (hidden_size,):
        return f"last_hidden has the shape {tuple(sample.last_hidden.shape)} for width {hidden_size}"
    if sample.token_ids.dtype != torch.int32 or sample.token_ids.tolist() != list(token_ids):
        return "the engine gave other token ids back than it was asked for"
    for index in range(NUM_AUX_STATES):
        fault = _value_fault(f"aux_hidden state {index}", sample.aux_hidden[:, index])
        if fault is not None:
            return fault
    return _value_fault("last_hidden", sample.last_hidden)


def _value_fault(name: str, state_TD: torch.Tensor) -> str | None:
    # One pass and no second tensor: NaN and infinity show in the extremes.
    lowest, highest = (float(value) for value in torch.aminmax(state_TD))
    if not (abs(lowest) < float("inf") and abs(highest) < float("inf")):
        bad = int((~torch.isfinite(state_TD)).any(dim=1).sum())
        return f"{name} is not finite at {bad} of {state_TD.shape[0]} tokens"
    if lowest == 0 and highest == 0:
        return f"{name} is zero everywhere"
    return None
