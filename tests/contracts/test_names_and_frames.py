"""Keys, row ranges, frames, errors: pure parts on which both machines must agree."""

import re
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3_tasks.contracts.digests import release_digest
from eagle3_tasks.contracts.errors import (
    LEAVES,
    InvalidInput,
    RequestRefused,
    UnexpectedFailure,
    error_from_exit_code,
    error_from_record,
)
from eagle3_tasks.contracts.jobs import (
    Answer,
    JobSpec,
    check_job_key,
    check_run_key,
    find_frames,
    frame,
    job_key,
    run_key,
)
from eagle3_tasks.contracts.paths import RootLayout
from eagle3_tasks.contracts.rows import RowRange, parse_row_range, split_rows

ranges = st.tuples(st.integers(0, 10**9), st.integers(1, 10**6)).map(
    lambda p: RowRange(start=p[0], stop=sum(p))
)


@given(st.text(), st.text(), st.text(), st.none() | ranges)
def test_a_key_of_any_identifiers_is_a_safe_folder_name(
    dag: str, run: str, stage: str, rows: RowRange | None
) -> None:
    key = check_job_key(job_key(dag_id=dag, run_id=run, stage="s" + stage, rows=rows))
    assert re.fullmatch(r"[a-z0-9_-]{1,120}", key)
    assert check_run_key(run_key(dag_id=dag, run_id=run))


@pytest.mark.parametrize(
    "run_id", ["..", "-rf", "~", "a/b", "$(id)", "x; touch PWNED", "{{ 1+1 }}", "", "\n"]
)
def test_run_ids_of_any_content_stay_under_root(run_id: str) -> None:
    path = RootLayout(PurePosixPath("/data")).run(run_key(dag_id="d", run_id=run_id))
    assert path.parent == PurePosixPath("/data/runs")


def test_different_identifiers_give_different_keys() -> None:
    rows = RowRange(start=0, stop=5)
    keys = {
        job_key(dag_id="a", run_id="b", stage="extract"),
        job_key(dag_id="ab", run_id="", stage="extract"),
        job_key(dag_id="a", run_id="b", stage="extract", rows=rows),
        job_key(dag_id="a", run_id="b", stage="extract", rows=RowRange(start=0, stop=6)),
        job_key(dag_id="a", run_id="b", stage="extract", rows=rows, host="h2"),
        job_key(dag_id="a", run_id="b", stage="train"),
    }
    assert len(keys) == 6


@pytest.mark.parametrize(
    "key", ["", "..", "a/../../etc-" + "0" * 24, "extract", "x-" + "0" * 23, "x-" + "0" * 24 + "\n"]
)
def test_what_is_no_key_never_becomes_a_path(key: str) -> None:
    with pytest.raises(RequestRefused):
        RootLayout(PurePosixPath("/data")).job(key)


@given(st.integers(0, 5000), st.integers(1, 700))
def test_shards_cover_each_row_exactly_once(num_rows: int, rows_per_shard: int) -> None:
    shards = list(split_rows(num_rows, rows_per_shard))
    assert [row for shard in shards for row in range(shard.start, shard.stop)] == list(range(num_rows))
    assert all(len(shard) == rows_per_shard for shard in shards[:-1])


@given(ranges, st.integers(1, 10**9))
def test_a_range_is_read_back_from_its_folder_name(rows: RowRange, num_rows: int) -> None:
    assert parse_row_range(rows.name(num_rows)) == rows


def test_folder_names_sort_like_their_rows() -> None:
    names = [shard.name(2_000_000) for shard in split_rows(2_000_000, 100_000)]
    assert names == sorted(names)
    assert RowRange(start=2000, stop=4000).name(37_312) == "rows_002000-004000"


@given(st.lists(st.integers(0, 99), max_size=4), st.binary(max_size=40), st.integers(1, 7))
def test_answers_are_found_in_any_noise_and_any_cut(numbers: list[int], noise: bytes, size: int) -> None:
    dirt = noise.decode("latin-1")
    stream = dirt + dirt.join(frame("7f3a", Answer(id=n, body={"n": n})) for n in numbers) + dirt
    found: list[Answer] = []
    rest = ""
    for start in range(0, len(stream), size):
        answers, rest = find_frames("7f3a", rest + stream[start : start + size])
        found += answers
    assert [answer.id for answer in found] == numbers


def test_a_frame_of_another_connection_is_noise() -> None:
    assert find_frames("aaaa", frame("bbbb", Answer(id=1, body={})))[0] == []


def test_every_error_survives_the_wire_with_its_class() -> None:
    for leaf in LEAVES:
        again = error_from_record(leaf("text").record())
        assert type(again) is leaf
        assert str(again) == "text"
        assert type(error_from_exit_code(leaf.exit_code, "text")) is leaf
    assert len({leaf.exit_code for leaf in LEAVES}) == len(LEAVES)


def test_an_unknown_exit_code_is_the_nodes_problem() -> None:
    assert type(error_from_exit_code(1, "x")) is UnexpectedFailure
    assert InvalidInput("x").kind == "user"


@pytest.mark.parametrize(
    "change",
    [{"argv": ()}, {"argv": ("a\0b",)}, {"environment": {"A=B": "x"}}, {"key": "../x"}, {"run_key": "../x"}],
)
def test_a_job_that_cannot_be_started_is_refused(change: dict[str, object]) -> None:
    good: dict[str, object] = {
        "key": job_key(dag_id="d", run_id="r", stage="s"),
        "stage": "s",
        "run_key": run_key(dag_id="d", run_id="r"),
        "argv": ("true",),
    }
    JobSpec(**good)  # type: ignore[arg-type]
    with pytest.raises(RequestRefused):
        JobSpec(**{**good, **change})  # type: ignore[arg-type]


def test_a_release_is_named_by_its_files_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/b.py").write_text("x = 1\n")
    first = release_digest(tmp_path)
    (tmp_path / "a/__pycache__").mkdir()
    (tmp_path / "a/__pycache__/b.pyc").write_bytes(b"cache")
    assert release_digest(tmp_path) == first
    (tmp_path / "a/b.py").write_text("x = 2\n")
    second = release_digest(tmp_path)
    (tmp_path / "a/b.py").rename(tmp_path / "a/c.py")
    assert len({first, second, release_digest(tmp_path)}) == 3
