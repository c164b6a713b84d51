"""The questions that a draft model is judged on, as prompts of token ids."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import numpy as np

from eagle3_tasks.contracts.errors import InvalidInput
from eagle3_tasks.contracts.settings import EvaluationSet, EvaluationSettings
from eagle3_tasks.data.conversations import ConversationReader, Reject
from eagle3_tasks.data.dataset import Dataset
from eagle3_tasks.data.template import ChatTemplate, RenderFailure

logger = logging.getLogger(__name__)

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

    A row that can't be read, or that the target's template refuses, is left out and named
    in the log: the set is first read when the training is over.

    Raises:
        InvalidInput: the file is missing, or no row of it is of use.
    """
    prompts: list[tuple[int, ...]] = []
    num_skipped = 0
    for conversation in ConversationReader(Path(one.path), max_rows=num_rows):
        if isinstance(conversation, Reject):
            num_skipped += 1
            logger.warning(
                "evaluation row skipped set=%s line=%d reason=%s",
                one.name,
                conversation.line,
                conversation.message,
            )
            continue
        turns = [message.role for message in conversation.messages]
        question = conversation.messages[: turns.index("assistant")]
        (text,) = template.render([question], add_generation_prompt=True)
        if isinstance(text, RenderFailure):
            num_skipped += 1
            logger.warning(
                "evaluation row skipped set=%s row=%d id=%s reason=the chat template refuses it: %s",
                one.name, conversation.row, conversation.id, text.message,
            )  # fmt: skip
            continue
        prompts.append(tuple(template.tokenize([text])[0]))
    if not prompts:
        raise InvalidInput(
            f"evaluation set {one.name!r}: {one.path} holds no conversation with an assistant turn that the "
            f"target's chat template takes; {num_skipped} rows were skipped, the log says why. "
            "Give another file or remove the set."
        )
    logger.info("evaluation set read set=%s rows=%d skipped=%d", one.name, len(prompts), num_skipped)
    return QuestionSet(name=one.name, min_accept_length=one.min_accept_length, prompts=tuple(prompts))
