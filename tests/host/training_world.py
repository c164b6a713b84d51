"""A tiny target with a dataset and its captured states, and slow ways to check fast ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from eagle3_tasks.contracts.rows import RowRange
from eagle3_tasks.contracts.run_records import PlanRecord
from eagle3_tasks.contracts.settings import Settings
from eagle3_tasks.data.dataset import Dataset
from eagle3_tasks.engines.huggingface import HuggingFaceEngine
from eagle3_tasks.host.files import make_private_folder
from eagle3_tasks.host.stage_context import StageContext
from eagle3_tasks.storage.writer import ShardWriter
from eagle3_tasks.vocab.mapping import Vocabulary, make_vocabulary
from tests.host.tiny_target import (
    AUX_LAYER_IDS,
    HIDDEN_SIZE,
    NUM_LAYERS,
    VOCAB_SIZE,
    make_context,
    make_dataset,
    make_target,
)
from tests.host.tiny_target import make_settings as make_target_settings

DATASET = "d" * 24
CAPTURE = "c" * 24
DRAFT_VOCAB_SIZE = 48


def make_settings(root: Path, target: Path, **changes: Any) -> Settings:
    values: dict[str, Any] = {
        "draft_vocab_size": DRAFT_VOCAB_SIZE,
        "training_processes": 2,
        "epochs": 4,
        "ttt_steps": 3,
        "batch_tokens": 64,
        "learning_rate": 3e-3,
        "evaluation_rows": 4,
        "evaluation_max_tokens": 12,
        "min_accept_length": 0.0,
    }
    return make_target_settings(root, target, **{**values, **changes})


def make_world(folder: Path, *, num_rows: int = 24, **changes: Any) -> StageContext:
    """Save a target and a dataset, capture the dataset's states, and record the plan."""
    target = make_target(folder / "target")
    context = make_context(make_settings(folder / "root", target, **changes))
    chance = np.random.default_rng(3)
    lengths = chance.integers(6, 30, size=num_rows).tolist()
    rows = [chance.integers(7, VOCAB_SIZE, size=length).tolist() for length in lengths]
    make_dataset(context, [[*row, 2] for row in rows], digest=DATASET)
    dataset = Dataset(context.layout.dataset(DATASET))
    capture_samples(context, dataset)
    context.write_record(plan_record_of(num_samples=dataset.num_samples, num_tokens=dataset.num_tokens))
    return context


def capture_samples(context: StageContext, dataset: Dataset) -> None:
    """Capture every sample in one shard."""
    engine = HuggingFaceEngine.load(context.settings)
    shard = make_private_folder(context.layout.capture(CAPTURE) / "rows_000000-001000")
    with ShardWriter(shard, segment_bytes=1 << 24) as writer:
        for row in range(dataset.num_samples):
            (captured,) = engine.capture([dataset.token_ids(row).tolist()])
            writer.append(dataset.sample(row), captured)


def plan_record_of(*, num_samples: int, num_tokens: int) -> PlanRecord:
    return PlanRecord(
        dataset=DATASET, capture=CAPTURE, num_samples=num_samples, num_tokens=num_tokens,
        distinct_trained_tokens=DRAFT_VOCAB_SIZE, shards=(RowRange(start=0, stop=num_samples),),
        aux_layer_ids=AUX_LAYER_IDS, hidden_size=HIDDEN_SIZE, num_layers=NUM_LAYERS,
        target_vocab_size=VOCAB_SIZE, capture_dtype="float32", bytes_per_token=0, forecast_bytes=0,
        missing_bytes=0, release="",
    )  # fmt: skip


def some_vocabulary(size: int = DRAFT_VOCAB_SIZE) -> Vocabulary:
    """Every second id from 1 on, with the end token."""
    chance = np.random.default_rng(5)
    others = chance.permutation(np.delete(np.arange(VOCAB_SIZE), 2))[: size - 1]
    return make_vocabulary(np.sort(np.array([2, *others])), VOCAB_SIZE)
