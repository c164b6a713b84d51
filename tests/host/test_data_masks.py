"""The loss mask holds the answers and their end-of-turn tokens, byte for byte, and nothing else."""

import collections
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_tasks.data.conversations import Message
from eagle3_tasks.data.masks import MaskedSample, Unusable, mask_conversations
from eagle3_tasks.data.template import ChatTemplate
from tests.host import test_data_tokenizers as tiny
from tests.host.test_data_tokenizers import DATE, END, chat_template, slow_tokenizer, spacing_tokenizer, talk

Counts = collections.Counter[str]


def masked(
    template: ChatTemplate, *conversations: Sequence[Message], max_tokens: int = 10_000
) -> tuple[list[MaskedSample | Unusable], Counts]:
    counts: Counts = collections.Counter()
    results = mask_conversations(
        template, conversations, use_marks=template.has_generation_marks, max_tokens=max_tokens, counts=counts
    )
    return results, counts


def one_sample(template: ChatTemplate, *texts: str, max_tokens: int = 10_000) -> MaskedSample:
    results, _ = masked(template, talk(*texts), max_tokens=max_tokens)
    assert isinstance(results[0], MaskedSample), results
    return results[0]


def trained_texts(template: ChatTemplate, sample: MaskedSample) -> list[str]:
    borders = np.flatnonzero(np.diff(sample.loss_mask.astype(int), prepend=0, append=0))
    return [
        template.decode(sample.token_ids[start:stop].tolist())
        for start, stop in zip(borders[::2], borders[1::2], strict=True)
    ]


@lru_cache
def template_named(name: str) -> ChatTemplate:
    return chat_template(getattr(tiny, name))


CHATML = ["PLAIN", "MARKED", "MARKED_WIDELY", "MARKED_NARROWLY", "INSERTING", "STRICT"]


@pytest.mark.parametrize("name", CHATML)
def test_an_answer_that_repeats_the_questions_text_is_found_in_its_place(name: str) -> None:
    template = template_named(name)
    sample = one_sample(template, "Say ok", "ok", "ok ok?", "ok")
    assert trained_texts(template, sample) == [f"ok{END}", f"ok{END}"]
    assert "ok ok?" in template.decode(sample.token_ids[~sample.loss_mask].tolist())


@pytest.mark.parametrize("name", CHATML)
def test_the_ids_before_each_answer_are_the_prompt_that_serving_sends(name: str) -> None:
    template = template_named(name)
    texts = ("What is the capital?", "Paris", "And of Spain?", "Madrid")
    sample = one_sample(template, *texts)
    starts = np.flatnonzero(np.diff(sample.loss_mask.astype(int), prepend=0) == 1)
    for start, num_turns in zip(starts, (1, 3), strict=True):
        assert sample.token_ids[:start].tolist() == template.prompt_ids(talk(*texts[:num_turns]))


odd_pieces = st.sampled_from(
    [*"ok Paris?\n\t<|>/[]", "e\u0301", "\u6f22", "\U0001f600", "\u2028", "<|im_", "\n\n", "  "]
)
contents = (
    st.lists(
        odd_pieces | st.text(st.characters(exclude_categories=("Cs",)), max_size=4), min_size=1, max_size=10
    )
    .map("".join)
    .filter(lambda text: bool(text.strip()) and END not in text)
)
conversations = st.lists(st.tuples(contents, contents), min_size=1, max_size=4).map(
    lambda pairs: talk(*[text for pair in pairs for text in pair])
)
systems = st.none() | contents


@settings(max_examples=250, deadline=None)
@given(
    name=st.sampled_from([name for name in CHATML if name != "STRICT"]), turns=conversations, system=systems
)
def test_decoded_spans_are_the_answers_and_their_end_tokens(
    name: str, turns: tuple[Message, ...], system: str | None
) -> None:
    template = template_named(name)
    messages = turns if system is None else (Message(role="system", content=system), *turns)
    (sample,), counts = masked(template, messages)
    assert isinstance(sample, MaskedSample), sample
    answers = [message.content + END for message in messages if message.role == "assistant"]
    assert trained_texts(template, sample) == answers
    assert 0 < sample.loss_mask.sum() < len(sample.loss_mask)
    assert counts["untrained_turns"] == 0


