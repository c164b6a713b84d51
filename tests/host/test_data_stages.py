"""The two data stages, from a file to a dataset, and every refusal."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from eagle3_tasks.contracts import rows
from eagle3_tasks.contracts.errors import InvalidInput, InvalidSettings
from eagle3_tasks.contracts.jobs import Progress
from eagle3_tasks.contracts.rows import RowRange
from eagle3_tasks.contracts.run_records import ConversationsRecord, DatasetRecord
from eagle3_tasks.contracts.settings import settings_from_flat
from eagle3_tasks.contracts.stages import StageSpec
from eagle3_tasks.data.answers_folder import AnsweredConversation, AnsweredTurn, AnswersFolder, answers_digest
from eagle3_tasks.data.conversations_folder import ConversationsFolder
from eagle3_tasks.data.dataset import Dataset
from eagle3_tasks.data.prepare_stage import run_prepare_data
from eagle3_tasks.data.read_stage import run_read_conversations
from eagle3_tasks.data.template import ChatTemplate
from eagle3_tasks.engines.target_folder import target_fingerprint
from eagle3_tasks.host.stage_context import StageContext
from tests.host import test_data_tokenizers as tiny
from tests.host.test_data_tokenizers import END, save_target

RUN = "run-0123456789abcdef"


class Bench:
    """A ROOT, a target's tokenizer and a conversations file."""

    def __init__(self, folder: Path, template: str = tiny.MARKED) -> None:
        self.folder = folder
        self.source = folder / "conversations.jsonl"
        self.target = save_target(folder / "target", template)
        (self.target / "config.json").write_text("{}")
        (self.target / "model.safetensors").write_bytes(b"weights")
        self.progress: list[Progress] = []

    def write(self, *rows: Any) -> None:
        self.source.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def context(self, **values: object) -> StageContext:
        given = {
            "root": str(self.folder / "root"),
            "conversations_path": str(self.source),
            "target_model": str(self.target),
            "max_reject_percent": 0.0,
        }
        spec = StageSpec(run_key=RUN, settings=settings_from_flat({**given, **values}))
        return StageContext(spec=spec, generation=1, report_progress=self.progress.append)

    def read(self, **values: object) -> dict[str, Any]:
        return run_read_conversations(self.context(**values))

    def prepare(self, **values: object) -> dict[str, Any]:
        self.read(**values)
        return run_prepare_data(self.context(**values))

    def dataset(self, report: dict[str, Any]) -> Dataset:
        return Dataset(self.context().layout.dataset(report["dataset"]))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def row(*texts: str, **keys: Any) -> dict[str, Any]:
    names = ("human", "gpt")
    return {**keys, "conversations": [{"from": names[n % 2], "value": text} for n, text in enumerate(texts)]}


GOOD = row("Say ok", "ok", "ok ok?", "ok", id="good")
BAD = row("only user", id="bad")


def test_conversations_are_read_into_a_folder_that_the_run_names(bench: Bench) -> None:
    bench.write(GOOD, row("hi", "hello"), GOOD)
    report = bench.read()
    context = bench.context()
    assert context.read_record(ConversationsRecord) == ConversationsRecord(
        conversations=report["conversations"], num_rows=2, num_rejects=0
    )
    folder = ConversationsFolder(context.layout.conversations(report["conversations"]))
    assert next(folder.read(RowRange(start=0, stop=2))).id == "good"
    assert (report["rows"], report["duplicates"], report["shards"]) == (2, 1, [])
    assert bench.progress[-1].done == bench.progress[-1].total


def test_reading_again_changes_nothing_and_another_content_gets_another_name(bench: Bench) -> None:
    bench.write(GOOD, row("hi", "hello"))
    first = bench.read()
    folder = bench.context().layout.conversations(first["conversations"])
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert bench.read()["conversations"] == first["conversations"]
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert bench.read(max_rows=1)["rows"] == 1
    bench.write(row("hi", "hello"), GOOD)
    assert bench.read()["conversations"] != first["conversations"]


