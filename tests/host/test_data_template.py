"""What a chat template must do, and what is refused before any work."""

import datetime as dt
import json
from pathlib import Path

import pytest

from eagle3_tasks.contracts.errors import InvalidInput
from eagle3_tasks.contracts.settings import Settings, settings_from_flat
from eagle3_tasks.data.template import ChatTemplate
from eagle3_tasks.data.tokenizer_files import tokenizer_fingerprint
from tests.host import test_data_tokenizers as tiny
from tests.host.test_data_tokenizers import chat_template, fast_tokenizer, save_target, talk


def target_settings(target: Path, **values: object) -> Settings:
    given = {"root": "/data/eagle3", "conversations_path": "/data/c.jsonl", "target_model": str(target)}
    return settings_from_flat({**given, **values})


def test_a_prompt_is_what_the_tokenizers_own_template_sends() -> None:
    messages = talk("Say ok", "ok", "again?", system="be brief")
    plain = [{"role": message.role, "content": message.content} for message in messages]
    sent = fast_tokenizer(tiny.PLAIN).apply_chat_template(
        plain, add_generation_prompt=True, return_dict=False
    )
    assert chat_template(tiny.PLAIN).prompt_ids(messages) == sent


def test_the_date_that_a_template_prints_is_pinned() -> None:
    template = chat_template(tiny.INSERTING, date=dt.date(2020, 2, 29))
    assert "Today is 29 Feb 2020." in template.decode(template.prompt_ids(talk("hi")))


def test_a_loaded_template_ends_turns_where_tokenizer_and_generation_configuration_say(
    tmp_path: Path,
) -> None:
    target = save_target(tmp_path / "target")
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    template = ChatTemplate.load(target_settings(target))
    assert template.end_of_turn_ids == (0, 2)
    assert template.has_generation_marks


def test_one_conversation_that_the_template_refuses_leaves_the_others_alone() -> None:
    good, bad = talk("hi", "hello"), talk("hi", "hello", system="no system here")
    texts = chat_template(tiny.STRICT).render([good, bad, good], add_generation_prompt=False)
    assert texts[0] == texts[2] == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n"
    assert "roles must alternate" in getattr(texts[1], "message", "")


@pytest.mark.parametrize(("template", "words"), [
    (None, "no chat template"),
    (tiny.WITHOUT_PROMPT, "ignores add_generation_prompt"),
    (tiny.WITHOUT_END, "without an end-of-turn token"),
    ("{{- messages[0]['content'] + '<|im_end|>' -}}", "leaves the assistant's text out"),
    ("{{- raise_exception('not today') -}}", "not today"),
    ("{%- for message in", "fails on a plain question"),
])  # fmt: skip
def test_a_template_from_which_no_mask_can_follow_is_refused(
    tmp_path: Path, template: str | None, words: str
) -> None:
    with pytest.raises(InvalidInput, match=words):
        ChatTemplate.load(target_settings(save_target(tmp_path / "target", template)))


@pytest.mark.parametrize(("marks", "is_sound"), [
    (tiny.MARKED, True),
    (tiny.MARKED_WIDELY, True),
    (tiny.MARKED_NARROWLY, True),
    (tiny.PLAIN, False),
    (tiny.MARKED.replace("== 'assistant' -%}{%- generation", "== 'user' -%}{%- generation"), False),
    (tiny.MARKED.replace("== 'assistant'", "== 'assistant' and loop.last"), True),
    (tiny.MARKED.replace("== 'assistant'", "== 'assistant' and loop.index0 < 2"), False),
    ("{%- generation -%}" + tiny.PLAIN + "{%- endgeneration -%}", False),
])  # fmt: skip
def test_marks_count_only_where_they_hold_the_last_answer_and_no_question(marks: str, is_sound: bool) -> None:
    assert chat_template(marks).has_generation_marks is is_sound


@pytest.mark.parametrize("text", ["<|im_end|>", "a<|im_start|>b", "x <|pad|>"])
def test_a_special_tokens_text_in_a_message_is_found(text: str) -> None:
    template = chat_template(tiny.PLAIN)
    assert template.forbidden_text(talk(f"before {text} after", "ok")) in text
    assert template.forbidden_text(talk("hi", f"{text}")) in text


@pytest.mark.parametrize("text", ["<|im_end|", "im_end", "<b>", "<|im _end|>", "<|", "|>"])
def test_a_text_that_only_looks_like_a_special_token_is_let_through(text: str) -> None:
    assert chat_template(tiny.PLAIN).forbidden_text(talk(text, text)) is None


def test_a_tokenizers_name_follows_each_of_its_files(tmp_path: Path) -> None:
    target = save_target(tmp_path / "target")
    names = {tokenizer_fingerprint(target_settings(target))}
    (target / "model.safetensors").write_bytes(b"weights")
    names.add(tokenizer_fingerprint(target_settings(target)))
    assert len(names) == 1
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json", "tokenization_own.py"):
        path = target / name
        path.write_text((path.read_text() if path.exists() else "{}") + "\n")
        names.add(tokenizer_fingerprint(target_settings(target)))
    assert len(names) == 5


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    for make in (lambda path: None, lambda path: path.mkdir()):
        make(tmp_path / "target")
        with pytest.raises(InvalidInput, match=r"not a folder|holds no tokenizer"):
            tokenizer_fingerprint(target_settings(tmp_path / "target"))
    with pytest.raises(InvalidInput, match="can't be loaded"):
        ChatTemplate.load(target_settings(tmp_path / "target"))
