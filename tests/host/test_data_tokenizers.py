"""Tiny tokenizers and chat templates of the kinds that are met, and proof that they are of these kinds."""

import datetime as dt
from functools import lru_cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from eagle3_tasks.data.conversations import Message
from eagle3_tasks.data.template import ChatTemplate

START, END, PAD = "<|im_start|>", "<|im_end|>", "<|pad|>"
DATE = dt.date(2026, 1, 31)

_HEAD = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' -}}"
)  # fmt: skip
_TAIL = "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"

PLAIN = _HEAD + "{{- message['content'] + '<|im_end|>\\n' -}}" + _TAIL
MARKED = (
    _HEAD + "{%- if message['role'] == 'assistant' -%}"
    "{%- generation -%}{{- message['content'] + '<|im_end|>' -}}{%- endgeneration -%}"
    "{%- else -%}{{- message['content'] + '<|im_end|>' -}}{%- endif -%}{{- '\\n' -}}" + _TAIL
)
# The marks take in the line break after the end-of-turn token, as some published templates do.
MARKED_WIDELY = MARKED.replace(
    "'<|im_end|>' -}}{%- endgeneration -%}", "'<|im_end|>\\n' -}}{%- endgeneration -%}"
)
# The marks leave out the end-of-turn token, as others do.
MARKED_NARROWLY = (
    _HEAD + "{%- if message['role'] == 'assistant' -%}"
    "{%- generation -%}{{- message['content'] -}}{%- endgeneration -%}"
    "{%- else -%}{{- message['content'] -}}{%- endif -%}{{- '<|im_end|>\\n' -}}" + _TAIL
)
INSERTING = (
    "{%- if messages[0]['role'] != 'system' -%}"
    "{{- '<|im_start|>system\\nToday is ' + strftime_now('%d %b %Y') + '.<|im_end|>\\n' -}}{%- endif -%}"
    + PLAIN
)
# Takes the reasoning out of every answer but the last, as reasoning targets' templates do.
REWRITING = (
    _HEAD + "{%- if message['role'] == 'assistant' and not loop.last -%}"
    "{{- message['content'].split('</think>')[-1] + '<|im_end|>\\n' -}}"
    "{%- else -%}{{- message['content'] + '<|im_end|>\\n' -}}{%- endif -%}" + _TAIL
)
# The prompt opens a block of reasoning that history closes at once.
THINKING = (
    _HEAD + "{%- if message['role'] == 'assistant' -%}{{- '<think></think>' -}}{%- endif -%}"
    "{{- message['content'] + '<|im_end|>\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n<think>' -}}{%- endif -%}"
)
# Gives the last answer a block of reasoning, an empty one where there is none, and strips the texts,
# as Qwen3's template does.
REASONING = (
    "{%- for message in messages -%}{{- '<|im_start|>' + message['role'] + '\\n' -}}"
    "{%- set content = message['content'] | trim -%}"
    "{%- if message['role'] == 'assistant' and loop.last -%}"
    "{%- set reasoning = '' -%}{%- if '</think>' in content -%}"
    "{%- set reasoning = content.split('</think>')[0].split('<think>')[-1] | trim -%}{%- endif -%}"
    "{{- '<think>\\n' + reasoning + '\\n</think>\\n\\n' + content.split('</think>')[-1] | trim -}}"
    "{%- else -%}{{- content.split('</think>')[-1] | trim -}}{%- endif -%}{{- '<|im_end|>\\n' -}}" + _TAIL
)
# Leaves the reasoning out of every answer.
FORGETTING = PLAIN.replace("message['content']", "message['content'].split('</think>')[-1]")
# The prompt says what history never repeats: no answer stands where serving puts it.
UNPROVABLE = PLAIN.replace(
    "{{- '<|im_start|>assistant\\n' -}}", "{{- '<|im_start|>assistant\\n<think>\\n' -}}"
)
STRICT = (
    "{%- for message in messages -%}{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}"
    "{{- raise_exception('roles must alternate user/assistant') -}}{%- endif -%}{%- endfor -%}" + PLAIN
)
WITHOUT_PROMPT = _HEAD + "{{- message['content'] + '<|im_end|>\\n' -}}{%- endfor -%}"
WITHOUT_END = _HEAD + "{{- message['content'] + '\\n' -}}" + _TAIL

TEXTS = (
    "What is the capital of France?",
    "Paris, of course.",
    "def main():\n    return 42\n",
    "user\nassistant\nsystem\n",
)


@lru_cache
def byte_level_core() -> Tokenizer:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator([*TEXTS * 4, "\n\n\n"] * 4, trainer)
    return core


def fast_tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(byte_level_core().to_str()), pad_token=PAD, eos_token=END
    )
    tokenizer.chat_template = template
    return tokenizer


def slow_tokenizer(template: str) -> ByT5Tokenizer:
    tokenizer = ByT5Tokenizer(
        extra_ids=0,
        eos_token=AddedToken(END, special=True),
        additional_special_tokens=[AddedToken(START, special=True)],
    )
    tokenizer.chat_template = template
    return tokenizer


def spacing_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Puts a space before every text that it is given, as SentencePiece does."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    core.decoder = decoders.Metaspace(prepend_scheme="always")
    alphabet = [chr(code) for code in range(32, 127)] + ["\n", "▁"]
    trainer = trainers.BpeTrainer(
        vocab_size=200,
        special_tokens=["<unk>", "[INST]", "[/INST]", "</s>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    core.train_from_iterator(TEXTS * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = template
    return tokenizer


def chat_template(template: str, *, date: dt.date = DATE) -> ChatTemplate:
    return ChatTemplate(fast_tokenizer(template), date=date, name="tiny")


def save_target(folder: Path, template: str | None = MARKED) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    fast_tokenizer(template).save_pretrained(folder)
    return folder


def talk(*texts: str, system: str | None = None) -> tuple[Message, ...]:
    """User and assistant in turn."""
    turns = [Message(role="assistant" if row % 2 else "user", content=text) for row, text in enumerate(texts)]
    return (*([] if system is None else [Message(role="system", content=system)]), *turns)


def test_a_saved_tokenizer_gives_the_same_ids_as_before(tmp_path: Path) -> None:
    loaded = AutoTokenizer.from_pretrained(save_target(tmp_path / "target"))
    text = f"{START}user\nWhat is é漢\U0001f600?{END}\n"
    assert loaded(text)["input_ids"] == fast_tokenizer(PLAIN)(text)["input_ids"]
    assert loaded.decode(loaded(text)["input_ids"]) == text


def test_the_slow_tokenizer_has_no_offsets() -> None:
    tokenizer = slow_tokenizer(PLAIN)
    assert not tokenizer.is_fast
    text = f"{START}user\nhé{END}\n"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