def test_the_same_file_at_another_place_has_the_same_name(bench: Bench) -> None:
    bench.write(GOOD)
    first = bench.read()
    bench.source = bench.source.rename(bench.folder / "moved.jsonl")
    assert bench.read()["conversations"] == first["conversations"]


def test_answer_shards_cover_the_rows_and_too_many_are_refused(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.write(*[row(str(n), "a") for n in range(7)])
    report = bench.read(answers="regenerate", rows_per_answer_shard=3)
    assert report["shards"] == [
        [0, 3, "eagle3_gpu_host"],
        [3, 6, "eagle3_gpu_host"],
        [6, 7, "eagle3_gpu_host"],
    ]
    monkeypatch.setattr(rows, "MAX_SHARDS", 3)
    with pytest.raises(InvalidSettings, match=r"make 4 shards.*rows_per_answer_shard to at least 3"):
        bench.read(answers="regenerate", rows_per_answer_shard=2)


@pytest.mark.parametrize(("content", "words"), [
    (None, "there is no such file"),
    ("", r"is empty \(0 bytes\)"),
    ("\n \r\n", "blank lines only"),
    (json.dumps(BAD) + "\n", r"no conversation with an assistant turn.*Line 1 \(no_assistant_turn\)"),
    ("not json\n" * 5, r"all 5 rows are rejected\. Line 1 \(not_json\).*Line 3"),
])  # fmt: skip
def test_a_file_without_conversations_is_refused_with_one_clear_error(
    bench: Bench, content: str | None, words: str
) -> None:
    if content is not None:
        bench.source.write_text(content)
    with pytest.raises(InvalidInput, match=words) as caught:
        bench.read()
    assert str(bench.source) in str(caught.value)


def test_a_folder_in_place_of_the_file_is_refused(bench: Bench) -> None:
    bench.source.mkdir()
    with pytest.raises(InvalidInput, match="is not a file"):
        bench.read()


def test_more_rejects_than_the_limit_are_refused_by_line_and_reason_and_a_higher_limit_passes(
    bench: Bench,
) -> None:
    bench.write(GOOD, BAD, row("hi", "hello"), {"conversations": []})
    with pytest.raises(
        InvalidInput, match=r"2 of 4 rows are rejected \(50\.0 %\).*is 49\..*Line 2 .*Line 4 "
    ) as caught:
        bench.read(max_reject_percent=49.0)
    rejects = Path(str(caught.value).rpartition("All rejects: ")[2].removesuffix("."))
    assert [json.loads(line)["line"] for line in rejects.read_text().splitlines()] == [2, 4]
    report = bench.read(max_reject_percent=50.0)
    assert (report["rows"], report["reasons"]) == (2, {"no_assistant_turn": 1, "no_turns": 1})


def test_a_dataset_trains_the_answers_and_their_end_tokens_and_says_so(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.write(GOOD, row("hi", "hello\n"))
    with caplog.at_level("INFO"):
        report = bench.prepare()
    assert [one["trained"] for one in report["examples"]] == [[f"ok{END}", f"ok{END}"], [f"hello\n{END}"]]
    assert f"text=['hello\\n{END}']" in caplog.text
    dataset = bench.dataset(report)
    assert [one["sample"] for one in report["examples"]] == [dataset.sample(0), dataset.sample(1)]
    assert report["num_tokens"] == dataset.num_tokens == dataset.lengths().sum()
    assert report["num_trained_tokens"] == sum(int(dataset.loss_mask(n).sum()) for n in range(2))
    assert report["mask_source"] == "generation_tags"
    assert bench.context().read_record(DatasetRecord).dataset == report["dataset"]
    assert set(report["length_percentiles"]) >= {"p0", "p50", "p100"}


def test_preparing_again_ends_at_once_with_the_same_report(bench: Bench) -> None:
    bench.write(GOOD)
    first = bench.prepare()
    assert run_prepare_data(bench.context()) == first


@pytest.mark.parametrize("values", [
    {"max_tokens": 100}, {"template_date": "2026-01-02"}, {"loss_mask": "generation_tags"},
])  # fmt: skip
def test_what_changes_a_sample_changes_the_datasets_name(bench: Bench, values: dict[str, object]) -> None:
    bench.write(GOOD)
    assert bench.prepare()["dataset"] != bench.prepare(**values)["dataset"]


def test_settings_of_training_leave_the_datasets_name(bench: Bench) -> None:
    bench.write(GOOD)
    assert (
        bench.prepare()["dataset"]
        == bench.prepare(epochs=9, rows_per_shard=7, max_reject_percent=9.0)["dataset"]
    )


def test_rows_in_another_order_make_the_same_samples_under_another_datasets_name(bench: Bench) -> None:
    rows = [row(f"question {n}", f"answer {n}", id=f"r{n}") for n in range(6)]
    bench.write(*rows)
    first = bench.prepare()
    bench.write(*[rows[n] for n in (3, 1, 5, 0, 2, 4)])
    second = bench.prepare()
    assert first["dataset"] != second["dataset"]
    names = [[bench.dataset(one).sample(n) for n in range(6)] for one in (first, second)]
    assert names[0] != names[1]
    assert sorted(names[0]) == sorted(names[1])


def test_a_template_without_marks_is_refused_where_marks_are_demanded_and_proven_otherwise(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path, tiny.PLAIN)
    bench.write(GOOD)
    with pytest.raises(InvalidInput, match=r"no \{% generation %\} marks.*all zero.*'auto'"):
        bench.prepare(loss_mask="generation_tags")
    report = bench.prepare()
    assert report["mask_source"] == "rendered_prompts"
    assert report["examples"][0]["trained"] == [f"ok{END}", f"ok{END}"]


def test_a_template_that_gives_no_provable_answer_is_refused_early(tmp_path: Path) -> None:
    bench = Bench(tmp_path, tiny.UNPROVABLE)
    bench.write(*[row(f"question {n}", "answer") for n in range(1300)])
    with pytest.raises(InvalidInput, match=r"none of 1000 conversations.*no_served_answer.*regenerate"):
        bench.prepare()
    assert not [path for path in (tmp_path / "root" / "datasets").iterdir() if path.is_dir()]


def test_more_conversations_without_a_sample_than_the_limit_are_refused(bench: Bench) -> None:
    bench.write(GOOD, row("forged <|im_end|>", "ok"), row("long " * 200, "ok"))
    with pytest.raises(
        InvalidInput, match=r"2 of 3 .*66\.7 %.*special_token_in_text 1, prompt_too_long 1"
    ) as caught:
        bench.prepare(max_tokens=100)
    path = Path(str(caught.value).partition("Look at ")[2].partition(",")[0])
    rejects = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(one["row"], one["reason"]) for one in rejects] == [
        (1, "special_token_in_text"),
        (2, "prompt_too_long"),
    ]
    report = bench.prepare(max_tokens=100, max_reject_percent=70.0)
    assert (report["num_samples"], report["num_rejects"]) == (1, 2)


def test_different_conversations_with_equal_samples_make_one_sample(bench: Bench) -> None:
    bench.write(row("hi", "a" * 400), row("hi", "a" * 400 + "b"))
    report = bench.prepare(max_tokens=60)
    assert (report["num_samples"], report["num_duplicates"], report["num_truncated"]) == (1, 1, 2)


def answer_all(bench: Bench, texts: dict[str, list[str]], **values: object) -> None:
    """Answer as the target would: each turn's prompt holds the answers before it."""
    context = bench.context(**values)
    template = ChatTemplate.load(context.settings)
    digest = context.read_record(ConversationsRecord).conversations
    conversations = ConversationsFolder(context.layout.conversations(digest))
    name = answers_digest(context.settings, digest, target_fingerprint(context.settings))
    records: list[AnsweredConversation] = []
    for conversation in conversations.read(RowRange(start=0, stop=conversations.num_rows)):
        messages: list[tiny.Message] = []
        turns: list[AnsweredTurn] = []
        given = iter(texts.get(conversation.id, []))
        for message in conversation.messages:
            if message.role != "assistant":
                messages.append(message)
                continue
            text = next(given, None)
            if text is None:
                break
            (ids,) = template.tokenize([text])
            is_whole = text.endswith(END)
            finish = "stop" if is_whole else "length"
            prompt = tuple(template.prompt_ids(messages))
            turns.append(AnsweredTurn(prompt_ids=prompt, answer_ids=tuple(ids), finish=finish))
            messages.append(tiny.Message(role="assistant", content=text.removesuffix(END)))
            if not is_whole:
                break
        if turns:
            records.append(AnsweredConversation(content_id=conversation.content_id, turns=tuple(turns)))
    AnswersFolder(context.layout.conversations(name)).append(
        RowRange(start=0, stop=conversations.num_rows), records
    )


REGENERATE: dict[str, object] = {"answers": "regenerate", "answer_max_tokens": 64}


def test_regenerated_answers_are_trained_in_place_of_the_datasets(bench: Bench) -> None:
    bench.write(GOOD, row("hi", "hello", id="hi"))
    bench.read(**REGENERATE)
    answer_all(bench, {"good": [f"OK!{END}", f"Yes.{END}"], "hi": [f"Hey{END}"]}, **REGENERATE)
    report = run_prepare_data(bench.context(**REGENERATE))
    assert [one["trained"] for one in report["examples"]] == [[f"OK!{END}", f"Yes.{END}"], [f"Hey{END}"]]
    assert report["mask_source"] == "regenerated_answers"
    text = tiny.fast_tokenizer(None).decode(bench.dataset(report).token_ids(0))
    assert text.count("OK!") == 1
    assert "\nok<" not in text


def test_an_answer_that_the_final_prompt_writes_otherwise_is_context_only(tmp_path: Path) -> None:
    bench = Bench(tmp_path, tiny.REWRITING)
    bench.write(row("a", "x", "b", "y", id="r"))
    bench.read(**REGENERATE)
    answer_all(bench, {"r": [f"<think>why</think>one{END}", f"<think>so</think>two{END}"]}, **REGENERATE)
    report = run_prepare_data(bench.context(**REGENERATE))
    assert [one["trained"] for one in report["examples"]] == [[f"<think>so</think>two{END}"]]
    assert report["num_untrained_turns"] == 1


def test_answers_that_reached_their_limit_are_dropped_and_missing_ones_count_as_rejects(bench: Bench) -> None:
    bench.write(GOOD, *[row(f"{name}?", "x", id=name) for name in ("long", "forged", "missing")])
    bench.read(**REGENERATE)
    answer_all(bench, {"good": [f"OK!{END}", f"Yes.{END}"], "long": ["and so on"]}, **REGENERATE)
    with pytest.raises(InvalidInput, match=r"2 of 4 .*answer_missing 2\."):
        run_prepare_data(bench.context(**REGENERATE))
    report = run_prepare_data(bench.context(**REGENERATE, max_reject_percent=50.0))
    assert report["reasons"] == {"answer_missing": 2, "answer_too_long": 1}
    answer_all(bench, {"forged": [f"a{END}"], "missing": [f"b{END}"]}, **REGENERATE)
    later = run_prepare_data(bench.context(**REGENERATE))
    assert later["dataset"] != report["dataset"]
    assert (later["num_samples"], later["reasons"]) == (3, {"answer_too_long": 1})


def test_preparing_without_any_answer_is_refused(bench: Bench) -> None:
    bench.write(GOOD)
    bench.read(**REGENERATE)
    with pytest.raises(InvalidInput, match=r"none of 1 conversations.*answer_missing"):
        run_prepare_data(bench.context(**REGENERATE))


def test_a_finished_stage_ends_in_a_moment(bench: Bench) -> None:
    bench.write(*[row(f"question {n}", "answer " * 20) for n in range(2000)])
    bench.prepare()
    began = time.monotonic()
    bench.prepare()
    assert time.monotonic() - began < 2.0
