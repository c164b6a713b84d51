"""Regenerating answers with a tiny real target."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from eagle3_tasks.contracts.errors import EngineProblem
from eagle3_tasks.contracts.jobs import Progress
from eagle3_tasks.contracts.rows import RowRange
from eagle3_tasks.contracts.run_records import ConversationsRecord
from eagle3_tasks.data.answers_folder import AnswersFolder, answers_digest
from eagle3_tasks.data.conversations_folder import ConversationsFolder
from eagle3_tasks.data.read_stage import run_read_conversations
from eagle3_tasks.data.template import ChatTemplate
from eagle3_tasks.engines.huggingface import HuggingFaceEngine
from eagle3_tasks.engines.interface import GeneratedAnswer
from eagle3_tasks.engines.target_folder import target_fingerprint
from eagle3_tasks.extraction.answers_stage import regenerate_rows, run_regenerate
from eagle3_tasks.host.stage_context import StageContext
from tests.host.tiny_target import make_context, make_settings, make_target

NUM_ROWS = 8
ALL = RowRange(start=0, stop=NUM_ROWS)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("answers") / "target", initializer_range=0.4)


@pytest.fixture(scope="module")
def engine(target: Path) -> HuggingFaceEngine:
    return HuggingFaceEngine.load(make_settings(target.parent / "root", target))


@pytest.fixture
def context(tmp_path: Path, target: Path) -> StageContext:
    source = tmp_path / "conversations.jsonl"
    lines = [
        {
            "id": f"r{row}",
            "messages": [
                {"role": "user", "content": f"w{row} w{row + 20}"},
                {"role": "assistant", "content": "w1"},
                {"role": "user", "content": f"w{row + 40}"},
                {"role": "assistant", "content": "w2"},
            ][: 4 if row % 2 else 2],
        }
        for row in range(NUM_ROWS)
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = make_settings(
        tmp_path / "root", target, conversations_path=str(source), answers="regenerate", answer_max_tokens=12,
        answer_temperature=1.0, capture_batch_tokens=96, max_reject_percent=100.0,
    )  # fmt: skip
    context = make_context(settings, ALL)
    run_read_conversations(context)
    return context


def answers_of(context: StageContext) -> dict:
    digest = context.read_record(ConversationsRecord).conversations
    name = answers_digest(context.settings, digest, target_fingerprint(context.settings))
    return AnswersFolder(context.layout.conversations(name)).read_committed(ALL)


def test_every_turn_is_answered_after_the_regenerated_earlier_ones(context):
    report = run_regenerate(context)
    assert report["answered"] == NUM_ROWS
    template = ChatTemplate.load(context.settings)
    digest = context.read_record(ConversationsRecord).conversations
    answers = answers_of(context)
    finishes: list[str] = []
    num_two_turns = 0
    for conversation in ConversationsFolder(context.layout.conversations(digest)).read(ALL):
        turns = answers[conversation.content_id].turns
        finishes.append(turns[-1].finish)
        assert list(turns[0].prompt_ids) == template.prompt_ids(conversation.messages[:1])
        for turn in turns:
            ended = turn.answer_ids[-1] in template.end_of_turn_ids
            assert ended == (turn.finish == "stop")
            assert not set(turn.answer_ids[:-1]) & set(template.end_of_turn_ids)
        if len(turns) == 2:
            num_two_turns += 1
            first = turns[0].prompt_ids + turns[0].answer_ids
            assert turns[1].prompt_ids[: len(first)] == first
        assert len(turns) == len(conversation.messages) // 2 or turns[-1].finish == "length"
    assert num_two_turns
    assert report["dropped_length"] == finishes.count("length")
    assert report["tokens"] == sum(len(turn.answer_ids) for one in answers.values() for turn in one.turns)


def no_engine():
    raise AssertionError("nothing is missing, so the target must not be loaded")


def test_answers_that_are_there_are_not_asked_for_again_whatever_the_shards(context, engine):
    first = regenerate_rows(context, lambda: engine)
    for start in (0, 4):
        part = make_context(context.settings, RowRange(start=start, stop=start + 4))
        report = regenerate_rows(part, no_engine)
        assert (report["answered"], report["reused"]) == (0, 4)
    assert regenerate_rows(context, no_engine)["tokens"] == first["tokens"]


def test_a_break_costs_only_the_group_in_flight(context, engine):
    class Breaking:
        describe = engine.describe
        calls = 0

        def generate(self, *arguments, **options):
            Breaking.calls += 1
            if Breaking.calls == 3:
                raise EngineProblem("injected")
            return engine.generate(*arguments, **options)

    with pytest.raises(EngineProblem, match="injected"):
        regenerate_rows(context, Breaking)
    committed = len(answers_of(context))
    assert 0 < committed < NUM_ROWS
    report = regenerate_rows(context, lambda: engine)
    assert (report["reused"], report["answered"]) == (committed, NUM_ROWS - committed)


def test_a_prompt_that_leaves_no_room_for_an_answer_is_dropped_and_counted(context, engine):
    values = {
        "answer_max_tokens": 12,
        "max_tokens": 18,
        "conversations_path": context.settings.data.conversations_path,
    }
    settings = make_settings(
        Path(context.settings.host.root), context.settings.target.target_model, answers="regenerate", **values
    )
    report = regenerate_rows(make_context(settings, ALL), lambda: engine)
    assert report["dropped_length"] >= NUM_ROWS // 2


def test_two_runs_at_once_answer_each_row_once(context, engine):
    waiting: list[Progress] = []
    reports: list[dict] = []
    other = threading.Thread(
        target=lambda: reports.append(
            regenerate_rows(make_context(context.settings, ALL, progress=waiting), no_engine)
        )
    )

    def load_while_another_run_begins():
        other.start()
        limit = time.monotonic() + 20
        while not waiting and other.is_alive() and time.monotonic() < limit:
            time.sleep(0.01)
        return engine

    report = regenerate_rows(context, load_while_another_run_begins)
    other.join(20)
    assert waiting[0].done == 0
    assert (report["answered"], reports[0]["answered"], reports[0]["reused"]) == (NUM_ROWS, 0, NUM_ROWS)
    (path,) = context.layout.root.glob("conversations/*/answers-*.jsonl")
    assert len(path.read_bytes().splitlines()) == NUM_ROWS


@pytest.mark.parametrize(
    ("refusal", "num_refused", "num_unanswered"),
    [("'w2 ' in messages[0]['content']", 1, 1), ("messages | length > 2", NUM_ROWS // 2, 0)],
)
def test_what_the_template_refuses_is_counted_and_loads_no_target_again(
    context, engine, tmp_path, refusal: str, num_refused: int, num_unanswered: int
):
    folder = shutil.copytree(context.settings.target.target_model, tmp_path / "refusing")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = (
        f"{{% if {refusal} %}}{{{{ raise_exception('no') }}}}{{% endif %}}{tokenizer.chat_template}"
    )
    tokenizer.save_pretrained(folder)
    values = {"answer_max_tokens": 12, "conversations_path": context.settings.data.conversations_path}
    settings = make_settings(tmp_path / "root", folder, answers="regenerate", **values)

    class Ending:
        """Ends each answer at once, so that no length limit hides a refusal."""

        describe = engine.describe

        def generate(self, prompts, *, stop_ids, **_):
            return [GeneratedAnswer(ids=(9, stop_ids[0]), finish="stop") for _ in prompts]

    first = regenerate_rows(make_context(settings, ALL), Ending)
    again = regenerate_rows(make_context(settings, ALL), no_engine)
    assert first["answered"] == again["reused"] == NUM_ROWS - num_unanswered
    assert first["refused"] == again["refused"] == num_refused
