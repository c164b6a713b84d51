"""Token ids and loss masks: true exactly where a served target writes the token itself.

For each assistant turn three texts are rendered: P, the prompt that a server would send;
S, the conversation up to and with this answer; W, the whole conversation. The turn is
trained only if S begins with P, the rest of S is the message's text up to an end-of-turn
token, and W begins with P and this same answer. A template that rewrites its history (takes
reasoning out, say) fails this for earlier turns: they stay in the sample as context, untrained
and counted. The end-of-turn token is trained, what follows it is not; nor is what the template
puts between P and the message's text, such as an empty block of reasoning: no target writes it.

``{% generation %}`` marks, where the template has them, narrow the proven answers: what
is marked, and the end-of-turn token that follows it. Without marks the proven answers count.

The text is tokenized piece by piece between the borders of answers, so that the ids before
an answer are what serving sends, and the answer's ids are its own. Where the whole text
gives other ids, a token would have crossed a border: counted as ``boundary_merges``.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eagle3_tasks.data.conversations import Message
from eagle3_tasks.data.template import ChatTemplate, RenderFailure, Span

_MANY_MESSAGES = 32


class _Turn(NamedTuple):
    """An assistant's turn: P and S, and the message's own text."""

    prompt: str | RenderFailure
    served: str | RenderFailure
    content: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedSample:
    """Token ids int32 [T] and loss mask bool [T], with 0 < sum(mask) < T."""

    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unusable:
    """A conversation without a sample: a code to count by, and the fact in words."""

    reason: str
    message: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpannedText:
    """A rendered text up to the end of its last trained answer, and the spans of the answers."""

    text: str
    spans: tuple[Span, ...]


def mask_conversations(
    template: ChatTemplate,
    conversations: Sequence[Sequence[Message]],
    *,
    use_marks: bool,
    max_tokens: int,
    counts: collections.Counter[str],
) -> list[MaskedSample | Unusable]:
    """Make one sample of each conversation, or say why there is none.

    Args:
        template: renders and tokenizes.
        conversations: one batch; each ends with an assistant's turn.
        use_marks: whether the template's marks narrow the proven answers.
        max_tokens: a sample keeps its first so many tokens.
        counts: is told of ``untrained_turns``, ``boundary_merges`` and ``truncated``.
    """
    spanned = prove_answers(
        template, conversations, use_marks=use_marks, max_tokens=max_tokens, counts=counts
    )
    texts = [one for one in spanned if isinstance(one, SpannedText)]
    pieces = [_pieces(one) for one in texts]
    piece_ids = iter(template.tokenize([piece for row in pieces for piece, _ in row]))
    whole_ids = iter(template.tokenize([one.text for one in texts]))
    rows = iter(pieces)
    results: list[MaskedSample | Unusable] = []
    for one in spanned:
        if isinstance(one, Unusable):
            results.append(one)
            continue
        row = next(rows)
        ids = [next(piece_ids) for _ in row]
        results.append(_sample(template, row, ids, next(whole_ids), max_tokens=max_tokens, counts=counts))
    return results


def prove_answers(
    template: ChatTemplate,
    conversations: Sequence[Sequence[Message]],
    *,
    use_marks: bool,
    max_tokens: int,
    counts: collections.Counter[str],
) -> list[SpannedText | Unusable]:
    """Render each conversation and find the spans of text that a served target writes.

    Turns that can't lie within ``max_tokens`` are left out of a long conversation first: each
    turn is rendered with all before it, and the work would grow with their square.
    """
    shortened = [_shortened(template, messages, max_tokens) for messages in conversations]
    answers = [
        (number, index)
        for number, messages in enumerate(shortened)
        for index, message in enumerate(messages)
        if message.role == "assistant"
    ]
    prompts = template.render([shortened[row][:index] for row, index in answers], add_generation_prompt=True)
    served = template.render(
        [shortened[row][: index + 1] for row, index in answers], add_generation_prompt=False
    )
    turns: list[list[_Turn]] = [[] for _ in shortened]
    for (row, index), prompt, answer in zip(answers, prompts, served, strict=True):
        turns[row].append(_Turn(prompt, answer, shortened[row][index].content))
    results: list[SpannedText | Unusable] = []
    for row, messages in enumerate(shortened):
        forbidden = template.forbidden_text(messages)
        if forbidden is not None:
            message = f"a text holds {forbidden!r}, which the tokenizer would read as the token itself."
            results.append(Unusable(reason="special_token_in_text", message=message))
        else:
            results.append(_proven(template, turns[row], counts))
    return _narrowed(template, shortened, results) if use_marks else results


def _shortened(template: ChatTemplate, messages: Sequence[Message], max_tokens: int) -> Sequence[Message]:
    if len(messages) <= _MANY_MESSAGES:
        return messages
    # Around its text each message is at least one token more.
    lengths = np.cumsum(
        [len(ids) + 1 for ids in template.tokenize([message.content for message in messages])]
    )
    stop = int(np.searchsorted(lengths, max_tokens)) + 1
    while stop < len(messages) and messages[stop - 1].role != "assistant":
        stop += 1
    return messages[:stop]


def _proven(
    template: ChatTemplate, turns: list[_Turn], counts: collections.Counter[str]
) -> SpannedText | Unusable:
    for turn in turns:
        for text in (turn.prompt, turn.served):
            if isinstance(text, RenderFailure):
                return Unusable(
                    reason="template_refused", message=f"the chat template refuses it: {text.message}."
                )
    # The last turn's answer in its place is the whole conversation.
    whole = str(turns[-1].served)
    spans = [_proven_span(template, turn, whole) for turn in turns]
    proven = tuple(span for span in spans if span is not None)
    counts["untrained_turns"] += len(spans) - len(proven)
    if not proven:
        return Unusable(
            reason="no_served_answer",
            message="the chat template gives no answer the place and the text that it has in serving.",
        )
    return SpannedText(text=whole[: proven[-1][1]], spans=proven)


def _proven_span(template: ChatTemplate, turn: _Turn, whole: str) -> Span | None:
    prompt, served = str(turn.prompt), str(turn.served)
    if not served.startswith(prompt):
        return None
    start = len(prompt)
    end = template.find_end_of_turn(served, start)
    if end is None or not whole.startswith(prompt) or whole[start : end[1]] != served[start : end[1]]:
        return None
    body = served[start : end[0]]
    position = _content_start(body, turn.content)
    if position is None:
        return None
    # White space in between is the target's own: it has learnt to write what the prompt leaves out.
    return (start + position if body[:position].strip() else start), end[1]


def _content_start(body: str, content: str) -> int | None:
    """Find where ``content``, with which ``body`` ends, begins in it.

    Templates strip white space, add and change it: it is passed over.
    """
    text, core = body.rstrip(), content.strip()
    if text.endswith(core):
        return len(text) - len(core)
    position = len(text)
    for char in reversed("".join(core.split())):
        position -= 1
        while position >= 0 and text[position].isspace():
            position -= 1
        if position < 0 or text[position] != char:
            return None
    return position


def _narrowed(
    template: ChatTemplate,
    conversations: list[Sequence[Message]],
    proven: list[SpannedText | Unusable],
) -> list[SpannedText | Unusable]:
    rows = [row for row, one in enumerate(proven) if isinstance(one, SpannedText)]
    results = list(proven)
    for row, (text, marks) in zip(
        rows, template.marked_spans([conversations[row] for row in rows]), strict=True
    ):
        one = proven[row]
        if not isinstance(one, SpannedText):
            continue
        spans = _common_part(one, marks, template) if text.startswith(one.text) else ()
        results[row] = (
            SpannedText(text=one.text[: spans[-1][1]], spans=spans)
            if spans
            else Unusable(
                reason="no_marked_answer", message="the template's generation marks hold no served answer."
            )
        )
    return results


def _common_part(one: SpannedText, marks: list[Span], template: ChatTemplate) -> tuple[Span, ...]:
    spans: list[Span] = []
    for start, stop in one.spans:
        for mark_start, mark_stop in marks:
            common_start, common_stop = max(start, mark_start), min(stop, mark_stop)
            if common_start >= common_stop:
                continue
            # Marks around the text alone leave out the end-of-turn token, which the target writes too.
            if template.is_end_of_turn(one.text[common_stop:stop]):
                common_stop = stop
            spans.append((common_start, common_stop))
    return tuple(spans)


def _pieces(one: SpannedText) -> list[tuple[str, bool]]:
    pieces: list[tuple[str, bool]] = []
    position = 0
    for start, stop in one.spans:
        pieces += [(one.text[position:start], False), (one.text[start:stop], True)]
        position = stop
    return [(text, is_trained) for text, is_trained in pieces if text]


def _sample(
    template: ChatTemplate,
    pieces: list[tuple[str, bool]],
    piece_ids: list[list[int]],
    whole_ids: list[int],
    *,
    max_tokens: int,
    counts: collections.Counter[str],
) -> MaskedSample | Unusable:
    ids = [one for row in piece_ids for one in row]
    if ids != whole_ids:
        counts["boundary_merges"] += 1
        if template.decode(ids) != template.decode(whole_ids):
            # A tokenizer that puts a space before every text: pieces would hold spaces nobody sends.
            split = _split_whole(template, pieces, whole_ids)
            if split is None:
                return Unusable(
                    reason="no_token_border",
                    message="a token crosses the border of an answer, whichever way it is cut.",
                )
            ids, piece_ids = whole_ids, split
    lengths = [len(row) for row in piece_ids]
    loss_mask = np.repeat([is_trained for _, is_trained in pieces], lengths)[:max_tokens]
    token_ids = np.array(ids[:max_tokens], dtype=np.int32)
    if len(ids) > max_tokens:
        counts["truncated"] += 1
    if not loss_mask.any():
        first = next(index for index, (_, is_trained) in enumerate(pieces) if is_trained)
        num_before = sum(lengths[:first])
        return Unusable(
            reason="prompt_too_long",
            message=f"the first answer begins after {num_before} tokens; {max_tokens} are kept.",
        )
    if loss_mask.all():
        return Unusable(reason="no_prompt", message="nothing comes before the answer.")
    return MaskedSample(token_ids=token_ids, loss_mask=loss_mask)


def _split_whole(
    template: ChatTemplate, pieces: list[tuple[str, bool]], whole_ids: list[int]
) -> list[list[int]] | None:
    rows: list[list[int]] = []
    text = ""
    position = 0
    for piece, _ in pieces[:-1]:
        text += piece
        (ids,) = template.tokenize([text])
        if whole_ids[: len(ids)] != ids:
            return None
        rows.append(whole_ids[position : len(ids)])
        position = len(ids)
    return [*rows, whole_ids[position:]]
