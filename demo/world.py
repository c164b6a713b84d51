"""Build the demo's world: a tiny target model that really answers, and its conversations.

``python -m demo.world --folder FOLDER`` makes, without a network, ``FOLDER/DIGEST/``:

    target/              a Llama of 1.8 M parameters that knows its answers by heart
    conversations.jsonl  the questions it was trained on, with their answers (ShareGPT)
    reworded.jsonl       held out: known questions in wordings that it never saw
    new.jsonl            held out: questions that it never saw
    world.json           counts, settings, how well the target learned, the text's licence

DIGEST is the content address of the recipe: the bytes of the source text and all settings.
A finished world is used again; an unfinished one is never visible under its name. The last
line on standard output is the folder.

This module owns the folder. ``world_text`` owns the text, ``world_target`` the model.
"""

import argparse
import contextlib
import dataclasses
import fcntl
import hashlib
import importlib.metadata
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from demo.world_target import (
    CHAT_TEMPLATE,
    TargetSettings,
    answer_greedily,
    new_target,
    render,
    train_target,
    train_tokenizer,
)
from demo.world_text import (
    CORPUS_LICENCE,
    HELD_OUT_WORDINGS,
    TRAINING_WORDINGS,
    Pair,
    choose_text,
    read_pairs,
    read_source,
    write_conversations,
)

__all__ = ["WorldError", "WorldSettings", "answer_greedily", "build_world", "world_digest"]

logger = logging.getLogger("demo.world")

# Raise it when a change of the code, not of a setting, gives another world.
RECIPE_VERSION = 1
SUMMARY = "world.json"
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "chatterbot-corpus")


class WorldError(Exception):
    """The recipe does not give a usable world; another try would not either."""


@dataclass(frozen=True, kw_only=True)
class WorldSettings:
    """What, with the source text, determines a world.

    Attributes:
        max_tokens: Longest conversation, in tokens, template included. 130 keeps the short
            answers with code; 64 would leave nearly all code out.
        num_threads: Part of the recipe because sums in another order give other weights.
        min_exact_share: Share of the training questions that the target has to answer
            exactly. Below it the draft model's results would say nothing.
    """

    max_tokens: int = 130
    num_reworded: int = 128
    num_new: int = 64
    num_threads: int = 2
    min_exact_share: float = 0.97
    seed: int = 1
    target: TargetSettings = field(default_factory=TargetSettings)


def world_digest(settings: WorldSettings | None = None) -> str:
    """Name a world by what determines it; the same on every machine."""
    return _digest(read_source(), settings or WorldSettings())


def build_world(
    folder: Path,
    settings: WorldSettings | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> Path:
    """Return the folder of the finished world, building it if it is missing.

    Of two builders that start at once, one builds and the other waits for it. A builder that
    is killed leaves nothing under the world's name; the next one removes its remains.

    Raises:
        WorldError: The target did not learn its answers.
    """
    settings = settings or WorldSettings()
    source = read_source()
    digest = _digest(source, settings)
    world = folder / digest
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / f".{digest}.lock"):
        if (world / SUMMARY).is_file():
            logger.info("world reused folder=%s", world)
            return world
        for remains in [*folder.glob(f".{digest}.building-*"), world]:
            shutil.rmtree(remains, ignore_errors=True)
        building = Path(tempfile.mkdtemp(prefix=f".{digest}.building-", dir=folder))
        try:
            with _torch_threads(settings.num_threads):
                _fill(building, digest, source, settings, clock)
            _open_to_readers(building)
            _sync_tree(building)
            building.rename(world)
        except BaseException:
            shutil.rmtree(building, ignore_errors=True)
            raise
        _sync(folder)
    return world


def _digest(source: dict[str, bytes], settings: WorldSettings) -> str:
    recipe = {
        "version": RECIPE_VERSION,
        "settings": dataclasses.asdict(settings),
        "wordings": [TRAINING_WORDINGS, HELD_OUT_WORDINGS],
        "template": CHAT_TEMPLATE,
        "source": {name: hashlib.sha256(content).hexdigest() for name, content in source.items()},
    }
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:16]


