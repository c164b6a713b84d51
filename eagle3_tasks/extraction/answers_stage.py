"""Stage ``regenerate``: the target answers every assistant's turn anew.

Conversations are answered in groups, turn by turn: a later turn's prompt holds the
regenerated earlier ones. Each group's answers are appended durably, so a retry answers
only what is missing, by content. One process at a time answers a row range.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from eagle3_tasks.contracts.errors import RequestRefused
from eagle3_tasks.contracts.jobs import Progress
from eagle3_tasks.contracts.rows import RowRange
from eagle3_tasks.contracts.run_records import ConversationsRecord
from eagle3_tasks.contracts.settings import Settings
from eagle3_tasks.data.answers_folder import (
    AnsweredConversation,
    AnsweredTurn,
    AnswersFolder,
    answers_digest,
)
from eagle3_tasks.data.conversations import Conversation, Message
from eagle3_tasks.data.conversations_folder import ConversationsFolder
from eagle3_tasks.data.template import ChatTemplate, RenderFailure
from eagle3_tasks.engines.batches import batches_by_length
from eagle3_tasks.engines.interface import Engine, GeneratedAnswer
from eagle3_tasks.engines.target_folder import target_fingerprint
from eagle3_tasks.extraction.shard_engine import load_shard_engine
from eagle3_tasks.host.stage_context import StageContext
from eagle3_tasks.storage.disk_guard import check_reserve, disk_errors
from eagle3_tasks.storage.fault_points import fault_point
from eagle3_tasks.storage.shard_lock import writer_lock

logger = logging.getLogger(__name__)

STAGE = "regenerate"
_LOG_SECONDS = 10.0


@dataclasses.dataclass(kw_only=True)
class _Open:
    """One conversation on its way: its messages so far, with the target's answers in them."""

    conversation: Conversation
    questions: list[list[Message]]
    messages: list[Message] = dataclasses.field(default_factory=list[Message])
    turns: list[AnsweredTurn] = dataclasses.field(default_factory=list[AnsweredTurn])


@dataclasses.dataclass(kw_only=True)
class _Counts:
    answered: int = 0
    tokens: int = 0
    dropped_length: int = 0
    refused: int = 0

    def add(self, conversation: Conversation, answers: AnsweredConversation) -> None:
        self.answered += 1
        self.tokens += sum(len(turn.answer_ids) for turn in answers.turns)
        self.dropped_length += is_dropped(answers)
        # The template refused a later turn with the target's own answers before it.
        num_turns = sum(message.role == "assistant" for message in conversation.messages)
        self.refused += not is_dropped(answers) and len(answers.turns) < num_turns


def is_dropped(answers: AnsweredConversation) -> bool:
    """Say whether the target ran into the length limit: such a conversation makes no sample."""
    return answers.turns[-1].finish == "length"


def run_regenerate(context: StageContext) -> dict[str, Any]:
    """Answer the conversations of ``context.spec.rows``. See :func:`regenerate_rows`."""
    return regenerate_rows(context, lambda: load_shard_engine(context.settings))


def regenerate_rows(context: StageContext, load_engine: Callable[[], Engine]) -> dict[str, Any]:
    """Answer what is missing of a row range.

    The engine is not loaded if nothing is missing but what the chat template refuses.

    Raises:
        RequestRefused: the spec names no rows.
        InvalidInput: the target or its tokenizer can't be used.
        DiskProblem: the answers can't be written.
    """
    settings, rows = context.settings, context.spec.rows
    if rows is None:
        raise RequestRefused("regenerate needs a row range. Give `rows` in the spec.")
    digest = context.read_record(ConversationsRecord).conversations
    conversations = list(ConversationsFolder(context.layout.conversations(digest)).read(rows))
    folder = AnswersFolder(
        context.layout.conversations(answers_digest(settings, digest, target_fingerprint(settings)))
    )

    def report_waiting(seconds: float) -> None:
        total = len(conversations)
        context.report_progress(
            Progress(stage=STAGE, done=0, total=total, unit="conversations", seconds=round(seconds, 1))
        )

    with writer_lock(folder.lock_path(rows), report_waiting=report_waiting):
        return _answer_missing(context, rows, conversations, folder, load_engine)


def _answer_missing(
    context: StageContext,
    rows: RowRange,
    conversations: Sequence[Conversation],
    folder: AnswersFolder,
    load_engine: Callable[[], Engine],
) -> dict[str, Any]:
    began = time.monotonic()
    settings = context.settings
    committed = folder.read_committed(rows)
    missing = {one.content_id: one for one in conversations if one.content_id not in committed}
    reused = _Counts()
    for one in conversations:
        if one.content_id in committed:
            reused.add(one, committed[one.content_id])
    logger.info(
        "regenerate opened rows=[%d,%d) conversations=%d reused=%d missing=%d",
        rows.start, rows.stop, len(conversations), reused.answered, len(missing),
    )  # fmt: skip
    new = _Counts()
    if missing:
        template = ChatTemplate.load(settings)
        asked = _prompts([_open(one) for one in missing.values()], template)
        new.refused = len(missing) - len(asked)
        reporter = _Reporter(context, rows, reused=reused.answered, total=reused.answered + len(asked))
        groups = _answer_groups(asked, load_engine(), template, settings) if asked else ()
        for answers in groups:
            check_reserve(
                context.layout.root,
                needed_bytes=0,
                reserve_bytes=int(settings.host.disk_reserve_gb * 1e9),
                missing=f"{len(asked) - new.answered} conversations are still to be answered",
            )
            with disk_errors(folder.path):
                folder.append(rows, answers)
            fault_point("answers_appended", rows.name(rows.stop))
            for one in answers:
                new.add(missing[one.content_id], one)
            reporter.report(new)
    seconds = time.monotonic() - began
    report = {
        "rows": [rows.start, rows.stop],
        "conversations": len(conversations),
        "answered": new.answered,
        "reused": reused.answered,
        "dropped_length": new.dropped_length + reused.dropped_length,
        "refused": new.refused + reused.refused,
        "tokens": new.tokens + reused.tokens,
        "seconds": round(seconds, 2),
    }
    logger.info(
        "answers written rows=[%d,%d) answered=%d reused=%d dropped_length=%d refused=%d tokens=%d "
        "seconds=%.1f",
        rows.start, rows.stop, new.answered, reused.answered, report["dropped_length"], report["refused"],
        report["tokens"], seconds,
    )  # fmt: skip
    return report


