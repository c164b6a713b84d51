"""The draft vocabulary: which ids it takes, its two maps, and the stage that writes it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from eagle3_tasks.contracts.errors import DamagedData, InvalidSettings
from eagle3_tasks.contracts.run_records import VocabularyRecord
from eagle3_tasks.vocab.mapping import VOCABULARY_FILE, choose_target_ids, make_vocabulary, read_vocabulary
from eagle3_tasks.vocab.stage import run_map_vocab
from tests.host.training_world import make_world


@given(st.lists(st.integers(0, 5), min_size=4, max_size=40), st.data())
def test_the_most_frequent_ids_are_chosen_and_of_equal_ones_the_lower(
    counts: list[int], data: st.DataObject
) -> None:
    num_distinct = sum(count > 0 for count in counts)
    if num_distinct == 0:
        return
    size = data.draw(st.integers(1, num_distinct))
    chosen = choose_target_ids(np.array(counts), size, always=()).tolist()
    by_hand = sorted(range(len(counts)), key=lambda one: (-counts[one], one))[:size]
    assert chosen == sorted(by_hand)


@given(st.sets(st.integers(0, 59), min_size=1))
def test_both_maps_name_the_same_target_ids(ids: set[int]) -> None:
    vocabulary = make_vocabulary(np.array(sorted(ids)), 60)
    assert (vocabulary.d2t_V + torch.arange(len(ids))).tolist() == sorted(ids)
    assert vocabulary.t2d_W.nonzero().flatten().tolist() == sorted(ids)


def test_an_end_of_turn_id_is_chosen_however_rare_it_is_but_only_if_it_occurs() -> None:
    counts = np.array([0, 1, 9, 9, 9, 0])
    assert choose_target_ids(counts, 2, always=(1, 5)).tolist() == [1, 2]


def test_too_few_distinct_tokens_are_refused_with_both_numbers_and_a_remedy() -> None:
    with pytest.raises(InvalidSettings, match=r"only 2 distinct tokens .* needs 3\. .* at most 2\."):
        choose_target_ids(np.array([0, 4, 1, 0]), 3, always=())


def test_the_stage_counts_only_trained_tokens_and_ends_at_once_the_second_time(tmp_path: Path) -> None:
    context = make_world(tmp_path, draft_vocab_size=20)
    first = run_map_vocab(context)
    folder = context.layout.vocabulary(first["vocabulary"])
    written_at = (folder / VOCABULARY_FILE).stat().st_mtime_ns
    second = run_map_vocab(context)
    assert (first["is_reused"], second["is_reused"]) == (False, True)
    assert (folder / VOCABULARY_FILE).stat().st_mtime_ns == written_at
    vocabulary = read_vocabulary(folder)
    # Every row ends with the end token, under the mask.
    assert vocabulary.t2d_W[2]
    assert int(vocabulary.t2d_W.sum()) == 20
    assert context.read_record(VocabularyRecord).covered_percent == second["covered_percent"]
    assert 0 < second["covered_percent"] < 100


def test_maps_that_contradict_each_other_are_not_read(tmp_path: Path) -> None:
    vocabulary = make_vocabulary(np.array([1, 5]), 8)
    wrong = vocabulary.t2d_W.clone()
    wrong[[1, 2]] = wrong[[2, 1]]
    save_file({"d2t": vocabulary.d2t_V, "t2d": wrong}, tmp_path / VOCABULARY_FILE)
    with pytest.raises(DamagedData, match="different target ids"):
        read_vocabulary(tmp_path)