def _fill(
    folder: Path,
    digest: str,
    source: dict[str, bytes],
    settings: WorldSettings,
    clock: Callable[[], float],
) -> None:
    """Make everything that a world holds; ``world.json`` last."""
    started = clock()
    pairs = read_pairs(source)
    tokenizer = train_tokenizer(
        [text for pair in pairs for text in (pair.question, pair.answer)],
        vocab_size=settings.target.vocab_size,
    )

    def count_tokens(pair: Pair) -> int:
        return len(tokenizer.encode(render(pair.question, pair.answer) + "\n"))

    text = choose_text(
        pairs,
        count_tokens=count_tokens,
        max_tokens=settings.max_tokens,
        num_reworded=settings.num_reworded,
        num_new=settings.num_new,
        seed=settings.seed,
    )
    num_tokens = sum(count_tokens(pair) for pair in text.training)
    logger.info(
        "world text training=%d reworded=%d new=%d training_tokens=%d",
        len(text.training),
        len(text.reworded),
        len(text.new),
        num_tokens,
    )
    write_conversations(folder / "conversations.jsonl", text.training)
    write_conversations(folder / "reworded.jsonl", text.reworded)
    write_conversations(folder / "new.jsonl", text.new)

    target = new_target(tokenizer, settings.target)
    training_started = clock()
    train_target(target, tokenizer, text.training, settings.target, clock=clock)
    training_seconds = clock() - training_started

    exact = {
        name: _exact_share(target, tokenizer, held, settings.max_tokens)
        for name, held in (("training", text.training), ("reworded", text.reworded))
    }
    logger.info(
        "world answers exact_training=%.3f exact_reworded=%.3f",
        exact["training"],
        exact["reworded"],
    )
    if exact["training"] < settings.min_exact_share:
        raise WorldError(
            f"the target answers {exact['training']:.1%} of its training questions exactly after "
            f"{settings.target.num_steps} steps, {settings.min_exact_share:.1%} are needed. Raise "
            "num_steps or lower max_tokens."
        )
    target.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    summary = {
        "digest": digest,
        "recipe_version": RECIPE_VERSION,
        "settings": dataclasses.asdict(settings),
        "counts": {
            "training": len(text.training),
            "training_tokens": num_tokens,
            "reworded": len(text.reworded),
            "new": len(text.new),
            "parameters": sum(weight.numel() for weight in target.parameters()),
        },
        "exact_share": exact,
        "seconds": {
            "training": round(training_seconds, 1),
            "total": round(clock() - started, 1),
        },
        "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
        "licence": CORPUS_LICENCE,
    }
    (folder / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


def _exact_share(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    pairs: Sequence[Pair],
    max_new_tokens: int,
) -> float:
    """Share of the questions whose greedy answer is the expected one, to the character."""
    questions = [pair.question for pair in pairs]
    answers = answer_greedily(target, tokenizer, questions, max_new_tokens)
    num_exact = sum(answer == pair.answer for answer, pair in zip(answers, pairs, strict=True))
    return num_exact / max(1, len(pairs))


@contextlib.contextmanager
def _torch_threads(num_threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a file's lock; the kernel lets go of it however the process ends."""
    with path.open("w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("world waits for another builder lock=%s", path)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _open_to_readers(folder: Path) -> None:
    """Let other users read a world: temporary folders and saved weights are private."""
    for path in [*folder.rglob("*"), folder]:
        path.chmod(0o755 if path.is_dir() else 0o644)


def _sync_tree(folder: Path) -> None:
    """Bring a folder's files to the disk: the rename must not outlive what it names."""
    for path in [*folder.rglob("*"), folder]:
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def main(arguments: Sequence[str] | None = None) -> None:
    """Build a world and print its folder."""
    parser = argparse.ArgumentParser(prog="python -m demo.world", description="Build the demo's world, once.")
    parser.add_argument("--folder", type=Path, required=True, help="where worlds are kept, one folder each")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    transformers_logging.disable_progress_bar()
    try:
        world = build_world(options.folder)
    except WorldError as error:
        raise SystemExit(str(error)) from error
    print(world)


if __name__ == "__main__":
    main()
