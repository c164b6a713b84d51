"""The questions that a draft model is judged on, as prompts of token ids."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from eagle3_tasks.contracts.errors import InvalidInput
from eagle3_tasks.contracts.settings import EvaluationSet, EvaluationSettings
from eagle3_tasks.data.conversations import Conversation, ConversationReader
from eagle3_tasks.data.dataset import Dataset
from eagle3_tasks.data.template import ChatTemplate

TRAINING_SET = "training"
# Any fixed number: the same questions whatever the training's seed.
_CHOICE_SEED = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuestionSet:
    """Prompts, each ending where the assistant's first turn begins."""

    name: str
    min_accept_length: float | None
    prompts: tuple[tuple[int, ...], ...]


def training_questions(dataset: Dataset, settings: EvaluationSettings) -> QuestionSet:
    """Take a fixed random choice of the run's own samples, up to their first trained token."""
    chance = np.random.default_rng(_CHOICE_SEED)
    rows = np.sort(chance.permutation(dataset.num_samples)[: settings.evaluation_rows])
    prompts: list[tuple[int, ...]] = []
    for row in rows.tolist():
        first_trained = int(np.flatnonzero(dataset.loss_mask(row))[0])
        if first_trained > 0:
            prompts.append(tuple(dataset.token_ids(row)[:first_trained].tolist()))
    return QuestionSet(
        name=TRAINING_SET, min_accept_length=settings.min_accept_length, prompts=tuple(prompts)
    )


def held_out_questions(one: EvaluationSet, template: ChatTemplate, num_rows: int) -> QuestionSet:
    """Read a set's first ``num_rows`` conversations and render what precedes their first answer.

    Raises:
        InvalidInput: the file is missing or holds no conversation.
    """
    prompts: list[tuple[int, ...]] = []
    for conversation in ConversationReader(Path(one.path), max_rows=num_rows):
        if isinstance(conversation, Conversation):
            turns = [message.role for message in conversation.messages]
            question = conversation.messages[: turns.index("assistant")]
            prompts.append(tuple(template.prompt_ids(question)))
    if not prompts:
        raise InvalidInput(
            f"evaluation set {one.name!r}: {one.path} holds no conversation with an assistant turn. "
            "Give another file or remove the set."
        )
    return QuestionSet(name=one.name, min_accept_length=one.min_accept_length, prompts=tuple(prompts))
