"""What may be committed, and what is refused with which reason."""

from __future__ import annotations

import pytest
import torch

from eagle3_tasks.storage.guards import find_fault
from eagle3_tasks.storage.sample import CapturedSample
from tests.host.shard_folder import HIDDEN, make_sample

HOLES = torch.eye(5, HIDDEN, dtype=torch.bool)
WITHOUT_MIDDLE = torch.tensor([1, 0, 1])[:, None].bfloat16()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda s: {"aux_hidden": s.aux_hidden[:-1]}, "aux_hidden has 4 rows for 5 tokens"),
        (lambda s: {"last_hidden": s.last_hidden[:2]}, "last_hidden has 2 rows for 5 tokens"),
        (lambda s: {"last_hidden": s.last_hidden.float()}, "the capture is torch.bfloat16"),
        (lambda s: {"aux_hidden": s.aux_hidden[:, :2]}, "has the shape"),
        (lambda s: {"last_hidden": s.last_hidden[:, :4]}, "has the shape"),
        (lambda s: {"token_ids": s.token_ids + 1}, "other token ids"),
        (lambda s: {"aux_hidden": s.aux_hidden * WITHOUT_MIDDLE}, "state 1 is zero"),
        (lambda s: {"last_hidden": s.last_hidden.masked_fill(HOLES, float("nan"))}, "not finite at 5 of 5"),
        (
            lambda s: {"aux_hidden": s.aux_hidden.index_fill(0, torch.tensor(3), -torch.inf)},
            "not finite at 1 of 5",
        ),
    ],
)
def test_a_sample_that_is_not_as_it_must_be_is_refused_with_the_reason(change, reason: str):
    sample = make_sample("2".zfill(32))
    ids = sample.token_ids.tolist()
    assert find_fault(sample, token_ids=ids, hidden_size=HIDDEN, dtype=torch.bfloat16) is None
    fields = {
        "token_ids": sample.token_ids,
        "aux_hidden": sample.aux_hidden,
        "last_hidden": sample.last_hidden,
    }
    spoiled = CapturedSample(**{**fields, **change(sample)})
    assert reason in str(find_fault(spoiled, token_ids=ids, hidden_size=HIDDEN, dtype=torch.bfloat16))
