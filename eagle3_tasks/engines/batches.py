"""Cutting sequences of unequal length into padded batches."""

from __future__ import annotations

from collections.abc import Sequence


def batches_by_length(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Group indices of sequences so that no batch pads to more than ``batch_tokens``.

    Longest first: a batch that doesn't fit into memory shows at once, and the estimated
    time of the rest errs on the safe side. A sequence longer than ``batch_tokens`` makes
    a batch of its own.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    batches: list[list[int]] = []
    for index in order:
        # The first of a batch is its longest, so it sets the width of all.
        if batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= batch_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches
