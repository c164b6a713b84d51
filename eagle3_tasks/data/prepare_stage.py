"""Stage ``prepare-data``: conversations, or the target's answers to them, to ``ROOT/datasets/DIGEST/``.

Rejects beyond ``max_reject_percent`` fail the run, with one exception: regenerated answers that
reached ``answer_max_tokens``. That setting says they are dropped; they are counted, and the
run fails only if nothing else is left.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from eagle3_tasks.contracts import codec
from eagle3_tasks.contracts.digests import digest_of
from eagle3_tasks.contracts.errors import DamagedData, InvalidInput
from eagle3_tasks.contracts.rows import split_rows
from eagle3_tasks.contracts.run_records import ConversationsRecord, DatasetRecord
from eagle3_tasks.contracts.settings import Settings
from eagle3_tasks.data.answered_samples import ANSWER_TOO_LONG, answered_sample
from eagle3_tasks.data.answers_folder import AnswersFolder, answers_digest
from eagle3_tasks.data.conversations import Conversation
from eagle3_tasks.data.conversations_folder import ConversationsFolder
from eagle3_tasks.data.dataset import REJECTS_FILE, STATISTICS_FILE, DatasetWriter, sample_name
from eagle3_tasks.data.masks import MaskedSample, Unusable, mask_conversations
from eagle3_tasks.data.progress import ProgressClock
from eagle3_tasks.data.template import ChatTemplate
from eagle3_tasks.data.tokenizer_files import tokenizer_fingerprint
from eagle3_tasks.host.files import read_json, write_json
from eagle3_tasks.host.sealed_folder import building, check_sealed
from eagle3_tasks.host.stage_context import StageContext

logger = logging.getLogger(__name__)

STAGE = "prepare-data"
# 2: what a template puts before an answer is no longer under the loss mask.
DATASET_FORMAT = 2
_BATCH_ROWS = 256
_ROWS_WITHOUT_HOPE = 1000
"""If so many conversations at the start give no sample, the rest won't either."""
_EXAMPLES = 10
_EXAMPLE_CHARACTERS = 400
_REJECTS_NAMED = 3
_PERCENTILES = (0, 5, 25, 50, 75, 95, 99, 100)

Result = tuple[Conversation, MaskedSample | Unusable]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """One of the first samples: its text under the loss mask, answer by answer."""

    row: int
    sample: str
    trained: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DatasetStatistics:
    """``statistics.json``: counts, percentiles of the samples' lengths, and a few examples."""

    num_rows: int
    num_samples: int
    num_tokens: int
    num_trained_tokens: int
    num_distinct_trained_tokens: int
    num_rejects: int
    num_duplicates: int
    num_truncated: int
    num_untrained_turns: int
    num_boundary_merges: int
    mask_source: str
    reasons: dict[str, int]
    length_percentiles: dict[str, int]
    examples: tuple[Example, ...]


def run_prepare_data(context: StageContext) -> dict[str, Any]:
    """Make the dataset once; a finished one ends this in seconds.

    Raises:
        InvalidInput: the tokenizer or its template can't be used, no conversation gives a
            sample, or more are rejected than ``max_reject_percent``.
    """
    settings = context.settings
    record = context.read_record(ConversationsRecord)
    conversations = ConversationsFolder(context.layout.conversations(record.conversations))
    answers = _answers_folder(context, record.conversations)
    digest = dataset_digest(settings, record.conversations, answers)
    path = context.layout.dataset(digest)
    with building(path) as folder:
        if folder is not None:
            _build(context, folder, conversations, answers, digest)
        else:
            logger.info("dataset is there already digest=%s", digest)
    check_sealed(path)
    statistics = read_json(DatasetStatistics, path / STATISTICS_FILE)
    if statistics is None:
        raise DamagedData(f"{path / STATISTICS_FILE} is missing. Run prepare-data again.")
    for example in statistics.examples:
        logger.info(
            "trained text row=%d sample=%s text=%r", example.row, example.sample, list(example.trained)
        )
    _judge(path, statistics, settings.data.max_reject_percent)
    context.write_record(
        DatasetRecord(
            dataset=digest,
            num_samples=statistics.num_samples,
            num_tokens=statistics.num_tokens,
            num_trained_tokens=statistics.num_trained_tokens,
        )
    )
    return {"dataset": digest, **codec.to_plain(statistics)}


def dataset_digest(settings: Settings, conversations_digest: str, answers: AnswersFolder | None) -> str:
    """Name the dataset by what determines it. The template is one of the tokenizer's files."""
    data = settings.data
    source = (
        {"conversations": conversations_digest, "loss_mask": data.loss_mask}
        if answers is None
        # Answers may still have come in since the last time: the name must tell.
        else {"answers": answers.path.name, "committed": answers.fingerprint()}
    )
    return digest_of(
        {
            "format": DATASET_FORMAT,
            **source,
            "tokenizer": tokenizer_fingerprint(settings),
            "max_tokens": data.max_tokens,
            "template_date": data.template_date,
        }
    )


def _answers_folder(context: StageContext, conversations_digest: str) -> AnswersFolder | None:
    if context.settings.data.answers == "dataset":
        return None
    from eagle3_tasks.engines.target_folder import target_fingerprint

    digest = answers_digest(context.settings, conversations_digest, target_fingerprint(context.settings))
    return AnswersFolder(context.layout.conversations(digest))


def _build(
    context: StageContext,
    folder: Path,
    conversations: ConversationsFolder,
    answers: AnswersFolder | None,
    digest: str,
) -> None:
    settings = context.settings
    template = ChatTemplate.load(settings)
    counts: collections.Counter[str] = collections.Counter()
    if answers is None:
        use_marks = _use_marks(settings, template)
        mask_source = "generation_tags" if use_marks else "rendered_prompts"
        results = _dataset_results(settings, template, conversations, use_marks=use_marks, counts=counts)
    else:
        mask_source = "regenerated_answers"
        results = _regenerated_results(settings, template, conversations, answers, counts)
    clock = ProgressClock(context, stage=STAGE, unit="rows", total=conversations.num_rows)
    statistics = write_dataset(folder, results, template, clock, counts, mask_source=mask_source)
    seconds = max(clock.seconds(), 1e-3)
    logger.info(
        "dataset written digest=%s rows=%d samples=%d rejects=%d duplicates=%d tokens=%d trained_tokens=%d "
        "distinct_trained_tokens=%d mask_source=%s untrained_turns=%d boundary_merges=%d truncated=%d "
        "seconds=%.1f rows_per_second=%.0f",
        digest,
        statistics.num_rows,
        statistics.num_samples,
        statistics.num_rejects,
        statistics.num_duplicates,
        statistics.num_tokens,
        statistics.num_trained_tokens,
        statistics.num_distinct_trained_tokens,
        mask_source,
        statistics.num_untrained_turns,
        statistics.num_boundary_merges,
        statistics.num_truncated,
        seconds,
        statistics.num_rows / seconds,
    )


def write_dataset(
    folder: Path,
    results: Iterator[Result],
    template: ChatTemplate,
    clock: ProgressClock,
    counts: collections.Counter[str],
    *,
    mask_source: str,
) -> DatasetStatistics:
    """Write samples and rejects as they come.

    Raises:
        InvalidInput: no sample at all; found out early where the first thousand give none.
    """
    reasons: collections.Counter[str] = collections.Counter()
    first_rejects: list[str] = []
    examples: list[Example] = []
    num_rows = 0
    with DatasetWriter(folder) as writer, (folder / REJECTS_FILE).open("w", encoding="utf-8") as rejects:
        for conversation, result in results:
            num_rows += 1
            if isinstance(result, Unusable):
                reasons[result.reason] += 1
                line = {"row": conversation.row, "id": conversation.id, **dataclasses.asdict(result)}
                rejects.write(json.dumps(line) + "\n")
                if len(first_rejects) < _REJECTS_NAMED:
                    first_rejects.append(f"Row {conversation.row} ({result.reason}): {result.message}")
                if num_rows == _ROWS_WITHOUT_HOPE and not writer.num_samples:
                    break
            elif writer.add(result.token_ids, result.loss_mask) and len(examples) < _EXAMPLES:
                examples.append(_example(template, writer.num_samples - 1, result))
            clock.update(num_rows, samples=writer.num_samples)
        if not writer.num_samples:
            raise InvalidInput(
                f"none of {num_rows} conversations gives a sample to train on with the chat template of "
                f"{template.name}. {' '.join(first_rejects)} Correct the conversations, the template or "
                "max_tokens, or let the target answer (answers: regenerate)."
            )
        writer.finish()
    percentiles = np.percentile(writer.lengths(), _PERCENTILES, method="nearest")
    statistics = DatasetStatistics(
        num_rows=num_rows,
        num_samples=writer.num_samples,
        num_tokens=writer.offsets[-1],
        num_trained_tokens=writer.num_trained_tokens,
        num_distinct_trained_tokens=writer.num_distinct_trained_tokens,
        num_rejects=reasons.total(),
        num_duplicates=writer.num_duplicates,
        num_truncated=counts["truncated"],
        num_untrained_turns=counts["untrained_turns"],
        num_boundary_merges=counts["boundary_merges"],
        mask_source=mask_source,
        reasons=dict(reasons.most_common()),
        length_percentiles={
            f"p{key}": int(value) for key, value in zip(_PERCENTILES, percentiles, strict=True)
        },
        examples=tuple(examples),
    )
    write_json(folder / STATISTICS_FILE, statistics)
    return statistics


