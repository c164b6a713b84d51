"""Samples of regenerated conversations: what was sent and what the target wrote, id for id.

The sample is the final turn's prompt and answer. An earlier answer is trained where the final
prompt repeats that turn's prompt and answer token for token; where the template or the
tokenizer wrote them otherwise, it stays as context, untrained and counted.
"""

from __future__ import annotations

import collections

import numpy as np

from eagle3_tasks.data.answers_folder import AnsweredConversation
from eagle3_tasks.data.conversations import Conversation
from eagle3_tasks.data.masks import MaskedSample, Unusable
from eagle3_tasks.data.template import ChatTemplate

ANSWER_TOO_LONG = "answer_too_long"


def answered_sample(
    template: ChatTemplate,
    conversation: Conversation,
    answered: AnsweredConversation | None,
    *,
    max_tokens: int,
    counts: collections.Counter[str],
) -> MaskedSample | Unusable:
    """Make the sample of one conversation that the target has answered, or say why there is none."""
    asked = [message for message in conversation.messages if message.role != "assistant"]
    forbidden = template.forbidden_text(asked)
    if forbidden is not None:
        message = f"a text holds {forbidden!r}, which the tokenizer would read as the token itself."
        return Unusable(reason="special_token_in_text", message=message)
    if answered is None:
        return Unusable(reason="answer_missing", message="the target's answer was not written.")
    num_turns = len(conversation.messages) - len(asked)
    last = answered.turns[-1]
    if last.finish == "length":
        message = (
            f"answer {len(answered.turns)} reached its limit: {len(last.answer_ids)} tokens after a prompt "
            f"of {len(last.prompt_ids)}."
        )
        return Unusable(reason=ANSWER_TOO_LONG, message=message)
    if len(answered.turns) != num_turns:
        message = f"{len(answered.turns)} of {num_turns} turns are answered."
        return Unusable(reason="answer_missing", message=message)
    ends = set(template.end_of_turn_ids)
    for number, turn in enumerate(answered.turns, start=1):
        if not turn.answer_ids or turn.answer_ids[-1] not in ends:
            message = f"answer {number} does not end with an end-of-turn token."
            return Unusable(reason="answer_without_end", message=message)
    token_ids = np.array(last.prompt_ids + last.answer_ids, dtype=np.int32)
    loss_mask = np.zeros(len(token_ids), dtype=bool)
    for turn in answered.turns:
        start, stop = len(turn.prompt_ids), len(turn.prompt_ids) + len(turn.answer_ids)
        if np.array_equal(token_ids[:stop], np.array(turn.prompt_ids + turn.answer_ids, dtype=np.int32)):
            loss_mask[start:stop] = True
        else:
            counts["untrained_turns"] += 1
    if len(token_ids) > max_tokens:
        counts["truncated"] += 1
        token_ids, loss_mask = token_ids[:max_tokens], loss_mask[:max_tokens]
    if not loss_mask.any():
        message = f"the first trained answer begins after {max_tokens} tokens."
        return Unusable(reason="prompt_too_long", message=message)
    if loss_mask.all():
        return Unusable(reason="no_prompt", message="nothing comes before the answer.")
    return MaskedSample(token_ids=token_ids, loss_mask=loss_mask)
