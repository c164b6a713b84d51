"""The plan: every sample once an epoch, equal steps for all ranks, and the schedule of rates."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3_tasks.contracts.settings import TrainingSettings
from eagle3_tasks.training.optimizer import learning_rate_at
from eagle3_tasks.training.plan import make_training_plan

LENGTHS = st.lists(st.integers(2, 60), min_size=1, max_size=40)


@given(LENGTHS, st.integers(1, 4), st.integers(16, 100), st.integers(1, 3))
def test_every_row_is_dealt_once_an_epoch_within_the_budget_of_tokens(
    lengths: list[int], num_ranks: int, batch_tokens: int, epochs: int
) -> None:
    rows = [100 + index for index in range(len(lengths))]
    plan = make_training_plan(
        rows, lengths, epochs=epochs, batch_tokens=batch_tokens, num_ranks=num_ranks, seed=7
    )
    length_of = dict(zip(rows, lengths, strict=True))
    assert sum(plan.steps_per_epoch) == plan.num_steps
    start = 0
    for count in plan.steps_per_epoch:
        steps = plan.steps[start : start + count]
        start += count
        assert sorted(row for step in steps for batch in step for row in batch) == rows
        for step in steps:
            assert len(step) == num_ranks
            assert step[0], "a step without any sample"
            for batch in step:
                padded = len(batch) * max((length_of[row] for row in batch), default=0)
                assert padded <= batch_tokens or len(batch) == 1


def test_the_same_numbers_give_the_same_plan_and_epochs_differ() -> None:
    arguments = {"epochs": 2, "batch_tokens": 64, "num_ranks": 2}
    rows, lengths = list(range(50)), [3 + row % 17 for row in range(50)]
    plan = make_training_plan(rows, lengths, seed=1, **arguments)
    assert plan == make_training_plan(rows, lengths, seed=1, **arguments)
    assert plan != make_training_plan(rows, lengths, seed=2, **arguments)
    half = plan.steps_per_epoch[0]
    assert plan.steps[:half] != plan.steps[half:]


def test_the_rate_climbs_to_its_peak_and_falls_to_nearly_nothing() -> None:
    settings = TrainingSettings(learning_rate=1e-3, warmup_percent=10)
    rates = [learning_rate_at(step, 100, settings) for step in range(100)]
    assert rates[:10] == pytest.approx([1e-4 * (step + 1) for step in range(10)])
    assert max(rates) == pytest.approx(1e-3)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0 < rates[-1] < 1e-6
