"""Rows of every odd kind: what is kept, what is rejected, and why."""

import itertools
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_tasks.contracts.errors import InvalidInput
from eagle3_tasks.data import source_lines
from eagle3_tasks.data.conversations import Conversation, ConversationReader
from eagle3_tasks.data.source_lines import Reject


def sharegpt(*turns: tuple[str, Any], **keys: Any) -> dict[str, Any]:
    return {**keys, "conversations": [{"from": role, "value": text} for role, text in turns]}


def read(
    path: Path, content: bytes | list[Any], max_rows: int = 0
) -> tuple[list[Conversation], list[Reject], ConversationReader]:
    if isinstance(content, list):
        content = "".join(json.dumps(row) + "\n" for row in content).encode()
    path.write_bytes(content)
    reader = ConversationReader(path, max_rows=max_rows)
    items = list(reader)
    rows = [item for item in items if isinstance(item, Conversation)]
    return rows, [item for item in items if isinstance(item, Reject)], reader


def turns(row: Conversation) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in row.messages]


GOOD = sharegpt(("human", "hi"), ("gpt", "hello"), id="a")
SPOKEN = [("user", "hi"), ("assistant", "hello")]


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path: Path) -> None:
    rows, rejects, _ = read(tmp_path / "f", b"\xef\xbb\xbf" + json.dumps(GOOD).encode() + b"\n")
    assert [turns(row) for row in rows] == [SPOKEN]
    assert not rejects


def test_carriage_returns_and_blank_lines_are_passed_over_and_a_cut_last_line_is_named(
    tmp_path: Path,
) -> None:
    content = json.dumps(GOOD).encode() + b"\r\n\r\n  \n" + json.dumps(GOOD).encode()[:40]
    rows, rejects, reader = read(tmp_path / "f", content)
    assert len(rows) == 1
    assert [(reject.line, reject.reason) for reject in rejects] == [(4, "truncated_line")]
    assert reader.counts["blank_lines"] == 2


def test_a_last_line_without_a_line_end_counts_when_it_is_whole(tmp_path: Path) -> None:
    rows, rejects, _ = read(tmp_path / "f", json.dumps(GOOD).encode())
    assert (len(rows), len(rejects)) == (1, 0)


def test_a_top_level_system_message_comes_first(tmp_path: Path) -> None:
    row = sharegpt(("human", "1"), ("gpt", "one"), ("human", "2"), ("gpt", "two"), id="d", system="be brief")
    rows, _, _ = read(tmp_path / "f", [row])
    expected = [
        ("system", "be brief"),
        ("user", "1"),
        ("assistant", "one"),
        ("user", "2"),
        ("assistant", "two"),
    ]
    assert turns(rows[0]) == expected


@pytest.mark.parametrize("row", [
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]},
    {"conversations": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
                  {"role": "assistant", "content": ["hello"]}]},
    {"messages": None,
     "conversations": [{"from": "Human", "value": "hi"}, {"from": " GPT", "value": "hello"}]},
    sharegpt(("human", "hi"), ("gpt", "hello"), ("human", "and?")),
    sharegpt(("gpt", "welcome"), ("human", "hi"), ("gpt", "hello")),
    sharegpt(("system", " "), ("human", "hi"), ("gpt", "hello"), system=""),
    sharegpt(("human", "hi"), ("gpt", "hello"), ("gpt", "more"), ("human", "x"), ("gpt", "y")),
    sharegpt(("human", "hi"), ("gpt", "hello"), ("human", "use"), ("function_call", "{}"),
             ("observation", "4"), ("gpt", "4")),
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"},
                  {"role": "user", "content": "use"},
                  {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]},
])  # fmt: skip
def test_every_accepted_form_gives_the_same_conversation(tmp_path: Path, row: dict[str, Any]) -> None:
    rows, rejects, _ = read(tmp_path / "f", [row])
    assert not rejects
    assert turns(rows[0]) == SPOKEN
    assert rows[0].id == rows[0].content_id


