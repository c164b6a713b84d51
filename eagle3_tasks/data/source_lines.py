"""Lines of a JSONL file, strictly: each is a JSON value or a reject that names its line.

Memory stays bounded whatever the file holds: a line above :data:`MAX_LINE_BYTES` is
skipped without being kept. Lines end with a line feed (a carriage return before it is
space to JSON); a byte-order mark is taken off the first line; blank lines are counted
and passed over.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any, BinaryIO

MAX_LINE_BYTES = 64 << 20
_BOM = b"\xef\xbb\xbf"
_SKIP_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reject:
    """A row that can't be used: where it stands, a code to count by, and the fact in words."""

    line: int
    id: str | None
    reason: str
    message: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceLine:
    """One line: its number from 1, its bytes, and its value or reject. A blank one has neither."""

    line: int
    num_bytes: int
    is_blank: bool = False
    value: Any | Reject = None


class _DuplicateKeyError(ValueError):
    pass


def read_source_lines(file: BinaryIO) -> Iterator[SourceLine]:
    """Yield every line of ``file`` in order."""
    number = 0
    while content := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(content) > MAX_LINE_BYTES:
            num_bytes = len(content) + _skip_line(file, content)
            yield SourceLine(
                line=number,
                num_bytes=num_bytes,
                value=_reject(
                    number, "line_too_long", f"{num_bytes} bytes; at most {MAX_LINE_BYTES} are read."
                ),
            )
            continue
        text = content.removeprefix(_BOM) if number == 1 else content
        if text.strip():
            yield SourceLine(line=number, num_bytes=len(content), value=_decode(number, text))
        else:
            yield SourceLine(line=number, num_bytes=len(content), is_blank=True)


def _skip_line(file: BinaryIO, content: bytes) -> int:
    skipped = 0
    while content and not content.endswith(b"\n"):
        content = file.readline(_SKIP_BYTES)
        skipped += len(content)
    return skipped


def _decode(number: int, content: bytes) -> Any | Reject:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = content[error.start]
        return _reject(number, "not_utf8", f"byte {error.start} is 0x{byte:02x}, which is not UTF-8 there.")
    try:
        return json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        fact = f"{error.msg.removesuffix(' at')} at character {error.pos}"
        if not content.endswith(b"\n"):
            return _reject(
                number,
                "truncated_line",
                f"the file ends in the middle of this line ({fact}).",
            )
        return _reject(number, "not_json", f"{fact}.")
    except _DuplicateKeyError as error:
        return _reject(number, "duplicate_key", str(error))
    except RecursionError:
        return _reject(number, "too_deep", "lists and objects are nested too deeply.")
    except ValueError as error:
        return _reject(number, "not_json", f"{error}.")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [key for key, _ in pairs]
        doubled = next(key for key in names if names.count(key) > 1)
        raise _DuplicateKeyError(f"key {doubled!r} stands twice in one object.")
    return result


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _reject(number: int, reason: str, message: str) -> Reject:
    return Reject(line=number, id=None, reason=reason, message=message)
