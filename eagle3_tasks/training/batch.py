"""One process's share of a step, as tensors.

Shapes: B samples, T tokens of the longest, A auxiliary hidden states, D hidden, P trained
positions of all samples (those under the loss mask, but for each sample's first token).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from eagle3_tasks.contracts.errors import DamagedData
from eagle3_tasks.data.dataset import Dataset
from eagle3_tasks.storage.capture import Capture


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """Padded on the right. What stands at padded places reaches no loss.

    Attributes:
        token_ids_BT: int64.
        aux_hidden_BTAD: in the capture's data type.
        sample_P, position_P: where the trained positions are, in ascending order.
        last_hidden_PD: the target's final states there: all that the teacher needs.
    """

    token_ids_BT: Tensor
    aux_hidden_BTAD: Tensor
    sample_P: Tensor
    position_P: Tensor
    last_hidden_PD: Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainedSample:
    """``loss_mask`` bool [T] beside the tensors of a capture."""

    token_ids_T: Tensor
    loss_mask_T: Tensor
    aux_hidden_TAD: Tensor
    last_hidden_TD: Tensor


def read_sample(dataset: Dataset, capture: Capture, row: int) -> TrainedSample:
    """Join what the dataset and the capture know of a sample, found by its name.

    Raises:
        DamagedData: the capture's token ids are not the dataset's.
    """
    token_ids = np.asarray(dataset.token_ids(row))
    name = dataset.sample(row)
    captured = capture.read(name)
    ids_T = torch.from_numpy(token_ids.astype(np.int64))
    if not torch.equal(captured.token_ids.to(torch.int64), ids_T):
        raise DamagedData(
            f"sample {name} (row {row}): capture and dataset hold different token ids. Run verify again."
        )
    return TrainedSample(
        token_ids_T=ids_T,
        loss_mask_T=torch.from_numpy(np.array(dataset.loss_mask(row), dtype=bool)),
        aux_hidden_TAD=captured.aux_hidden,
        last_hidden_TD=captured.last_hidden,
    )


def collate(samples: Sequence[TrainedSample], *, width: int = 0) -> Batch:
    """Pad samples to the longest, or to ``width`` if that is more."""
    width = max(width, *(len(one.token_ids_T) for one in samples))
    first = samples[0].aux_hidden_TAD
    token_ids_BT = torch.zeros(len(samples), width, dtype=torch.int64)
    aux_hidden_BTAD = torch.zeros(len(samples), width, *first.shape[1:], dtype=first.dtype)
    sample_list: list[Tensor] = []
    position_list: list[Tensor] = []
    last_list: list[Tensor] = []
    for index, one in enumerate(samples):
        length = len(one.token_ids_T)
        token_ids_BT[index, :length] = one.token_ids_T
        aux_hidden_BTAD[index, :length] = one.aux_hidden_TAD
        # The first token is never the input of a draft step: nothing stands before it.
        positions = one.loss_mask_T[1:].nonzero().flatten() + 1
        sample_list.append(torch.full_like(positions, index))
        position_list.append(positions)
        last_list.append(one.last_hidden_TD[positions])
    return Batch(
        token_ids_BT=token_ids_BT,
        aux_hidden_BTAD=aux_hidden_BTAD,
        sample_P=torch.cat(sample_list),
        position_P=torch.cat(position_list),
        last_hidden_PD=torch.cat(last_list),
    )


def to_device(batch: Batch, device: torch.device) -> Batch:
    return Batch(**{field.name: getattr(batch, field.name).to(device) for field in dataclasses.fields(batch)})