@pytest.mark.parametrize(("row", "reason"), [
    ({"id": "r", "conversations": []}, "no_turns"),
    ({"id": "r", "conversations": None}, "no_turns"),
    ({"id": "r", "conversations": {"from": "human"}}, "no_turns"),
    ({"id": "r", "text": "hi"}, "no_turns"),
    (sharegpt(("human", "only user"), id="r"), "no_assistant_turn"),
    (sharegpt(("gpt", "only assistant"), id="r"), "no_user_turn"),
    (sharegpt(("human", "hi"), ("gpt", ""), id="r"), "empty_turn"),
    (sharegpt(("human", "\n \t"), ("gpt", "hello"), id="r"), "empty_turn"),
    (sharegpt(("human", "hi"), ("gpt", None), id="r"), "empty_turn"),
    ({"id": "r", "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None}]},
     "empty_turn"),
    (sharegpt(("human", "hi"), ("gpt", 42), id="r"), "not_text"),
    ({"id": "r", "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]},
                              {"role": "assistant", "content": "a cat"}]}, "not_text"),
    (sharegpt(("narrator", "hi"), ("gpt", "hello"), id="r"), "unknown_role"),
    ({"id": "r", "conversations": [{"value": "hi"}, {"from": "gpt", "value": "hello"}]}, "unknown_role"),
    ({"id": "r", "conversations": ["hi", "hello"]}, "bad_turn"),
    (sharegpt(("human", "use tool"), ("function_call", "{}"), ("observation", "42"), ("gpt", "42"), id="r"),
     "tool_turns"),
    (sharegpt(("system", "a"), ("human", "hi"), ("gpt", "hello"), id="r", system="b"), "two_system_texts"),
    (sharegpt(("human", "half \ud800"), ("gpt", "hello"), id="r"), "lone_surrogate"),
    (sharegpt(("human", "hi"), ("gpt", "hello"), id="r", system=["x", 3]), "not_text"),
])  # fmt: skip
def test_a_row_that_cannot_be_used_is_rejected_with_line_id_and_reason(
    tmp_path: Path, row: dict[str, Any], reason: str
) -> None:
    rows, rejects, reader = read(tmp_path / "f", [GOOD, row])
    assert len(rows) == 1
    assert [(reject.line, reject.id, reject.reason) for reject in rejects] == [(2, "r", reason)]
    assert rejects[0].message
    assert reader.reasons == {reason: 1}


@pytest.mark.parametrize(("line", "reason"), [
    (b"{", "not_json"),
    (b"}", "not_json"),
    (b"null", "not_an_object"),
    (b"[]", "not_an_object"),
    (b"12", "not_an_object"),
    (b'"text"', "not_an_object"),
    (b'{"id": "r", "id": "s", "conversations": []}', "duplicate_key"),
    (b'{"id": NaN, "conversations": []}', "not_json"),
    (b'{"id": "\xff\xfe"}', "not_utf8"),
    (b"[" * 200_000 + b"]" * 200_000, "too_deep"),
    (b'{"id": ' + b"9" * 10_000 + b"}", "not_json"),
    (b'{"id": "a\x01b"}', "not_json"),
])  # fmt: skip
def test_a_line_that_is_no_row_is_rejected_and_the_next_one_is_read(
    tmp_path: Path, line: bytes, reason: str
) -> None:
    rows, rejects, _ = read(tmp_path / "f", b"\n" + line + b"\n" + json.dumps(GOOD).encode() + b"\n")
    assert [(reject.line, reject.reason) for reject in rejects] == [(2, reason)]
    assert [turns(row) for row in rows] == [SPOKEN]


def test_an_overlong_line_is_skipped_without_being_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_lines, "MAX_LINE_BYTES", 1 << 20)
    path = tmp_path / "f"
    with path.open("wb") as file:
        for _ in range(40):
            file.write(b"x" * (1 << 20))
        file.write(b"\n" + json.dumps(GOOD).encode() + b"\n")
    tracemalloc.start()
    items = list(ConversationReader(path))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert isinstance(items[0], Reject)
    assert (items[0].line, items[0].reason) == (1, "line_too_long")
    assert isinstance(items[1], Conversation)
    assert peak < 8 << 20


def test_ids_that_are_missing_or_no_text_become_the_content_id(tmp_path: Path) -> None:
    texts = ["one", "two", "three", "four", "five"]
    given: list[dict[str, Any]] = [{}, {"id": 7}, {"id": None}, {"id": ""}, {"id": "x" * 1000}]
    source = [
        sharegpt(("human", text), ("gpt", "!"), **keys) for text, keys in zip(texts, given, strict=True)
    ]
    rows, _, reader = read(tmp_path / "f", source)
    assert [row.id for row in rows] == [row.content_id for row in rows]
    again, _, _ = read(tmp_path / "g", source[::-1])
    assert [row.id for row in again] == [row.id for row in rows][::-1]
    assert reader.counts["ids_from_content"] == 5


def test_the_same_id_with_another_text_is_renamed_and_counted(tmp_path: Path) -> None:
    rows, rejects, reader = read(tmp_path / "f", [GOOD, sharegpt(("human", "dup"), ("gpt", "!"), id="a")])
    assert not rejects
    assert [row.id for row in rows] == ["a", f"a-{rows[1].content_id}"]
    assert reader.counts["ids_twice_with_other_text"] == 1