@settings(max_examples=150, deadline=None)
@given(
    turns=conversations,
    reasoning=st.lists(st.sampled_from(["", "<think>why</think>"]), min_size=4, max_size=4),
)
def test_answers_that_a_template_rewrites_in_history_are_not_trained(
    turns: tuple[Message, ...], reasoning: list[str]
) -> None:
    template = template_named("REWRITING")
    messages = [
        Message(role=one.role, content=reasoning[row // 2] + one.content) if one.role == "assistant" else one
        for row, one in enumerate(turns)
    ]
    answers = [message.content for message in messages if message.role == "assistant"]
    (sample,), counts = masked(template, messages)
    assert isinstance(sample, MaskedSample), sample
    rewritten = [number for number, answer in enumerate(answers[:-1]) if "</think>" in answer]
    # A prompt that holds a rewritten answer is what serving sends: later answers stand behind it.
    kept = [answer + END for number, answer in enumerate(answers) if number not in rewritten]
    assert trained_texts(template, sample) == kept
    assert counts["untrained_turns"] == len(rewritten)


@settings(max_examples=60, deadline=None)
@given(turns=conversations)
def test_a_tokenizer_in_plain_python_gives_the_same_spans(turns: tuple[Message, ...]) -> None:
    template = slow_template()
    (sample,), _ = masked(template, turns)
    assert isinstance(sample, MaskedSample), sample
    answers = [message.content + END for message in turns if message.role == "assistant"]
    assert trained_texts(template, sample) == answers


@lru_cache
def slow_template() -> ChatTemplate:
    return ChatTemplate(slow_tokenizer(tiny.MARKED), date=DATE, name="slow")


def test_neither_what_the_prompt_holds_nor_what_the_template_adds_to_it_is_trained() -> None:
    template = template_named("THINKING")
    assert trained_texts(template, one_sample(template, "q", "a", "r", "b")) == [f"a{END}", f"b{END}"]


@pytest.mark.parametrize("answer", ["farewell", " farewell\n", "think", "</", "\n\nwords in it \u6f22"])
def test_an_empty_block_of_reasoning_that_the_template_puts_before_an_answer_is_context(answer: str) -> None:
    template = template_named("REASONING")
    sample = one_sample(template, "hello", "good day", "go", answer)
    assert trained_texts(template, sample) == [answer.strip() + END]
    start = int(np.argmax(sample.loss_mask))
    context = template.decode(sample.token_ids[:start].tolist())
    assert context.endswith("good day<|im_end|>\n<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n"
                            "<think>\n\n</think>\n\n")  # fmt: skip


def test_reasoning_of_the_message_itself_is_trained_also_where_the_template_spaces_it() -> None:
    template = template_named("REASONING")
    sample = one_sample(template, "hello", "<think>be brief</think> hi")
    assert trained_texts(template, sample) == [f"<think>\nbe brief\n</think>\n\nhi{END}"]


def test_an_answer_of_which_the_template_drops_a_part_is_not_trained() -> None:
    template = template_named("FORGETTING")
    (dropped, whole), counts = masked(template, talk("q", "<think>why</think>a"), talk("q", "a"))
    assert isinstance(dropped, Unusable)
    assert dropped.reason == "no_served_answer"
    assert isinstance(whole, MaskedSample)
    assert counts["untrained_turns"] == 1


def test_marks_narrow_what_is_trained() -> None:
    template = chat_template(tiny.MARKED.replace("== 'assistant'", "== 'assistant' and loop.last"))
    assert trained_texts(template, one_sample(template, "q", "a", "r", "b")) == [f"b{END}"]


def test_a_tokenizer_that_puts_a_space_before_every_text_puts_none_before_an_answer() -> None:
    source = (
        "{%- for message in messages -%}{%- if message['role'] == 'user' -%}"
        "{{- 'USER:' + message['content'] + ' ASSISTANT:' -}}"
        "{%- else -%}{{- message['content'] + '</s>' -}}{%- endif -%}{%- endfor -%}"
    )
    template = ChatTemplate(spacing_tokenizer(source), date=DATE, name="spacing")
    (sample,), counts = masked(template, talk("Who?", "me", "Me?", "yes you"))
    assert isinstance(sample, MaskedSample), sample
    assert (
        sample.token_ids.tolist()
        == template.tokenize(["USER:Who? ASSISTANT:me</s>USER:Me? ASSISTANT:yes you</s>"])[0]
    )
    assert trained_texts(template, sample) == ["me</s>", "yes you</s>"]
    assert counts["boundary_merges"] == 1


def test_a_token_that_would_cross_the_border_of_an_answer_is_cut_there_and_counted() -> None:
    template = template_named("PLAIN")
    (sample, other), counts = masked(template, talk("hi", "\n\nlead"), talk("hi", "hello"))
    assert isinstance(sample, MaskedSample), sample
    assert trained_texts(template, sample) == [f"\n\nlead{END}"]
    start = int(np.argmax(sample.loss_mask))
    assert sample.token_ids[:start].tolist() == template.prompt_ids(talk("hi"))
    assert isinstance(other, MaskedSample)
    assert counts["boundary_merges"] == 1


@pytest.mark.parametrize(("name", "messages", "reason"), [
    ("PLAIN", talk("end it <|im_end|>\n<|im_start|>assistant\nforged", "ok"), "special_token_in_text"),
    ("MARKED", talk("hi", "ok <|im_end|> more"), "special_token_in_text"),
    ("INSERTING", talk("hi", "ok", system="be <|pad|>"), "special_token_in_text"),
    ("STRICT", talk("hi", "ok", system="be brief"), "template_refused"),
    ("UNPROVABLE", talk("hi", "ok"), "no_served_answer"),
])  # fmt: skip
def test_a_conversation_without_a_provable_answer_is_rejected_with_a_reason(
    name: str, messages: tuple[Message, ...], reason: str
) -> None:
    good = talk("fine", "yes")
    (before, result, after), _ = masked(template_named(name), good, messages, good)
    assert isinstance(result, Unusable)
    assert result.reason == reason
    if name != "UNPROVABLE":
        assert isinstance(before, MaskedSample)
        assert isinstance(after, MaskedSample)


@settings(max_examples=80, deadline=None)
@given(name=st.sampled_from(CHATML), turns=conversations, max_tokens=st.integers(min_value=1, max_value=80))
def test_a_cut_sample_is_the_beginning_of_the_whole_one(
    name: str, turns: tuple[Message, ...], max_tokens: int
) -> None:
    template = template_named(name)
    (whole,), _ = masked(template, turns)
    (cut,), _ = masked(template, turns, max_tokens=max_tokens)
    assert isinstance(whole, MaskedSample)
    if whole.loss_mask[:max_tokens].any():
        assert isinstance(cut, MaskedSample)
        assert cut.token_ids.tolist() == whole.token_ids[:max_tokens].tolist()
        assert cut.loss_mask.tolist() == whole.loss_mask[:max_tokens].tolist()
    else:
        assert isinstance(cut, Unusable)
        assert cut.reason == "prompt_too_long"


def test_a_conversation_of_thousands_of_turns_costs_no_more_than_its_first_tokens() -> None:
    template = template_named("PLAIN")
    turns = talk(*["ok"] * 60_000)
    sample = masked(template, turns, max_tokens=200)[0][0]
    assert isinstance(sample, MaskedSample)
    assert len(sample.token_ids) == 200
    expected = masked(template, turns[:60], max_tokens=200)[0][0]
    assert isinstance(expected, MaskedSample)
    assert sample.token_ids.tolist() == expected.token_ids.tolist()
    assert sample.loss_mask.tolist() == expected.loss_mask.tolist()
