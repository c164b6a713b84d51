"""The draft vocabulary: which target ids the draft model can propose, and the two maps.

``d2t`` holds an offset, target_id = draft_id + d2t[draft_id]; ``t2d`` marks the target ids
that have a draft id. Both as EAGLE-3 checkpoints keep them.

Shapes: V draft vocabulary, W target vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from eagle3_tasks.contracts.errors import DamagedData, InvalidSettings
from eagle3_tasks.data.dataset import Dataset

VOCABULARY_FILE = "vocabulary.safetensors"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """``d2t_V`` int64 offsets in ascending order of target ids, ``t2d_W`` bool."""

    d2t_V: Tensor
    t2d_W: Tensor


def count_trained_tokens(dataset: Dataset, target_vocab_size: int) -> np.ndarray:
    """Count how often each target id stands under the loss mask: int64 [W]."""
    counts_W = np.zeros(target_vocab_size, dtype=np.int64)
    for row in range(dataset.num_samples):
        trained_ids = dataset.token_ids(row)[dataset.loss_mask(row)]
        counts_W += np.bincount(trained_ids, minlength=target_vocab_size)
    return counts_W


def choose_target_ids(counts_W: np.ndarray, size: int, always: Collection[int]) -> np.ndarray:
    """Choose the ``size`` most frequent target ids, ascending; of equal ones the lower id.

    An id of ``always`` (end of turn) that occurs is chosen however rare it is: a draft
    model that can't propose the end guesses wrong at the end of every answer.

    Raises:
        InvalidSettings: fewer ids occur than are asked for.
    """
    num_distinct = int(np.count_nonzero(counts_W))
    if num_distinct < size:
        raise InvalidSettings(
            f"only {num_distinct} distinct tokens occur under the loss mask, but the draft vocabulary needs "
            f"{size}. Extract more shards or set draft_vocab_size to at most {num_distinct}."
        )
    rank_W = counts_W.copy()
    wanted = [one for one in always if one < len(counts_W) and counts_W[one] > 0]
    rank_W[wanted] = np.iinfo(np.int64).max
    # A stable sort of the negated counts keeps equal ones in the order of their ids.
    return np.sort(np.argsort(-rank_W, kind="stable")[:size])


def make_vocabulary(target_ids: np.ndarray, target_vocab_size: int) -> Vocabulary:
    """Turn ascending target ids into the two maps."""
    ids_V = torch.from_numpy(target_ids.astype(np.int64))
    t2d_W = torch.zeros(target_vocab_size, dtype=torch.bool)
    t2d_W[ids_V] = True
    return Vocabulary(d2t_V=ids_V - torch.arange(len(ids_V)), t2d_W=t2d_W)


def read_vocabulary(folder: Path) -> Vocabulary:
    """Read a finished vocabulary back.

    Raises:
        DamagedData: the file is missing, torn, or its two maps don't agree.
    """
    path = folder / VOCABULARY_FILE
    try:
        tensors = load_file(path)
        vocabulary = Vocabulary(d2t_V=tensors["d2t"], t2d_W=tensors["t2d"])
    except (SafetensorError, OSError, KeyError) as error:
        raise DamagedData(
            f"{path}: no vocabulary can be read ({error}). Remove {folder} and run map-vocab again."
        ) from error
    ids_V = vocabulary.d2t_V + torch.arange(len(vocabulary.d2t_V))
    if not torch.equal(ids_V, vocabulary.t2d_W.nonzero().flatten()):
        raise DamagedData(
            f"{path}: d2t and t2d name different target ids. Remove {folder} and run map-vocab again."
        )
    return vocabulary
