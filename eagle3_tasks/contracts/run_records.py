"""What a run's folder says about it: the names of its datasets, captures and models.

Each record is one small JSON file in ``ROOT/runs/RUN/``, written atomically by the
stage that owns it. A stage that runs again overwrites it with an equal one.
"""

from __future__ import annotations

import dataclasses

from eagle3_tasks.contracts.rows import RowRange


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConversationsRecord:
    """``conversations.json``: the source read into ``ROOT/conversations/DIGEST/``."""

    conversations: str
    num_rows: int
    num_rejects: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class DatasetRecord:
    """``dataset.json``: the samples in ``ROOT/datasets/DIGEST/``."""

    dataset: str
    num_samples: int
    num_tokens: int
    num_trained_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanRecord:
    """``plan.json``: everything resolved and pinned before the first GPU hour.

    ``shards`` cover the dataset's samples in row order. ``forecast_bytes`` is what the
    capture will hold in all, ``missing_bytes`` what was not yet committed at planning.
    """

    dataset: str
    capture: str
    num_samples: int
    num_tokens: int
    distinct_trained_tokens: int
    shards: tuple[RowRange, ...]
    aux_layer_ids: tuple[int, ...]
    hidden_size: int
    num_layers: int
    target_vocab_size: int
    capture_dtype: str
    bytes_per_token: int
    forecast_bytes: int
    missing_bytes: int
    release: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class VocabularyRecord:
    """``vocabulary.json``: d2t and t2d in ``ROOT/vocabularies/DIGEST/``."""

    vocabulary: str
    draft_vocab_size: int
    covered_percent: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingRecord:
    """``training.json``: checkpoints in ``ROOT/training/DIGEST/``."""

    training: str
    num_steps: int
    final_loss: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """Accept length on one set: simulated by joint prefix, and by the real loop."""

    name: str
    num_rows: int
    num_rounds: int
    untrained_accept_length: float
    simulated_accept_length: float
    looped_accept_length: float
    acceptance: tuple[float, ...]
    is_identical_to_greedy: bool
    min_accept_length: float | None
    passed: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationRecord:
    """``evaluation.json``."""

    training: str
    results: tuple[EvaluationResult, ...]
    passed: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftModelRecord:
    """``draft_model.json``: the published ``ROOT/draft_models/DIGEST/``."""

    draft_model: str
    training: str