def _use_marks(settings: Settings, template: ChatTemplate) -> bool:
    if settings.data.loss_mask == "generation_tags" and not template.has_generation_marks:
        raise InvalidInput(
            f"the chat template of {template.name} has no {{% generation %}} marks around whole answers, and "
            "loss_mask is 'generation_tags': the loss mask would be all zero. Mark the assistant's text in "
            "the template, or set loss_mask to 'auto'."
        )
    return template.has_generation_marks


def _dataset_results(
    settings: Settings,
    template: ChatTemplate,
    conversations: ConversationsFolder,
    *,
    use_marks: bool,
    counts: collections.Counter[str],
) -> Iterator[Result]:
    for rows in split_rows(conversations.num_rows, _BATCH_ROWS):
        batch = list(conversations.read(rows))
        samples = mask_conversations(
            template,
            [conversation.messages for conversation in batch],
            use_marks=use_marks,
            max_tokens=settings.data.max_tokens,
            counts=counts,
        )
        yield from zip(batch, samples, strict=True)


def _regenerated_results(
    settings: Settings,
    template: ChatTemplate,
    conversations: ConversationsFolder,
    answers: AnswersFolder,
    counts: collections.Counter[str],
) -> Iterator[Result]:
    for rows in split_rows(conversations.num_rows, settings.data.rows_per_answer_shard):
        committed = answers.read_committed(rows)
        for conversation in conversations.read(rows):
            answered = committed.get(conversation.content_id)
            sample = answered_sample(
                template, conversation, answered, max_tokens=settings.data.max_tokens, counts=counts
            )
            yield conversation, sample


def _example(template: ChatTemplate, row: int, sample: MaskedSample) -> Example:
    borders = np.flatnonzero(np.diff(sample.loss_mask.astype(np.int8), prepend=0, append=0)).tolist()
    texts = [
        template.decode(sample.token_ids[start:stop].tolist())
        for start, stop in zip(borders[::2], borders[1::2], strict=True)
    ]
    return Example(row=row, sample=sample_name(sample.token_ids), trained=tuple(_shortened(texts)))


def _shortened(texts: list[str]) -> list[str]:
    """Keep the first texts whole as far as they fit; of a long one, keep beginning and end."""
    kept: list[str] = []
    left = _EXAMPLE_CHARACTERS
    for text in texts:
        if len(text) <= left:
            kept.append(text)
        else:
            half = max(left // 2, 20)
            kept.append(f"{text[:half]} [...] {text[-half:]}")
        left -= len(text)
        if left <= 0:
            break
    return kept


def _judge(path: Path, statistics: DatasetStatistics, max_reject_percent: float) -> None:
    num_too_long = statistics.reasons.get(ANSWER_TOO_LONG, 0)
    if num_too_long:
        logger.warning(
            "regenerated answers dropped at answer_max_tokens rows=%d of=%d",
            num_too_long,
            statistics.num_rows,
        )
    num_rejects = statistics.num_rejects - num_too_long
    percent = 100 * num_rejects / statistics.num_rows
    if percent <= max_reject_percent:
        return
    reasons = ", ".join(
        f"{reason} {count}" for reason, count in statistics.reasons.items() if reason != ANSWER_TOO_LONG
    )
    raise InvalidInput(
        f"{num_rejects} of {statistics.num_rows} conversations give no sample ({percent:.1f} %), and "
        f"max_reject_percent is {max_reject_percent:g}: {reasons}. Look at {path / REJECTS_FILE}, then "
        "correct the conversations, answer the missing ones again, or raise max_reject_percent."
    )
