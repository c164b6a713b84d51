"""Rows of a JSONL file to conversations, one at a time, with one stated policy for each odd form.

A row is a JSON object with ``conversations`` (ShareGPT) or ``messages`` (OpenAI); where it has
both, ``messages`` counts. A turn gives its role as ``role`` or ``from`` and its text as
``content`` or ``value``. A text is a string, or a list of text parts, which are joined as they
are. Texts are kept byte for byte. Other keys, ``reasoning_content`` among them, are not read.

Rejected, with line, id and reason: what is no such row, a turn without a text or with a blank
one (a blank system message is left out instead), an unknown role, text that is not Unicode
(lone surrogates), two different system messages at the top, no assistant turn, no user turn
before an assistant's.

Kept in part, and counted:

- turns before the first user's (the assistant speaks first) are left out: nobody asked for them;
- a conversation ends before the exchange that calls a tool: the row's text of a call is not
  what the target would write. If nothing comes before it, the row is rejected;
- of two assistant turns in a row the second, and all that follows, is left out;
- a user's turn at the end is left out: it has no answer to train on.

Ids: a text is kept. A missing, empty or overlong one, or one that is no text, becomes the content id,
which depends on roles and texts alone. The same id again with another text is renamed to
``ID-CONTENTID`` and counted. The same text again, under whatever id, is a duplicate: kept
once and counted. Of a row only two hashes stay in memory.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, cast

from eagle3_tasks.contracts.errors import InvalidInput
from eagle3_tasks.data.source_lines import Reject, read_source_lines

POLICY_VERSION = 1
CONTENT_ID_DIGITS = 24
MAX_ID_CHARACTERS = 256

Role = Literal["system", "user", "assistant", "tool"]
_ROLES: dict[str, Role] = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant",
    "model": "assistant",
    "tool": "tool", "function": "tool", "function_call": "tool", "tool_call": "tool", "observation": "tool",
    "function_response": "tool", "tool_response": "tool", "ipython": "tool",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One turn's role and text."""

    role: Role
    content: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """One row that is kept: it ends with an assistant's turn, which a user's comes before.

    ``content_id`` names the messages: 24 hexadecimal digits, the same in any file and order.
    """

    row: int
    id: str
    content_id: str
    messages: tuple[Message, ...]


class _Unusable(Exception):  # noqa: N818 - a verdict on one row, not an error of the program
    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class ConversationReader:
    """Reads one file, once. ``counts`` grows while the reader is iterated.

    Raises:
        InvalidInput: the file is not there, can't be read, or is one JSON array.
    """

    def __init__(self, path: Path, *, max_rows: int = 0) -> None:
        self.path = path
        self.counts: collections.Counter[str] = collections.Counter()
        self.reasons: collections.Counter[str] = collections.Counter()
        self._max_rows = max_rows
        self._contents: set[bytes] = set()
        self._ids: set[bytes] = set()

    def __iter__(self) -> Iterator[Conversation | Reject]:
        """Yield rows and rejects in the file's order, at most ``max_rows`` rows."""
        check_source(self.path)
        with self.path.open("rb", buffering=1 << 20) as file:
            for source in read_source_lines(file):
                self.counts["lines"] += 1
                self.counts["bytes"] += source.num_bytes
                if source.is_blank:
                    self.counts["blank_lines"] += 1
                    continue
                if source.line == 1:
                    self._refuse_array(source.value)
                result = (
                    source.value
                    if isinstance(source.value, Reject)
                    else self._read(source.line, source.value)
                )
                if isinstance(result, Reject):
                    self.counts["rejects"] += 1
                    self.reasons[result.reason] += 1
                if result is not None:
                    yield result
                if self._max_rows and self.counts["rows"] == self._max_rows:
                    return

    def _read(self, line: int, value: Any) -> Conversation | Reject | None:
        given = cast("dict[str, Any]", value).get("id") if isinstance(value, dict) else None
        given_id = given if _is_id(given) else None
        try:
            messages = parse_row(value, self.counts)
            content_id = content_id_of(messages)
        except _Unusable as verdict:
            return Reject(line=line, id=given_id, reason=verdict.reason, message=str(verdict))
        content = bytes.fromhex(content_id)
        if content in self._contents:
            self.counts["duplicates"] += 1
            return None
        self._contents.add(content)
        row = self.counts["rows"]
        self.counts["rows"] += 1
        return Conversation(
            row=row, id=self._unique_id(given_id, content_id), content_id=content_id, messages=messages
        )

    def _unique_id(self, given: str | None, content_id: str) -> str:
        if given is None:
            self.counts["ids_from_content"] += 1
        one = given or content_id
        if _id_hash(one) in self._ids:
            self.counts["ids_twice_with_other_text"] += 1
            while _id_hash(one) in self._ids:
                one = f"{one}-{content_id}"
        self._ids.add(_id_hash(one))
        return one

    def _refuse_array(self, value: Any) -> None:
        is_list = isinstance(value, list) and any(isinstance(one, dict) for one in cast("list[Any]", value))
        if not is_list and isinstance(value, Reject):
            with self.path.open("rb") as file:
                is_list = file.read(16).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")
        if is_list:
            raise InvalidInput(
                f"{self.path} is one JSON array, not one object a line. "
                "Convert it: jq -c '.[]' FILE > FILE.jsonl"
            )


def check_source(path: Path) -> None:
    """Refuse what can't be a file of conversations, before any work.

    Raises:
        InvalidInput: missing, a folder, unreadable or empty.
    """
    try:
        if not path.exists():
            raise InvalidInput(f"{path}: there is no such file on this host. Correct conversations_path.")
        if not path.is_file():
            raise InvalidInput(f"{path} is not a file. Give the path of one JSONL file.")
        if path.stat().st_size == 0:
            raise InvalidInput(f"{path} is empty (0 bytes). Give a file with one conversation a line.")
        with path.open("rb"):
            pass
    except PermissionError as error:
        raise InvalidInput(f"{path} can't be read: {error.strerror}. Let this user read it.") from error