def test_the_same_text_is_kept_once_whatever_its_id_or_form(tmp_path: Path) -> None:
    openai = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
    rows, rejects, reader = read(tmp_path / "f", [GOOD, GOOD, {**GOOD, "id": "b"}, openai])
    assert ([row.id for row in rows], rejects) == (["a"], [])
    assert reader.counts["duplicates"] == 3


def test_texts_are_kept_byte_for_byte(tmp_path: Path) -> None:
    text = "  \u2028\x85 na\u00efve e\u0301 \U0001f600\r\n\t\x00 "
    rows, _, _ = read(tmp_path / "f", [sharegpt(("human", text), ("gpt", text + "."))])
    assert turns(rows[0]) == [("user", text), ("assistant", text + ".")]


def test_a_row_limit_counts_rows_that_are_kept(tmp_path: Path) -> None:
    many = [sharegpt(("human", str(n)), ("gpt", "!")) for n in range(9)]
    rows, rejects, _ = read(tmp_path / "f", [{"conversations": []}, *many], max_rows=3)
    assert [turns(row)[0][1] for row in rows] == ["0", "1", "2"]
    assert [row.row for row in rows] == [0, 1, 2]
    assert len(rejects) == 1


@pytest.mark.parametrize("content", [
    json.dumps([GOOD, GOOD]).encode(),
    json.dumps([GOOD], indent=2).encode(),
    b"\xef\xbb\xbf[\n" + json.dumps(GOOD).encode() + b"\n]",
])  # fmt: skip
def test_one_json_array_is_refused_with_the_command_that_converts_it(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(InvalidInput, match=r"one JSON array.*jq -c"):
        read(tmp_path / "f", content)


def test_shuffled_rows_keep_their_content_ids(tmp_path: Path) -> None:
    source = [sharegpt(("human", f"question {n}"), ("gpt", "!"), id=f"r{n}") for n in range(6)]
    first, _, _ = read(tmp_path / "f", source)
    second, _, _ = read(tmp_path / "g", [source[n] for n in (3, 1, 5, 0, 2, 4)])
    assert {row.id: row.content_id for row in first} == {row.id: row.content_id for row in second}


def test_memory_does_not_grow_with_the_texts(tmp_path: Path) -> None:
    path = tmp_path / "f"
    with path.open("w") as file:
        for n in range(3000):
            file.write(json.dumps(sharegpt(("human", f"{n}" * 1000), ("gpt", "x" * 3000))) + "\n")
    tracemalloc.start()
    num_rows = sum(1 for _ in ConversationReader(path))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert num_rows == 3000
    assert path.stat().st_size > 15e6
    assert peak < 5e6


key_names = st.sampled_from(
    ["id", "system", "conversations", "messages", "from", "value", "role", "content", "type", "text"]
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(key_names, inner, max_size=5),
    max_leaves=20,
)
role_names = st.sampled_from(["human", "gpt", "user", "assistant", "system", "tool", "function_call", "x"])
odd_turns = st.lists(
    st.fixed_dictionaries({"from": role_names, "value": st.text(max_size=3) | st.none()}) | json_values,
    max_size=6,
)
odd_rows = json_values | st.fixed_dictionaries(
    {"conversations": odd_turns}, optional={"id": json_values, "system": json_values}
)


@settings(max_examples=150, deadline=None)
@given(st.lists(odd_rows, max_size=5), st.binary(max_size=30))
def test_any_row_is_a_conversation_a_duplicate_or_a_reject(
    tmp_path_factory: pytest.TempPathFactory, source: list[Any], tail: bytes
) -> None:
    content = b"\n" + "".join(json.dumps(row) + "\n" for row in source).encode() + tail
    rows, rejects, reader = read(tmp_path_factory.getbasetemp() / "any.jsonl", content)
    counts = reader.counts
    assert (
        counts["lines"] == counts["rows"] + counts["rejects"] + counts["duplicates"] + counts["blank_lines"]
    )
    assert (len(rows), len(rejects)) == (counts["rows"], counts["rejects"])
    assert len({row.id for row in rows}) == len({row.content_id for row in rows}) == len(rows)
    for row in rows:
        roles = [message.role for message in row.messages]
        spoken = [role for role in roles if role != "system"]
        assert spoken[0] == "user"
        assert roles[-1] == "assistant"
        assert ("assistant", "assistant") not in itertools.pairwise(roles)
        assert all(message.content.strip() for message in row.messages)
