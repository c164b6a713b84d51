"""Which samples each process trains on in each step: a pure function of lengths and settings.

Because every process computes the same plan from the same small numbers, nobody sends
rows to anybody, and the position in it is one number: the step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

# Batches are cut from runs of this many samples sorted by length: little padding, and
# still a fresh mixture of samples each epoch.
_SORTED_RUN = 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """``steps[step][rank]`` holds dataset rows; an empty tuple means: nothing for this rank."""

    steps: tuple[tuple[tuple[int, ...], ...], ...]
    steps_per_epoch: tuple[int, ...]

    @property
    def num_steps(self) -> int:
        return len(self.steps)


def make_training_plan(
    rows: Sequence[int],
    lengths: Sequence[int],
    *,
    epochs: int,
    batch_tokens: int,
    num_ranks: int,
    seed: int,
) -> TrainingPlan:
    """Deal every row once an epoch, in batches of at most ``batch_tokens`` padded tokens.

    A sample that is longer than that is a batch by itself. A step has one batch a rank; the
    last of an epoch is filled up with empty ones, so all ranks always take equally many
    steps and none waits for another at the end. ``lengths`` are the tokens of ``rows``.
    """
    steps: list[tuple[tuple[int, ...], ...]] = []
    steps_per_epoch: list[int] = []
    row_array, length_array = np.asarray(rows, dtype=np.int64), np.asarray(lengths, dtype=np.int64)
    for epoch in range(epochs):
        chance = np.random.default_rng([seed, epoch])
        order = chance.permutation(len(row_array))
        batches: list[tuple[int, ...]] = []
        for start in range(0, len(order), _SORTED_RUN):
            run = order[start : start + _SORTED_RUN]
            run = run[np.argsort(length_array[run], kind="stable")]
            batches += _cut(row_array[run], length_array[run], batch_tokens)
        # Neighbours are of similar size, so ranks get similar work; the steps are then mixed.
        groups = [batches[start : start + num_ranks] for start in range(0, len(batches), num_ranks)]
        for index in chance.permutation(len(groups)):
            group = groups[index]
            steps.append(tuple(group + [()] * (num_ranks - len(group))))
        steps_per_epoch.append(len(groups))
    return TrainingPlan(steps=tuple(steps), steps_per_epoch=tuple(steps_per_epoch))


def _cut(rows: np.ndarray, lengths: np.ndarray, batch_tokens: int) -> list[tuple[int, ...]]:
    """Cut rows in ascending order of length into batches; the last one is the longest."""
    batches: list[tuple[int, ...]] = []
    batch: list[int] = []
    for row, length in zip(rows.tolist(), lengths.tolist(), strict=True):
        if batch and (len(batch) + 1) * length > batch_tokens:
            batches.append(tuple(batch))
            batch = []
        batch.append(row)
    if batch:
        batches.append(tuple(batch))
    return batches