def content_id_of(messages: Sequence[Message]) -> str:
    """Name the messages by roles and texts alone."""
    hasher = hashlib.sha256()
    for message in messages:
        try:
            content = message.content.encode()
        except UnicodeEncodeError as error:
            raise _Unusable(
                "lone_surrogate",
                f"a {message.role} text holds half of a surrogate pair at character {error.start}.",
            ) from error
        hasher.update(f"{message.role}\0{len(content)}\0".encode())
        hasher.update(content)
    return hasher.hexdigest()[:CONTENT_ID_DIGITS]


def parse_row(value: Any, counts: collections.Counter[str]) -> tuple[Message, ...]:
    """Turn one row's JSON value into messages by the module's policies."""
    if not isinstance(value, dict):
        raise _Unusable("not_an_object", f"the line holds {_kind(value)}, not an object.")
    entry = cast("dict[str, Any]", value)
    key = "messages" if entry.get("messages") is not None else "conversations"
    turns: Any = entry.get(key)
    if not isinstance(turns, list):
        raise _Unusable("no_turns", f"no list under 'conversations' or 'messages'; keys: {_some(entry)}.")
    if not turns:
        raise _Unusable("no_turns", f"{key!r} is an empty list.")
    messages, has_tool_turn = _parse_turns(cast("list[Any]", turns))
    messages = _with_system(entry.get("system"), messages)
    return _usable_part(messages, has_tool_turn=has_tool_turn, counts=counts)


def _parse_turns(turns: list[Any]) -> tuple[list[Message], bool]:
    messages: list[Message] = []
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, dict):
            raise _Unusable("bad_turn", f"turn {number} is {_kind(turn)}, not an object.")
        entry = cast("dict[str, Any]", turn)
        role_key, text_key = ("role", "content") if "role" in entry else ("from", "value")
        name = entry.get(role_key)
        role = _ROLES.get(name.strip().lower()) if isinstance(name, str) else None
        if role is None:
            raise _Unusable("unknown_role", f"turn {number} is of role {_short(name)}.")
        if role == "tool" or entry.get("tool_calls") or entry.get("function_call"):
            return messages, True
        text = _text(entry.get(text_key), number, role)
        if text.strip():
            messages.append(Message(role=role, content=text))
        elif role != "system":
            raise _Unusable("empty_turn", f"turn {number} ({role}) has a blank text.")
    return messages, False


def _text(value: Any, number: int, role: Role) -> str:
    if isinstance(value, str):
        return value
    if value is None:
        raise _Unusable("empty_turn", f"turn {number} ({role}) has no text.")
    if not isinstance(value, list):
        raise _Unusable("not_text", f"turn {number} ({role}) holds {_kind(value)}, not a text.")
    texts: list[str] = []
    for part in cast("list[Any]", value):
        entry: dict[str, Any] = cast("dict[str, Any]", part) if isinstance(part, dict) else {"text": part}
        text = entry.get("text")
        if not isinstance(text, str) or entry.get("type", "text") != "text":
            raise _Unusable(
                "not_text", f"turn {number} ({role}) has a part of type {_short(entry.get('type'))}."
            )
        texts.append(text)
    return "".join(texts)


def _with_system(system: Any, messages: list[Message]) -> list[Message]:
    if system is None:
        return messages
    text = _text(system, 0, "system")
    if not text.strip():
        return messages
    if messages and messages[0].role == "system":
        if messages[0].content != text:
            raise _Unusable("two_system_texts", "'system' and the first turn give different system messages.")
        return messages
    return [Message(role="system", content=text), *messages]


def _usable_part(
    messages: list[Message], *, has_tool_turn: bool, counts: collections.Counter[str]
) -> tuple[Message, ...]:
    has_answer = any(message.role == "assistant" for message in messages)
    first_user = next(
        (index for index, message in enumerate(messages) if message.role == "user"), len(messages)
    )
    kept = [message for message in messages[:first_user] if message.role == "system"]
    is_late_start = len(kept) < first_user
    is_repeated = False
    for message in messages[first_user:]:
        if message.role == "assistant" and kept[-1].role == "assistant":
            is_repeated = True
            break
        kept.append(message)
    num_kept = len(kept)
    while kept and kept[-1].role != "assistant":
        kept.pop()
    if not kept:
        if has_tool_turn:
            raise _Unusable("tool_turns", "a tool is called before the first answer in plain text.")
        if has_answer:
            raise _Unusable("no_user_turn", "no user turn comes before an assistant's.")
        raise _Unusable("no_assistant_turn", "no assistant turn: there is no answer to train on.")
    if is_late_start:
        counts["rows_without_leading_assistant_turns"] += 1
    if has_tool_turn:
        counts["rows_cut_before_a_tool_call"] += 1
    elif is_repeated:
        counts["rows_cut_at_a_second_answer"] += 1
    elif len(kept) < num_kept:
        counts["rows_without_trailing_user_turn"] += 1
    return tuple(kept)


def _is_id(value: Any) -> bool:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_ID_CHARACTERS:
        return False
    return not any("\ud800" <= character <= "\udfff" for character in value)


def _id_hash(one: str) -> bytes:
    return hashlib.blake2b(one.encode(), digest_size=12).digest()


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _some(entry: dict[str, Any]) -> str:
    names = [_short(key) for key in list(entry)[:8]]
    return ", ".join(names) or "none"