def _answer_groups(
    asked: Sequence[tuple[_Open, list[int]]], engine: Engine, template: ChatTemplate, settings: Settings
) -> Iterator[list[AnsweredConversation]]:
    """Answer conversations in groups of like length, each group about one batch of the engine."""
    lengths = [len(prompt) + settings.data.answer_max_tokens for _, prompt in asked]
    room = min(settings.data.max_tokens, engine.describe().max_positions or settings.data.max_tokens)
    for group in batches_by_length(lengths, settings.extraction.capture_batch_tokens):
        waiting = [asked[index] for index in group]
        while waiting:
            _answer_turn(waiting, engine, template, settings, room=room)
            waiting = _prompts([one for one, _ in waiting if one.questions], template)
        yield [
            AnsweredConversation(content_id=one.conversation.content_id, turns=tuple(one.turns))
            for one, _ in (asked[index] for index in group)
        ]


def _open(conversation: Conversation) -> _Open:
    questions: list[list[Message]] = [[]]
    for message in conversation.messages:
        if message.role == "assistant":
            questions.append([])
        else:
            questions[-1].append(message)
    # What follows the last answer has no answer of its own.
    return _Open(conversation=conversation, questions=questions[:-1])


def _prompts(opened: Sequence[_Open], template: ChatTemplate) -> list[tuple[_Open, list[int]]]:
    """Move each conversation to its next question and tokenize it, without those the template refuses."""
    for one in opened:
        one.messages += one.questions.pop(0)
    texts = template.render([one.messages for one in opened], add_generation_prompt=True)
    prompts: list[tuple[_Open, list[int]]] = []
    for one, text in zip(opened, texts, strict=True):
        if isinstance(text, RenderFailure):
            logger.warning("conversation refused row=%d reason=%s", one.conversation.row, text.message)
        else:
            prompts.append((one, template.tokenize([text])[0]))
    return prompts


def _answer_turn(
    waiting: Sequence[tuple[_Open, list[int]]],
    engine: Engine,
    template: ChatTemplate,
    settings: Settings,
    *,
    room: int,
) -> None:
    """Answer one turn of each conversation; one whose prompt leaves no room for an answer is closed."""
    limit = settings.data.answer_max_tokens
    fitting = [(one, prompt) for one, prompt in waiting if len(prompt) + limit <= room]
    answers = engine.generate(
        [prompt for _, prompt in fitting],
        max_new_tokens=limit,
        temperature=settings.data.answer_temperature,
        stop_ids=template.end_of_turn_ids,
        seed=int(fitting[0][0].conversation.content_id, 16) % 2**31 if fitting else 0,
    )
    by_id = {id(one): answer for (one, _), answer in zip(fitting, answers, strict=True)}
    for one, prompt in waiting:
        answer = by_id.get(id(one), GeneratedAnswer(ids=(), finish="length"))
        one.turns.append(AnsweredTurn(prompt_ids=tuple(prompt), answer_ids=answer.ids, finish=answer.finish))
        if answer.finish == "length":
            one.questions.clear()
        else:
            one.messages.append(Message(role="assistant", content=template.decode(answer.ids[:-1])))


class _Reporter:
    """Progress about every second, a log line about every ten, counted from what is on disk."""

    def __init__(self, context: StageContext, rows: RowRange, *, reused: int, total: int) -> None:
        self._context = context
        self._rows = rows
        self._reused = reused
        self._total = total
        self._began = time.monotonic()
        self._logged = -_LOG_SECONDS

    def report(self, new: _Counts) -> None:
        now = time.monotonic()
        seconds = max(now - self._began, 1e-6)
        done = self._reused + new.answered
        rate = new.answered / seconds
        eta_seconds = (self._total - done) / rate if rate else None
        self._context.report_progress(
            Progress(
                stage=STAGE,
                done=done,
                total=self._total,
                unit="conversations",
                seconds=round(seconds, 1),
                rate_per_second=round(rate, 2),
                eta_seconds=None if eta_seconds is None else round(eta_seconds, 1),
                values={"tokens": new.tokens, "tokens_per_second": round(new.tokens / seconds, 1)},
            )
        )
        if now - self._logged >= _LOG_SECONDS:
            self._logged = now
            logger.info(
                "regenerate rows=[%d,%d) conversations=%d/%d tokens=%d conversations_per_second=%.1f "
                "tokens_per_second=%.1f eta_seconds=%s",
                self._rows.start, self._rows.stop, done, self._total, new.tokens, rate, new.tokens / seconds,
                "unknown" if eta_seconds is None else f"{eta_seconds:.1f}",
            )  # fmt: skip
