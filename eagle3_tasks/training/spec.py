"""What ``train`` hands to its processes, by a file: names, settings, and where to begin."""

from __future__ import annotations

import dataclasses

from eagle3_tasks.contracts.settings import Settings

SPEC_FILE = "spec.json"
PROGRESS_FILE = "progress.json"
HISTORY_FILE = "history.jsonl"
CHECKPOINTS_FOLDER = "checkpoints"
ERRORS_FOLDER = "errors"

TRAINING_VERSION = 2
"""Raised when a change of the code gives other weights from equal inputs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingSpec:
    """``spec.json`` in the training's folder; the names lead to folders under ROOT.

    ``resume_step`` is the checkpoint to continue from, 0 for none: decided once, so that
    all ranks begin at the same one. ``plan_digest`` names the plan that every rank has to
    arrive at by itself.
    """

    version: int = TRAINING_VERSION
    training: str
    dataset: str
    capture: str
    vocabulary: str
    num_ranks: int
    resume_step: int
    plan_digest: str
    settings: Settings


@dataclasses.dataclass(frozen=True, kw_only=True)
class HistoryEntry:
    """One line of ``history.jsonl``: means over the steps since the line before."""

    step: int
    loss: float
    acceptance: tuple[float, ...]
    learning_rate: float
    gradient_norm: float
    trained_tokens: int
