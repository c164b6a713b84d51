"""Strict JSON for frozen dataclasses: what isn't declared is refused, by name.

A misspelt key that is silently ignored costs hours on a GPU host, so unknown keys,
missing keys, wrong types, other versions, doubled keys and non-finite numbers are all
errors that say where they stand and, for a misspelt key, which one was probably meant.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import functools
import json
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar, cast

from eagle3_tasks.contracts.errors import RequestRefused

T = TypeVar("T")

# Resolving annotations costs more than decoding; an agent decodes thousands of records a minute.
_type_hints = functools.cache(typing.get_type_hints)


def dumps(value: object, *, indent: int | None = None) -> str:
    """Encode dataclasses, enums, tuples and mappings. Keys keep their declared order."""
    return json.dumps(to_plain(value), indent=indent, ensure_ascii=False, allow_nan=False)


def canonical(value: object) -> bytes:
    """Encode for hashing: sorted keys, no spaces, UTF-8. Equal values give equal bytes."""
    text = json.dumps(
        to_plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return text.encode("utf-8", "surrogatepass")


def to_plain(value: object) -> Any:
    """Turn a dataclass tree into dicts, lists and scalars."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        mapping = cast("Mapping[object, object]", value)
        return {str(key): to_plain(item) for key, item in mapping.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in cast("list[object]", value)]
    return value


def loads(kind: type[T], text: str | bytes, *, where: str = "") -> T:
    """Decode ``text`` as ``kind``.

    Raises:
        RequestRefused: not JSON, or not of the declared form; the message names the place.
    """
    name = where or kind.__name__
    return from_plain(kind, loads_plain(text, where=name), where=name)


def loads_plain(text: str | bytes, *, where: str) -> Any:
    """Decode JSON with doubled keys and NaN refused.

    Raises:
        RequestRefused: not JSON; the message names ``where``, line and column.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise RequestRefused(
            f"{where}: not JSON: {error.msg} at line {error.lineno} column {error.colno}."
        ) from error
    except UnicodeDecodeError as error:
        raise RequestRefused(f"{where}: not UTF-8 at byte {error.start}.") from error
    except (ValueError, RecursionError) as error:
        raise RequestRefused(f"{where}: {error}") from error


def from_plain(kind: type[T], value: object, *, where: str) -> T:
    """Check ``value`` against the dataclass or annotation ``kind`` and build it."""
    return cast("T", _decode(kind, value, where))


def _decode(kind: Any, value: Any, where: str) -> Any:
    if kind is Any or kind is object:
        return value
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(cast("type", kind), value, where)
    origin = typing.get_origin(kind)
    arguments = typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        wanted = [argument for argument in arguments if argument is not type(None)]
        if len(wanted) != 1:
            raise TypeError(f"{where}: only 'X | None' unions are declared in contracts, not {kind}")
        return _decode(wanted[0], value, where)
    if origin is typing.Literal:
        if value not in arguments or isinstance(value, bool) != isinstance(arguments[0], bool):
            choices = ", ".join(repr(choice) for choice in arguments)
            raise RequestRefused(f"{where}: {value!r} is not one of {choices}.")
        return value
    if origin is tuple:
        return _decode_tuple(arguments, value, where)
    if origin in (dict, Mapping):
        if not isinstance(value, dict):
            raise RequestRefused(f"{where}: an object is needed, not {_name(value)}.")
        entries = cast("dict[str, Any]", value)
        return {key: _decode(arguments[1], item, f"{where}.{key}") for key, item in entries.items()}
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        try:
            return kind(value)
        except ValueError:
            choices = ", ".join(repr(member.value) for member in kind)
            raise RequestRefused(f"{where}: {value!r} is not one of {choices}.") from None
    return _decode_scalar(kind, value, where)


def _decode_dataclass(kind: type, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise RequestRefused(f"{where}: an object is needed, not {_name(value)}.")
    entries = cast("dict[str, Any]", value)
    hints = _type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for key in entries:
        if key not in fields:
            close = difflib.get_close_matches(key, fields, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else f" Known keys: {', '.join(fields)}."
            raise RequestRefused(f"{where}: unknown key {key!r}.{hint}")
    arguments: dict[str, Any] = {}
    for name, field in fields.items():
        if name in entries:
            arguments[name] = _decode(hints[name], entries[name], f"{where}.{name}")
            if name == "version" and field.default not in (dataclasses.MISSING, entries[name]):
                raise RequestRefused(
                    f"{where}: version {entries[name]}, but this release reads {field.default}. "
                    "Use the release that wrote it."
                )
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise RequestRefused(f"{where}: key {name!r} is missing.")
    return kind(**arguments)


def _decode_tuple(arguments: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise RequestRefused(f"{where}: a list is needed, not {_name(value)}.")
    items = cast("list[Any]", value)
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return tuple(_decode(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(items))
    if len(items) != len(arguments):
        raise RequestRefused(f"{where}: {len(arguments)} elements are needed, not {len(items)}.")
    return tuple(
        _decode(argument, item, f"{where}[{index}]")
        for index, (argument, item) in enumerate(zip(arguments, items, strict=True))
    )


def _decode_scalar(kind: Any, value: Any, where: str) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            value = float(value)
        except OverflowError:
            raise RequestRefused(f"{where}: {value!r} is too large.") from None
    if (isinstance(value, bool) and kind is not bool) or not isinstance(value, kind):
        raise RequestRefused(f"{where}: {_name(kind)} is needed, not {_name(value)} {value!r}.")
    if isinstance(value, float) and not math.isfinite(value):
        raise RequestRefused(f"{where}: {value!r} is not a finite number.")
    return value


_NAMES = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", dict: "an object",
          list: "a list", type(None): "null"}  # fmt: skip


def _name(value: Any) -> str:
    kind = value if isinstance(value, type) else type(value)
    return _NAMES.get(kind, kind.__name__)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [key for key, _ in pairs]
        doubled = sorted({key for key in names if names.count(key) > 1})
        raise ValueError(f"key {doubled[0]!r} stands twice in one object.")
    return result


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a finite number.")
