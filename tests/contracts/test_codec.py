"""Strict JSON: what isn't declared is refused, by name."""

import dataclasses
import json
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3_tasks.contracts import codec
from eagle3_tasks.contracts.errors import RequestRefused


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inner:
    count: int
    share: float = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outer:
    name: str
    kind: Literal["a", "b"] = "a"
    inner: Inner | None = None
    pairs: tuple[tuple[int, int], ...] = ()
    values: dict[str, float] = dataclasses.field(default_factory=dict)


texts = st.text(max_size=20)
numbers = st.floats(allow_nan=False, allow_infinity=False)
outers = st.builds(
    Outer,
    name=texts,
    kind=st.sampled_from(["a", "b"]),
    inner=st.none() | st.builds(Inner, count=st.integers(), share=numbers),
    pairs=st.lists(st.tuples(st.integers(), st.integers()), max_size=3).map(tuple),
    values=st.dictionaries(texts, numbers, max_size=3),
)


@given(outers)
def test_what_was_encoded_decodes_to_the_same_value(value: Outer) -> None:
    assert codec.loads(Outer, codec.dumps(value)) == value


@given(outers)
def test_the_order_of_keys_does_not_change_the_canonical_form(value: Outer) -> None:
    plain = codec.to_plain(value)
    assert codec.canonical(dict(reversed(plain.items()))) == codec.canonical(plain)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"name": "x", "nmae": 1}', "unknown key 'nmae'. Did you mean 'name'?"),
        ("{}", "key 'name' is missing"),
        ('{"name": 1}', "a text is needed, not a whole number 1"),
        ('{"name": "x", "name": "y"}', "key 'name' stands twice"),
        ('{"name": "x", "kind": "c"}', "'c' is not one of 'a', 'b'"),
        ('{"name": "x", "inner": {"count": true}}', "Outer.inner.count: a whole number is needed"),
        ('{"name": "x", "inner": {"count": 1.5}}', "Outer.inner.count: a whole number is needed"),
        ('{"name": "x", "inner": {"count": 1, "share": NaN}}', "NaN is not a finite number"),
        ('{"name": "x", "inner": {"count": 1, "share": 1e999}}', "inf is not a finite number"),
        ('{"name": "x", "pairs": [[1]]}', "Outer.pairs[0]: 2 elements are needed, not 1"),
        ('{"name": "x", "pairs": {}}', "a list is needed, not an object"),
        ('{"name": "x",\n "kind" "a"}', "line 2 column 9"),
        ("[" * 100_000, "Outer"),
        ("null", "an object is needed, not null"),
    ],
)
def test_a_wrong_message_is_refused_with_its_place(text: str, words: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        codec.loads(Outer, text)
    assert words in str(refused.value)


def test_bytes_that_are_no_text_are_refused() -> None:
    with pytest.raises(RequestRefused, match="not UTF-8 at byte"):
        codec.loads(Outer, b'{"name": "\xff\xfe"}')


def test_numbers_that_are_not_finite_are_never_written() -> None:
    with pytest.raises(ValueError, match="Out of range"):
        codec.dumps(Inner(count=1, share=float("inf")))


def test_keys_are_written_in_their_declared_order() -> None:
    assert list(json.loads(codec.dumps(Outer(name="x")))) == ["name", "kind", "inner", "pairs", "values"]
