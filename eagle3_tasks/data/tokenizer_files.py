"""Which files make a tokenizer, and the name of their content. Loads nothing."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import cast

from eagle3_tasks.contracts.errors import InvalidInput
from eagle3_tasks.contracts.settings import Settings

# Everything that can change a token id, the text of a prompt, or where an answer ends.
_NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tiktoken.model",
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
_PATTERNS = ("tokenization_*.py", "*.tiktoken", "additional_chat_templates/*.jinja")


def tokenizer_fingerprint(settings: Settings) -> str:
    """Name the tokenizer by its files' names and bytes, and a hub's copy by its commit as well.

    Raises:
        InvalidInput: there is no such folder or hub model, or it holds no tokenizer.
    """
    hasher = hashlib.sha256()
    folder = _tokenizer_folder(settings)
    if _is_hub_name(settings):
        # Files that are fetched only when they are needed (code) are named by the commit.
        hasher.update(f"commit\0{folder.name}\0".encode())
    for path in _files_of(folder, patterns=() if _is_hub_name(settings) else _PATTERNS):
        content = path.read_bytes()
        hasher.update(f"{path.name}\0{len(content)}\0".encode())
        hasher.update(content)
    return hasher.hexdigest()


def _is_hub_name(settings: Settings) -> bool:
    return not Path(settings.target.target_model).is_absolute()


def _tokenizer_folder(settings: Settings) -> Path:
    target = settings.target
    if _is_hub_name(settings):
        return _hub_folder(target.target_model, target.target_revision)
    folder = Path(target.target_model)
    if not folder.is_dir():
        raise InvalidInput(f"target_model {folder} is not a folder on this host. Correct the path.")
    return folder


def _files_of(folder: Path, *, patterns: tuple[str, ...]) -> list[Path]:
    named = [folder / name for name in _NAMES]
    matched = [path for pattern in patterns for path in folder.glob(pattern)]
    files = sorted(path for path in {*named, *matched} if path.is_file())
    if not any(path.name not in ("generation_config.json", "chat_template.jinja") for path in files):
        raise InvalidInput(
            f"{folder} holds no tokenizer: neither tokenizer.json nor tokenizer_config.json is there. "
            "Copy the target's tokenizer files into it."
        )
    return files


def _hub_folder(name: str, revision: str) -> Path:
    # Asking for each file brings the copy up to date, and works without network from a full copy.
    from transformers.utils.hub import cached_file

    found: str | None = None
    try:
        for file_name in _NAMES:
            path = cached_file(
                name,
                file_name,
                revision=revision or None,
                _raise_exceptions_for_missing_entries=False,
            )
            found = found or path
    except (OSError, ValueError) as error:
        raise InvalidInput(
            f"target_model {name!r} can't be had from the hub: {error} Correct name and revision, or give "
            "the absolute path of a folder on this host."
        ) from error
    if found is None:
        raise InvalidInput(f"target_model {name!r} holds no tokenizer. Correct name and revision.")
    return Path(found).parent


def configured_stop_ids(settings: Settings) -> tuple[int, ...]:
    """Give the ids at which ``generation_config.json`` lets the target stop; none without the file.

    Raises:
        InvalidInput: the file is not of the usual form.
    """
    path = _tokenizer_folder(settings) / "generation_config.json"
    if not path.is_file():
        return ()
    try:
        found = json.loads(path.read_bytes()).get("eos_token_id")
        ids = [] if found is None else found if isinstance(found, list) else [found]
        return tuple(int(one) for one in cast("list[int]", ids))
    except (ValueError, TypeError, AttributeError) as error:
        raise InvalidInput(
            f"{path} can't be read: {error!r}. Restore it from the target's own copy."
        ) from error
