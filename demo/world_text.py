"""The text of the demo's world: pairs of a question and its answer, and other wordings.

Owns what is read from the ``chatterbot-corpus`` package (English, BSD licence), the
choice of which pairs are trained on and which are held out, and the ShareGPT lines in
which later stages read them.
"""

import hashlib
import importlib.resources
import json
import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

CORPUS_LICENCE = (
    "Text: the English conversations of the PyPI package chatterbot-corpus 1.3.3 by "
    "Gunther Cox and contributors, BSD licence as declared in the package's metadata "
    "(the wheel carries no licence file)."
)

# A wording is what stands before and after the question. The two tables share no entry:
# a reworded question that is held out was never seen as a string, though most of its
# words were seen in other wordings.
TRAINING_WORDINGS = (
    ("Hello. ", ""),
    ("Hey, ", ""),
    ("Please tell me: ", ""),
    ("I have a question: ", ""),
    ("Can you help me? ", ""),
    ("So, ", ""),
    ("Well, ", ""),
    ("Okay, now ", ""),
    ("Good morning. ", ""),
    ("Do you know? ", ""),
    ("Listen: ", ""),
    ("I want to know: ", ""),
    ("", " Please."),
    ("", " Thank you."),
    ("", " Do you know?"),
    ("", " I want to know."),
    ("", " Tell me."),
    ("", " Can you help me?"),
    ("", " What do you think?"),
    ("", " It is a question."),
)
HELD_OUT_WORDINGS = (
    ("Hi. ", ""),
    ("Please help me: ", ""),
    ("Now tell me: ", ""),
    ("I have to know: ", ""),
    ("Good day. ", ""),
    ("", " Please tell me."),
    ("", " Can you tell me?"),
    ("", " I have to know."),
)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A question and the one answer that the world gives to it."""

    pair_id: str
    question: str
    answer: str


@dataclass(frozen=True, kw_only=True)
class WorldText:
    """The pairs of a world; no question of ``new`` is, by its key, one of ``training``."""

    training: tuple[Pair, ...]
    reworded: tuple[Pair, ...]
    new: tuple[Pair, ...]


def read_source() -> dict[str, bytes]:
    """Read the corpus' English files, by file name, in the order of their names."""
    try:
        folder = importlib.resources.files("chatterbot_corpus") / "data" / "english"
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the package chatterbot-corpus, the demo's text, is not installed. Install it: "
            "pip install --no-deps chatterbot-corpus==1.3.3"
        ) from error
    paths = sorted(folder.iterdir(), key=lambda path: path.name)
    return {path.name: path.read_bytes() for path in paths if path.name.endswith(".yml")}


def question_key(question: str) -> str:
    """What two spellings of one question have in common: its words, in lower case."""
    return " ".join(re.findall(r"\w+", question.casefold()))


def read_pairs(source: dict[str, bytes]) -> list[Pair]:
    """Take the first question and answer of every conversation, each question once.

    The later turns of this corpus are mostly alternative answers, not a dialogue, and a
    question that recurs has other answers. Only the first answer is kept: a model can
    learn one greedy answer to a question, not two.
    """
    pairs: dict[str, Pair] = {}
    for name, content in source.items():
        topic = name.removesuffix(".yml")
        for conversation in yaml.load(content, Loader=yaml.CSafeLoader)["conversations"]:
            question, answer = (str(turn).strip() for turn in (*conversation, "", "")[:2])
            key = question_key(question)
            if not key or not answer or key in pairs:
                continue
            fingerprint = hashlib.sha256(key.encode()).hexdigest()[:12]
            pairs[key] = Pair(pair_id=f"{topic}-{fingerprint}", question=question, answer=answer)
    return list(pairs.values())


def reword(question: str, wording: tuple[str, str]) -> str:
    """Put a wording around a question."""
    before, after = wording
    return f"{before}{question}{after}"


def choose_text(
    pairs: Sequence[Pair],
    *,
    count_tokens: Callable[[Pair], int],
    max_tokens: int,
    num_reworded: int,
    num_new: int,
    seed: int,
) -> WorldText:
    """Deal the pairs that are short enough into trained ones and held-out ones.

    Args:
        pairs: Pairs with distinct question keys.
        count_tokens: The length of a pair as a whole templated conversation, in tokens.
        max_tokens: Longer conversations are left out.
        num_reworded: How many trained questions are held out in another wording.
        num_new: How many questions are not trained on at all.
        seed: Decides the deal, with the order of ``pairs``.
    """
    chance = random.Random(seed)  # noqa: S311  a rerun has to draw the same
    short = [pair for pair in pairs if count_tokens(pair) <= max_tokens]
    if num_new >= len(short):
        raise ValueError(
            f"{len(short)} conversations have at most {max_tokens} tokens, but {num_new} are to "
            f"be held out. Raise max_tokens or hold out fewer than {len(short)}."
        )
    new_ids = {pair.pair_id for pair in chance.sample(short, num_new)}
    training = [pair for pair in short if pair.pair_id not in new_ids]
    trained_keys = {question_key(pair.question) for pair in training}
    reworded: list[Pair] = []
    for pair in chance.sample(training, len(training)):
        wording = chance.choice(HELD_OUT_WORDINGS)
        question = reword(pair.question, wording)
        # "Hi. Hello" may be a question of the corpus itself.
        if question_key(question) in trained_keys:
            continue
        reworded.append(Pair(pair_id=f"{pair.pair_id}-reworded", question=question, answer=pair.answer))
        if len(reworded) == num_reworded:
            break
    return WorldText(
        training=tuple(training),
        reworded=tuple(reworded),
        new=tuple(pair for pair in short if pair.pair_id in new_ids),
    )


def write_conversations(path: Path, pairs: Iterable[Pair]) -> None:
    """Write pairs as ShareGPT conversations, one JSON object a line."""
    with path.open("w", encoding="utf-8") as file:
        for pair in pairs:
            turns = [
                {"from": "human", "value": pair.question},
                {"from": "gpt", "value": pair.answer},
            ]
            row = {"id": pair.pair_id, "conversations": turns}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
