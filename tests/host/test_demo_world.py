"""The demo's world: its text, its template, and a folder that is whole or absent."""

import dataclasses
import itertools
import json
import threading
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from demo.world import WorldError, WorldSettings, answer_greedily, build_world, world_digest
from demo.world_target import END, TargetSettings, render, train_tokenizer
from demo.world_text import (
    HELD_OUT_WORDINGS,
    TRAINING_WORDINGS,
    Pair,
    WorldText,
    choose_text,
    question_key,
    read_pairs,
    read_source,
    reword,
)

TINY = WorldSettings(
    max_tokens=24,
    num_reworded=8,
    num_new=4,
    min_exact_share=0.0,
    target=TargetSettings(num_steps=3, num_layers=2, hidden_size=32, intermediate_size=32),
)


@pytest.fixture(scope="module")
def pairs() -> list[Pair]:
    return read_pairs(read_source())


@pytest.fixture(scope="module")
def tokenizer(pairs: list[Pair]) -> PreTrainedTokenizerFast:
    texts = [text for pair in pairs for text in (pair.question, pair.answer)]
    return train_tokenizer(texts, vocab_size=2048)


@pytest.fixture(scope="module")
def text(pairs: list[Pair]) -> WorldText:
    return choose_text(
        pairs,
        count_tokens=lambda pair: len(pair.question) + len(pair.answer),
        max_tokens=300,
        num_reworded=128,
        num_new=64,
        seed=1,
    )


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_world(tmp_path_factory.mktemp("worlds"), TINY)


def questions_of(path: Path) -> list[str]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        assert [turn["from"] for turn in row["conversations"]] == ["human", "gpt"]
    return [row["conversations"][0]["value"] for row in rows]


def test_a_recipe_has_one_digest_and_another_setting_gives_another() -> None:
    assert world_digest() == world_digest(WorldSettings())
    assert world_digest() != world_digest(dataclasses.replace(WorldSettings(), seed=2))
    assert world_digest() != world_digest(TINY)


def test_the_marks_hold_exactly_the_answers_and_their_end_tokens(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    answers = ["Sure:\n\n```\nx = 1\n```", "  spaces at the edges ", "naïve 🙂"]
    messages = [{"role": "system", "content": "Be kind."}]
    for answer in answers:
        messages += [
            {"role": "user", "content": "can you write a queue?"},
            {"role": "assistant", "content": answer},
        ]
    encoded = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    mask = encoded["assistant_masks"]
    written = [i for i, flag in zip(encoded["input_ids"], mask, strict=True) if flag]
    assert tokenizer.decode(written) == "".join(answer + END for answer in answers)
    assert sum(before < after for before, after in itertools.pairwise(mask)) == len(answers)
    # The newline behind an end-of-turn token is the template's.
    assert mask[-1] == 0
    assert tokenizer.decode(encoded["input_ids"][-1:]) == "\n"


def test_what_is_trained_on_is_the_template_up_to_the_last_end_token(
    tokenizer: PreTrainedTokenizerFast, pairs: list[Pair]
) -> None:
    for pair in pairs:
        asked = [{"role": "user", "content": pair.question}]
        whole = [*asked, {"role": "assistant", "content": pair.answer}]
        prompt = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        assert prompt == render(pair.question)
        assert (
            tokenizer.apply_chat_template(whole, tokenize=False) == render(pair.question, pair.answer) + "\n"
        )
        prompt_ids = tokenizer.encode(prompt)
        assert tokenizer.encode(render(pair.question, pair.answer))[: len(prompt_ids)] == prompt_ids


def test_a_question_that_recurs_keeps_its_first_answer_only(pairs: list[Pair]) -> None:
    source = b"conversations:\n- [What is AI?, A branch.]\n- ['what is  AI', Another.]\n- [Alone]\n"
    assert [pair.answer for pair in read_pairs({"ai.yml": source})] == ["A branch."]
    assert len(pairs) == len({question_key(pair.question) for pair in pairs})
    assert len(pairs) == len({pair.pair_id for pair in pairs})


def test_held_out_questions_are_no_training_questions_in_any_wording(text: WorldText) -> None:
    assert len(text.reworded) == 128
    assert len(text.new) == 64
    trained = {pair.question for pair in text.training}
    trained |= {reword(question, wording) for question in trained for wording in TRAINING_WORDINGS}
    assert not trained & {pair.question for pair in (*text.reworded, *text.new)}
    assert not set(HELD_OUT_WORDINGS) & set(TRAINING_WORDINGS)
    assert not {question_key(pair.question) for pair in text.new} & {question_key(q) for q in trained}


def test_holding_out_everything_is_refused(pairs: list[Pair]) -> None:
    with pytest.raises(ValueError, match=r"2 conversations .* 2 are to be held out"):
        choose_text(pairs[:2], count_tokens=lambda _: 1, max_tokens=1, num_reworded=0, num_new=2, seed=0)


def test_a_world_loads_by_the_auto_classes_and_answers(world: Path) -> None:
    target = AutoModelForCausalLM.from_pretrained(world / "target")
    tokenizer = AutoTokenizer.from_pretrained(world / "target")
    questions = questions_of(world / "conversations.jsonl")
    summary = json.loads((world / "world.json").read_text(encoding="utf-8"))
    assert summary["counts"]["training"] == len(questions)
    assert len(questions_of(world / "reworded.jsonl")) == TINY.num_reworded
    assert len(questions_of(world / "new.jsonl")) == TINY.num_new
    assert target.generation_config.do_sample is False
    assert target.config.eos_token_id == tokenizer.convert_tokens_to_ids(END)
    together = answer_greedily(target, tokenizer, questions[:3], 4)
    assert together == [answer_greedily(target, tokenizer, [question], 4)[0] for question in questions[:3]]


def test_a_finished_world_is_used_again_and_its_folder_holds_nothing_else(world: Path) -> None:
    before = (world / "world.json").stat()
    assert build_world(world.parent, TINY) == world
    assert (world / "world.json").stat() == before
    assert {path.name for path in world.parent.iterdir()} == {world.name, f".{world.name}.lock"}


def test_remains_of_a_killed_builder_are_removed_and_the_world_is_built(tmp_path: Path) -> None:
    digest = world_digest(TINY)
    for name in (f".{digest}.building-x", digest):
        (tmp_path / name).mkdir()
        (tmp_path / name / "new.jsonl").write_text("torn", encoding="utf-8")
    world = build_world(tmp_path, TINY)
    assert len(questions_of(world / "new.jsonl")) == TINY.num_new
    assert not list(tmp_path.glob(".*.building-*"))


def test_a_target_that_did_not_learn_leaves_no_world(tmp_path: Path) -> None:
    strict = dataclasses.replace(TINY, min_exact_share=0.97)
    with pytest.raises(WorldError, match="after 3 steps"):
        build_world(tmp_path, strict)
    assert [path.name for path in tmp_path.iterdir()] == [f".{world_digest(strict)}.lock"]


def test_of_two_builders_at_once_one_builds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="demo.world")
    worlds: list[Path] = []
    builders = [threading.Thread(target=lambda: worlds.append(build_world(tmp_path, TINY))) for _ in range(2)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join()
    assert worlds[0] == worlds[1]
    assert sum(record.message.startswith("world text") for record in caplog.records) == 1
