"""The target's chat template and tokenizer: messages to exactly the ids that serving would send.

The day that a template may print is pinned, so that a dataset's name means the same
text tomorrow. Nothing here needs offsets of characters, so tokenizers in plain Python work too.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import re
from collections.abc import Sequence
from typing import Any

from eagle3_tasks.contracts.errors import InvalidInput, MissingSoftware
from eagle3_tasks.contracts.settings import Settings
from eagle3_tasks.data.conversations import Message
from eagle3_tasks.data.tokenizer_files import configured_stop_ids

_GENERATION_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_QUESTIONS = ("What stands on the hill?", "And behind it?")
_ANSWERS = ("An old mill of stone.", "Only the long road north.")

Span = tuple[int, int]
"""A half-open range of characters."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RenderFailure:
    """The template refused one conversation, with this message."""

    message: str


class ChatTemplate:
    """Renders and tokenizes conversations as the target's server does.

    Attributes:
        text: the Jinja template.
        end_of_turn_ids: ids after which the target's turn is over: those that the tokenizer and
            the generation configuration name, and the one with which the template closes an answer.
        has_generation_marks: the template marks the assistant's text with ``{% generation %}``,
            and the marks hold at least the last answer, whole, and no question.

    Raises:
        InvalidInput: no template, or one from which no loss mask can follow.
    """

    def __init__(self, tokenizer: Any, *, date: dt.date, name: str, stop_ids: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        self.name = name
        self._noon = dt.datetime.combine(date, dt.time(12))
        try:
            self.text = str(tokenizer.get_chat_template())
        except (ValueError, AttributeError) as error:
            raise InvalidInput(
                f"the tokenizer of {name} has no chat template, so there is no telling what its server would "
                "send. Add chat_template.jinja, or give the instruction-tuned target."
            ) from error
        self._specials = _special_tokens(tokenizer)
        self._stop_ids = sorted({*stop_ids, *_eos_ids(tokenizer)})
        self.end_of_turn_ids = self._find_end_of_turn_ids()
        ends = [self._token_text(one) for one in self.end_of_turn_ids]
        self._ends = re.compile("|".join(re.escape(end) for end in sorted(ends, key=len, reverse=True)))
        self._forbidden = _any_of({*self._specials.values(), *ends})
        self.has_generation_marks = self._has_sound_marks()

    @classmethod
    def load(cls, settings: Settings) -> ChatTemplate:
        """Load the target's tokenizer, from its folder or the hub.

        Raises:
            InvalidInput: it can't be loaded, or its template can't be used.
            MissingSoftware: its own code needs a package that is not there.
        """
        from transformers import AutoTokenizer

        target = settings.target
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(
                target.target_model,
                revision=target.target_revision or None,
                trust_remote_code=target.trust_remote_code,
            )
        except ImportError as error:
            raise MissingSoftware(f"the tokenizer of {target.target_model}: {error}") from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InvalidInput(
                f"the tokenizer of {target.target_model} can't be loaded: {error} Correct target_model, "
                "target_revision or trust_remote_code."
            ) from error
        return cls(
            tokenizer,
            date=dt.date.fromisoformat(settings.data.template_date),
            name=target.target_model,
            stop_ids=configured_stop_ids(settings),
        )

    def render(
        self, conversations: Sequence[Sequence[Message]], *, add_generation_prompt: bool
    ) -> list[str | RenderFailure]:
        """Render many conversations; one that the template refuses doesn't spoil the others."""
        plain = [_plain(messages) for messages in conversations]
        if not plain:
            return []
        try:
            return list(self._apply(plain, add_generation_prompt))
        except Exception:  # noqa: BLE001 - a template is foreign code: what it raises concerns one conversation
            return [self._render_one(messages, add_generation_prompt) for messages in plain]

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Give the ids that a server sends for ``messages`` before the target answers.

        Raises:
            InvalidInput: the template refuses these messages.
        """
        (text,) = self.render([messages], add_generation_prompt=True)
        if isinstance(text, RenderFailure):
            raise InvalidInput(f"the chat template of {self.name} refuses a conversation: {text.message}")
        return self.tokenize([text])[0]

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Give each text's ids, as a server tokenizes a rendered prompt: no token is added."""
        if not texts:
            return []
        encoded = self.tokenizer(
            list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False
        )
        return encoded["input_ids"]

    def decode(self, ids: Sequence[int]) -> str:
        """Give the text of ``ids``, special tokens included."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def forbidden_text(self, messages: Sequence[Message]) -> str | None:
        """Find the text of a special token inside the messages' contents.

        The tokenizer would turn it into the token itself, and a user's text could so end a
        turn or forge an assistant's.
        """
        for message in messages:
            found = self._forbidden.search(message.content)
            if found is not None:
                return found[0]
        return None

    def find_end_of_turn(self, text: str, start: int) -> Span | None:
        """Find the first end-of-turn token at or after ``start``."""
        found = self._ends.search(text, start)
        return None if found is None else found.span()

    def is_end_of_turn(self, text: str) -> bool:
        """Say whether ``text`` is one end-of-turn token and nothing else."""
        return self._ends.fullmatch(text) is not None

    def marked_spans(self, conversations: Sequence[Sequence[Message]]) -> list[tuple[str, list[Span]]]:
        """Render with the template's ``{% generation %}`` marks.

        Only for conversations that :meth:`render` has rendered.

        Returns:
            each text, and the marked spans in it.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        texts, spans = render_jinja_template(
            conversations=[_plain(messages) for messages in conversations],
            chat_template=self.text,
            return_assistant_tokens_mask=True,
            add_generation_prompt=False,
            **{**self.tokenizer.special_tokens_map, "strftime_now": self._noon.strftime},
        )
        return list(zip(texts, spans, strict=True))

    def _apply(self, plain: list[list[dict[str, str]]], add_generation_prompt: bool) -> list[str]:
        return self.tokenizer.apply_chat_template(
            plain,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            strftime_now=self._noon.strftime,
        )

    def _render_one(self, plain: list[dict[str, str]], add_generation_prompt: bool) -> str | RenderFailure:
        try:
            return self._apply([plain], add_generation_prompt)[0]
        except Exception as error:  # noqa: BLE001 - as above: it becomes a reject with this message
            return RenderFailure(message=f"{type(error).__name__}: {error}")

    def _token_text(self, token_id: int) -> str:
        return self._specials.get(token_id) or self.decode([token_id])

    def _find_end_of_turn_ids(self) -> tuple[int, ...]:
        """Learn from one exchange how the template closes an answer, and whether it opens one."""
        question = [Message(role="user", content=_QUESTIONS[0])]
        answered = [*question, Message(role="assistant", content=_ANSWERS[0])]
        (whole,) = self.render([answered], add_generation_prompt=False)
        prompt, bare = (self.render([question], add_generation_prompt=given)[0] for given in (True, False))
        for text in (whole, prompt, bare):
            if isinstance(text, RenderFailure):
                raise InvalidInput(
                    f"the chat template of {self.name} fails on a plain question: {text.message}"
                )
        whole, prompt, bare = str(whole), str(prompt), str(bare)
        start = whole.rfind(_ANSWERS[0])
        if start < 0:
            raise InvalidInput(
                f"the chat template of {self.name} leaves the assistant's text out. "
                "Give the template that the target is served with."
            )
        opening = whole[len(prompt) : start] if whole.startswith(prompt) else ""
        if prompt == bare and opening.strip():
            raise InvalidInput(
                f"the chat template of {self.name} ignores add_generation_prompt: a server would not send "
                f"{opening!r} before the answer. Add that text to the template under "
                "`{% if add_generation_prompt %}`."
            )
        tail = self.tokenize([whole[start + len(_ANSWERS[0]) :]])[0]
        ends = [one for one in tail if one in self._specials or one in self._stop_ids]
        if not ends:
            raise InvalidInput(
                f"the chat template of {self.name} closes an answer without an end-of-turn token, so the "
                "draft model would never learn to stop. Let the template write it after the assistant's text."
            )
        return tuple(sorted({ends[0], *self._stop_ids}))

    def _has_sound_marks(self) -> bool:
        if _GENERATION_MARK.search(self.text) is None:
            return False
        turns = zip(_QUESTIONS, _ANSWERS, strict=True)
        messages = [
            message
            for question, answer in turns
            for message in (Message(role="user", content=question), Message(role="assistant", content=answer))
        ]
        (rendered,) = self.render([messages], add_generation_prompt=False)
        if isinstance(rendered, RenderFailure):
            return False
        ((text, spans),) = self.marked_spans([messages])
        marked = [text[start:stop] for start, stop in spans]
        return (
            text == rendered
            and sum(_ANSWERS[-1] in one for one in marked) == 1
            and not any(question in one for one in marked for question in _QUESTIONS)
        )


def _plain(messages: Sequence[Message]) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in messages]


def _special_tokens(tokenizer: Any) -> dict[int, str]:
    added = {
        int(one): token.content for one, token in tokenizer.added_tokens_decoder.items() if token.special
    }
    named = zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
    return {**{one: str(text) for one, text in named if one is not None}, **added}


def _eos_ids(tokenizer: Any) -> list[int]:
    eos = tokenizer.eos_token_id
    return [] if eos is None else [eos]


def _any_of(texts: set[str]) -> re.Pattern[str]:
    """Match any of ``texts``, quickly also when there are hundreds: by their first two characters."""
    groups: dict[str, list[str]] = {}
    for text in sorted(texts, key=lambda one: (-len(one), one)):
        if text:
            groups.setdefault(text[:2], []).append(re.escape(text[2:]))
    return re.compile(
        "|".join(f"{re.escape(head)}(?:{'|'.join(tails)})" for head, tails in groups.items()) or r"(?!)"
    )
