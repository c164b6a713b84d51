"""The target's files: what they say about it, and a name for their content. Loads no weights."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from eagle3_tasks.contracts.errors import InvalidInput
from eagle3_tasks.contracts.paths import RootLayout
from eagle3_tasks.contracts.settings import Settings
from eagle3_tasks.engines.interface import TargetDescription
from eagle3_tasks.engines.weight_files import check_whole, content_digests, weight_files

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tiktoken.model")


def is_hub_name(settings: Settings) -> bool:
    return not Path(settings.target.target_model).is_absolute()


def read_target_description(settings: Settings) -> TargetDescription:
    """Read the target's dimensions from its configuration.

    Raises:
        InvalidInput: no such folder, or files are missing or can't be read.
    """
    path = _config_path(settings)
    config = _read_json(path)
    # A wrapped or multimodal model keeps the text model's dimensions one level down.
    inner = next(
        (config[key] for key in ("text_config", "llm_config", "language_config") if key in config), None
    )
    text = cast("dict[str, Any]", inner if isinstance(inner, dict) else config)
    architectures = config.get("architectures") or text.get("architectures")
    if not architectures:
        raise InvalidInput(f"{path} names no architecture. Give the folder of a whole causal language model.")
    return TargetDescription(
        architecture=architectures[0],
        model_type=str(config.get("model_type", "")),
        num_layers=_number(path, text, "num_hidden_layers", "n_layer", "num_layers"),
        hidden_size=_number(path, text, "hidden_size", "n_embd", "d_model"),
        vocab_size=_number(path, {**config, **text}, "vocab_size"),
        max_positions=int(text.get("max_position_embeddings") or text.get("n_positions") or 0),
        text_config=text,
    )


def check_target_folder(settings: Settings) -> None:
    """Refuse a target that can't be loaded, before anything is computed.

    Of a hub name only the configuration is looked at.

    Raises:
        InvalidInput: the message names what is missing and how to mend it.
    """
    read_target_description(settings)
    if is_hub_name(settings):
        return
    folder = _config_path(settings).parent
    weights = weight_files(folder)
    if not weights:
        pickled = sorted(path.name for path in folder.glob("*.bin"))
        found = (
            f" Only pickled weights are there ({pickled[0]}): convert them, pickles are not loaded."
            if pickled
            else ""
        )
        raise InvalidInput(
            f"{folder} holds no weights: no *.safetensors file.{found} Copy the whole model into it."
        )
    for path in weights:
        if (
            path.is_file()
            and path.stat().st_size < 1024
            and path.read_bytes().startswith(b"version https://git-lfs")
        ):
            raise InvalidInput(f"{path} is a Git LFS pointer, not weights. Run `git lfs pull` in {folder}.")
    check_whole(weights)
    index = folder / INDEX
    if index.exists():
        mapped: Mapping[str, str] = _read_json(index).get("weight_map", {})
        absent = sorted(name for name in set(mapped.values()) if not (folder / name).exists())
        if absent:
            raise InvalidInput(
                f"{folder} lacks {len(absent)} weight files that {INDEX} names, such as {absent[0]}. Copy "
                "them."
            )
    if not any((folder / name).exists() for name in _TOKENIZER_FILES):
        raise InvalidInput(
            f"{folder} holds no tokenizer: none of {', '.join(_TOKENIZER_FILES)}. Copy the target's "
            "tokenizer files."
        )


def target_fingerprint(settings: Settings) -> str:
    """Name the target by its content: configuration, weights and, where it is trusted, its code.

    Every byte of the weights counts: a training that left most of them as they were has the
    same names and sizes. They are read once, and what is known of them lies under ROOT. A
    model of the hub is named by its name and commit.

    Raises:
        InvalidInput: no such folder or model, or a file can't be read.
        DiskProblem: what is known can't be written under ROOT.
    """
    path = _config_path(settings)
    if is_hub_name(settings):
        # transformers keeps each commit in a folder of that name.
        return hashlib.sha256(f"hub\0{settings.target.target_model}\0{path.parent.name}".encode()).hexdigest()
    hasher = hashlib.sha256(path.read_bytes())
    weights = weight_files(path.parent)
    digests = content_digests(weights, RootLayout(Path(settings.host.root)).fingerprints)
    for weight_file, digest in zip(weights, digests, strict=True):
        hasher.update(f"\0{weight_file.name}\0{digest}".encode())
    for code in sorted(path.parent.rglob("*.py")) if settings.target.trust_remote_code else ():
        digest = hashlib.sha256(code.read_bytes()).hexdigest()
        hasher.update(f"\0{code.relative_to(path.parent)}\0{digest}".encode())
    return hasher.hexdigest()


def _config_path(settings: Settings) -> Path:
    target = settings.target
    if is_hub_name(settings):
        return _hub_config(target.target_model, target.target_revision)
    folder = Path(target.target_model)
    if not folder.is_dir():
        raise InvalidInput(
            f"target_model {folder} is not a folder on this host. Correct the path, or give a hub name."
        )
    if not (folder / CONFIG).is_file():
        raise InvalidInput(
            f"{folder} holds no {CONFIG}, so it is not a model. Give the folder of the target model."
        )
    return folder / CONFIG


@functools.lru_cache(maxsize=16)
def _hub_config(name: str, revision: str) -> Path:
    from transformers.utils.hub import cached_file

    try:
        path = cached_file(name, CONFIG, revision=revision or None)
    except (OSError, ValueError) as error:
        raise InvalidInput(
            f"target_model {name!r} can't be had from the hub: {error} Correct name and revision, or give "
            "the absolute path of a folder on this host."
        ) from error
    return Path(cast("str", path))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidInput(
            f"{path} can't be read ({error}). Copy it again from the model's source."
        ) from error
    if not isinstance(value, dict):
        raise InvalidInput(f"{path} is not a JSON object. Copy it again from the model's source.")
    return cast("dict[str, Any]", value)


def _number(path: Path, config: Mapping[str, Any], *keys: str) -> int:
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and value > 0:
            return value
    raise InvalidInput(f"{path} does not say {keys[0]}. Only causal language models can be targets.")
