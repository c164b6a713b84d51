"""Decoding one set of questions with and without the draft model, and comparing the two."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Sequence

import torch
from transformers import DynamicCache

from eagle3_tasks.contracts.errors import EngineProblem
from eagle3_tasks.draft.model import DraftModel
from eagle3_tasks.evaluation.question_sets import QuestionSet
from eagle3_tasks.evaluation.speculative import LoopTarget, decode_greedily, speculate

logger = logging.getLogger(__name__)

# Two logits this close, relative to their size, may change places when the same token is
# computed alone or with others: in units of the last place.
_TIE_UNITS = 4.0
_MAX_RELATIVE_DIFFERENCE = 0.02
_MAX_ROUNDS_DIFFERENCE = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodedSet:
    """``answers`` are the speculative ones, which but for ties are the target's own.

    ``accepted`` has one tuple of rounds an answer: the rounds that wrote it, so both give
    one accept length. ``num_ties`` counts the answers that leave the greedy ones.
    """

    answers: tuple[tuple[int, ...], ...]
    accepted: tuple[tuple[int, ...], ...]
    num_ties: int

    @property
    def num_rounds(self) -> int:
        return sum(map(len, self.accepted))


def decode_set(
    target: LoopTarget,
    draft: DraftModel,
    questions: QuestionSet,
    *,
    draft_steps: int,
    max_new_tokens: int,
    end_ids: Collection[int],
    report: Callable[[int], None],
) -> DecodedSet:
    """Answer every question twice: by the target alone and speculatively.

    Raises:
        EngineProblem: the speculative answer holds a token that is neither the target's first
            choice nor tied with it.
    """
    answers: list[tuple[int, ...]] = []
    accepted: list[tuple[int, ...]] = []
    num_ties = 0
    for index, prompt_ids in enumerate(questions.prompts):
        greedy = decode_greedily(target, prompt_ids, max_new_tokens=max_new_tokens, end_ids=end_ids)
        answer = speculate(
            target, draft, prompt_ids,
            draft_steps=draft_steps, max_new_tokens=max_new_tokens, end_ids=end_ids,
        )  # fmt: skip
        if answer.ids != greedy:
            _check_ties(
                target,
                name=questions.name,
                index=index,
                prompt_ids=prompt_ids,
                greedy=greedy,
                speculative=answer.ids,
            )
            num_ties += 1
        answers.append(answer.ids)
        accepted.append(answer.accepted)
        report(index + 1)
    return DecodedSet(answers=tuple(answers), accepted=tuple(accepted), num_ties=num_ties)


def accept_length(accepted: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> float:
    """Tokens per round; the first token of an answer belongs to the prompt's own pass.

    Answers of one token take no round. Without any round, nothing was sped up: 1.
    """
    num_rounds = sum(map(len, accepted))
    return sum(len(answer) - 1 for answer in answers) / num_rounds if num_rounds else 1.0


def acceptance_by_step(accepted: Sequence[Sequence[int]], draft_steps: int) -> tuple[float, ...]:
    """Share of the rounds in which the target kept the guess of each step."""
    rounds = [one for answer in accepted for one in answer]
    return tuple(sum(one > step for one in rounds) / max(len(rounds), 1) for step in range(draft_steps))


def check_agreement(name: str, simulated_rounds: int, looped_rounds: int) -> None:
    """Refuse figures that contradict each other: then one of the two computes something else.

    Both count the rounds of the same answers, so accept lengths differ as their rounds do.
    Equal to 2 % is demanded; two rounds more or less of a small set are rounding.

    Raises:
        EngineProblem: they differ by more.
    """
    difference = abs(simulated_rounds - looped_rounds)
    if difference > max(_MAX_ROUNDS_DIFFERENCE, _MAX_RELATIVE_DIFFERENCE * looped_rounds):
        raise EngineProblem(
            f"set {name!r}: {simulated_rounds} rounds by captured states, {looped_rounds} by the decoding "
            "loop, more than 2 % apart. The exported draft model is not served as it was trained: compare "
            "aux_layer_ids and capture_dtype with the capture's."
        )


@torch.inference_mode()
def _check_ties(
    target: LoopTarget,
    *,
    name: str,
    index: int,
    prompt_ids: Sequence[int],
    greedy: Sequence[int],
    speculative: Sequence[int],
) -> None:
    """Let answers part at two logits that rounding may exchange, and judge what follows by itself.

    After a tie the two go on from different texts. So all of the speculative answer is read
    once, in one pass, and each of its tokens has to be the first choice there, or tie with it.
    """
    shorter = min(len(greedy), len(speculative))
    parting = next((at for at in range(shorter) if greedy[at] != speculative[at]), shorter)
    if parting == shorter:
        # One goes on where the other ends: no tie of logits explains that.
        raise _not_the_targets_own(name, index, parting, greedy, speculative)
    ids_BT = torch.tensor([[*prompt_ids, *speculative]], device=target.device)
    logits_BTV = target.model(input_ids=ids_BT, past_key_values=DynamicCache(), use_cache=True).logits
    # The token at place n is chosen by the logits of the one before it.
    logits_TV = logits_BTV[0, len(prompt_ids) - 1 : -1]
    best_T = logits_TV.amax(dim=-1).float()
    tie_T = _TIE_UNITS * target.rounding * best_T.abs().clamp(min=1.0)
    chosen_T = torch.tensor(speculative, device=logits_TV.device)
    gap_T = best_T - logits_TV.gather(-1, chosen_T[:, None])[:, 0].float()
    gap_T[parting] = torch.maximum(
        gap_T[parting], best_T[parting] - logits_TV[parting, greedy[parting]].float()
    )
    beyond = (~(gap_T <= tie_T)).nonzero().flatten().tolist()
    if beyond:
        raise _not_the_targets_own(name, index, beyond[0], greedy, speculative)
    logger.warning(
        "answers part at a tie set=%s question=%d token=%d gap=%.3g tie=%.3g",
        name, index, parting, float(gap_T[parting]), float(tie_T[parting]),
    )  # fmt: skip


def _not_the_targets_own(
    name: str, index: int, place: int, greedy: Sequence[int], speculative: Sequence[int]
) -> EngineProblem:
    return EngineProblem(
        f"set {name!r}, question {index}: speculative output leaves the target's own at token {place} "
        f"(greedy {list(greedy[place : place + 3])}, speculative {list(speculative[place : place + 3])}). "
        "The target's cache in transformers can't be cropped for this architecture, or an engine is faulty."
    )
