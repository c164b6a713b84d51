"""Folders are whole or absent; answers survive a crash at every byte."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from eagle3_tasks.contracts.errors import DamagedData, RequestRefused
from eagle3_tasks.contracts.rows import RowRange, split_rows
from eagle3_tasks.data.answers_folder import AnsweredConversation, AnsweredTurn, AnswersFolder
from eagle3_tasks.data.conversations import ConversationReader
from eagle3_tasks.data.conversations_folder import ConversationsFolder, write_conversations
from eagle3_tasks.data.dataset import Dataset, DatasetWriter, sample_name
from eagle3_tasks.host.sealed_folder import building, check_sealed, is_sealed


def answer(name: str, *ids: int) -> AnsweredConversation:
    turn = AnsweredTurn(prompt_ids=(1, 2), answer_ids=ids, finish="stop")
    return AnsweredConversation(content_id=name, turns=(turn,))


def write_dataset_folder(path: Path, samples: list[tuple[list[int], list[int]]]) -> Path:
    with building(path) as folder:
        assert folder is not None
        with DatasetWriter(folder) as writer:
            for ids, mask in samples:
                writer.add(np.array(ids, dtype=np.int32), np.array(mask, dtype=bool))
            writer.finish()
    return path


def conversations_folder(path: Path, num_rows: int) -> ConversationsFolder:
    source = path.parent / "source.jsonl"
    rows = [{"id": f"r{n}", "messages": [{"role": "user", "content": f"é{n}"},
             {"role": "assistant", "content": "!" * n + "\u2028."}]} for n in range(num_rows)]  # fmt: skip
    source.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{\n")
    with building(path) as folder:
        assert folder is not None
        write_conversations(folder, ConversationReader(source), lambda *_: None)
    return ConversationsFolder(path)


def build_from(path: Path, source: Path) -> None:
    with building(path) as folder:
        assert folder is not None
        (folder / "half").write_text("x")
        (folder / "whole").write_text(source.read_text())


def test_a_builder_that_fails_leaves_nothing_and_the_next_one_succeeds(tmp_path: Path) -> None:
    path = tmp_path / "made"
    with pytest.raises(FileNotFoundError):
        build_from(path, tmp_path / "not there")
    assert [one.name for one in tmp_path.iterdir()] == [".made.lock"]
    with building(path) as folder:
        assert folder is not None
        (folder / "whole").write_text("x")
    assert is_sealed(path)
    with building(path) as folder:
        assert folder is None


def test_what_a_killed_builder_left_is_removed_and_other_folders_are_not(tmp_path: Path) -> None:
    path = tmp_path / "made"
    for name in (".made.77.abcdef01.tmp", ".other.77.abcdef01.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").write_text("x")
    with building(path):
        pass
    assert sorted(one.name for one in tmp_path.iterdir()) == [".made.lock", ".other.77.abcdef01.tmp", "made"]


@pytest.mark.parametrize("damage", ["no seal", "torn seal", "short file", "no file"])
def test_a_folder_that_is_not_as_it_was_sealed_is_not_finished_and_is_made_again(
    tmp_path: Path, damage: str
) -> None:
    path = tmp_path / "made"
    with building(path) as folder:
        assert folder is not None
        (folder / "data").write_text("content")
    check_sealed(path)
    if damage == "no seal":
        (path / "complete.json").unlink()
    elif damage == "torn seal":
        (path / "complete.json").write_text('{"version": 1,')
    elif damage == "short file":
        (path / "data").write_text("short")
    else:
        (path / "data").unlink()
    assert not is_sealed(path)
    with pytest.raises((DamagedData, RequestRefused)):
        check_sealed(path)
    with building(path) as folder:
        assert folder is not None
        (folder / "data").write_text("content")
    assert is_sealed(path)


def test_files_and_folders_are_private(tmp_path: Path) -> None:
    path = tmp_path / "new" / "made"
    with building(path) as folder:
        assert folder is not None
        (folder / "data").write_text("x")
    AnswersFolder(path.parent / "answers").append(RowRange(start=0, stop=1), [answer("a", 3)])
    for one in path.parent.parent.rglob("new/**/*"):
        assert one.stat().st_mode & 0o777 == (0o700 if one.is_dir() else 0o600), one
    assert path.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("rows_per_shard", [1, 3, 7, 100])
def test_ranges_give_every_conversation_once_and_in_order(tmp_path: Path, rows_per_shard: int) -> None:
    folder = conversations_folder(tmp_path / "c", 20)
    found = [row for rows in split_rows(folder.num_rows, rows_per_shard) for row in folder.read(rows)]
    assert [row.row for row in found] == list(range(20))
    assert [row.messages[1].content for row in found] == ["!" * n + "\u2028." for n in range(20)]
    assert [(one.line, one.reason) for one in folder.first_rejects(5)] == [(21, "not_json")]
    with pytest.raises(RequestRefused, match="which has 20"):
        next(folder.read(RowRange(start=19, stop=21)))


def test_a_line_that_was_changed_afterwards_is_found(tmp_path: Path) -> None:
    folder = conversations_folder(tmp_path / "c", 3)
    path = folder.path / "rows.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"row": 1', b'"row": 2'))
    with pytest.raises(DamagedData, match="row 2 stands where row 1"):
        list(folder.read(RowRange(start=0, stop=3)))


def test_answers_written_by_one_choice_of_shards_are_found_by_another(tmp_path: Path) -> None:
    folder = AnswersFolder(tmp_path / "answers")
    assert folder.read_committed(RowRange(start=0, stop=10)) == {}
    folder.append(RowRange(start=0, stop=4), [answer("a", 3), answer("b", 4)])
    folder.append(RowRange(start=4, stop=8), [answer("c", 5)])
    folder.append(RowRange(start=0, stop=4), [answer("d", 6)])
    folder.append(RowRange(start=0, stop=4), [])
    assert set(folder.read_committed(RowRange(start=0, stop=3))) == {"a", "b", "d"}
    assert set(folder.read_committed(RowRange(start=3, stop=5))) == {"a", "b", "c", "d"}
    assert set(folder.read_committed(RowRange(start=8, stop=9))) == set()
    assert folder.read_committed(RowRange(start=4, stop=5))["c"] == answer("c", 5)


def test_a_crash_at_any_byte_of_an_append_loses_only_what_was_being_written(tmp_path: Path) -> None:
    rows = RowRange(start=0, stop=4)
    folder = AnswersFolder(tmp_path / "answers")
    folder.append(rows, [answer("a", 3)])
    path = folder.path / "answers-000000-000004.jsonl"
    first = path.read_bytes()
    folder.append(rows, [answer("b", 4)])
    both = path.read_bytes()
    before = folder.fingerprint()
    for cut in range(len(first), len(both)):
        path.write_bytes(both[:cut])
        assert set(folder.read_committed(rows)) == {"a"}
        assert folder.fingerprint() != before
        folder.append(rows, [answer("b", 4)])
        assert path.read_bytes() == both
    assert folder.fingerprint() == before


@pytest.mark.parametrize("line", [
    "{}", "3", '{"content_id": "a", "turns": []}', '{"content_id": 1, "turns": [{}]}',
    '{"content_id": "a", "turns": [{"prompt_ids": [1], "answer_ids": [-1], "finish": "stop"}]}',
    '{"content_id": "a", "turns": [{"prompt_ids": [1], "answer_ids": [1], "finish": "maybe"}]}',
])  # fmt: skip
def test_a_whole_line_that_is_no_answer_is_named(tmp_path: Path, line: str) -> None:
    rows = RowRange(start=0, stop=4)
    folder = AnswersFolder(tmp_path / "answers")
    folder.append(rows, [answer("a", 3)])
    with (folder.path / "answers-000000-000004.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(DamagedData, match=r"answers-000000-000004\.jsonl line 2"):
        folder.read_committed(rows)


samples = st.lists(
    st.lists(st.tuples(st.integers(0, 200_000), st.booleans()), min_size=2, max_size=8)
    .map(lambda pairs: ([one for one, _ in pairs], [int(two) for _, two in pairs]))
    .filter(lambda sample: 0 < sum(sample[1]) < len(sample[1])),
    min_size=1,
    max_size=8,
)  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(samples)
def test_a_dataset_gives_back_each_different_sample_once(
    tmp_path_factory: pytest.TempPathFactory, given_samples: list[tuple[list[int], list[int]]]
) -> None:
    path = write_dataset_folder(tmp_path_factory.mktemp("d") / "dataset", given_samples)
    dataset = Dataset(path)
    expected = list({(tuple(ids), tuple(mask)): (ids, mask) for ids, mask in given_samples}.values())
    rows = range(dataset.num_samples)
    assert [(dataset.token_ids(row).tolist(), dataset.loss_mask(row).tolist()) for row in rows] == [
        (ids, [bool(one) for one in mask]) for ids, mask in expected
    ]
    assert dataset.lengths().tolist() == [len(ids) for ids, _ in expected]
    assert [dataset.sample(row) for row in rows] == [sample_name(ids) for ids, _ in expected]
    stored = load_file(path / "tokens.safetensors")
    assert {name: str(array.dtype) for name, array in stored.items()} == {
        "input_ids": "int32", "loss_mask": "uint8", "offsets": "int64",
    }  # fmt: skip
    assert stored["input_ids"].tolist() == [one for ids, _ in expected for one in ids]


def test_a_samples_name_is_the_hash_of_its_ids_as_little_endian_int32() -> None:
    assert sample_name([1, 2, 70_000]) == sample_name(np.array([1, 2, 70_000], dtype=np.int64))
    # Golden: names are stored in captures and must not change.
    assert sample_name([1, 2, 3]) == "4636993d3e1da4e9d6b8f87b79e8f7c6"


def test_distinct_trained_tokens_count_what_lies_under_the_mask(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    with DatasetWriter(tmp_path / "d") as writer:
        assert writer.add(np.array([9, 1, 2], dtype=np.int32), np.array([False, True, True]))
        assert writer.add(np.array([9, 2, 900_000], dtype=np.int32), np.array([False, True, True]))
        assert writer.add(np.array([9, 2, 900_000], dtype=np.int32), np.array([False, False, True]))
        assert not writer.add(np.array([9, 1, 2], dtype=np.int32), np.array([False, True, True]))
    assert writer.num_distinct_trained_tokens == 3
    assert (writer.num_samples, writer.num_duplicates, writer.num_trained_tokens) == (3, 1, 5)


def test_a_truncated_dataset_is_refused(tmp_path: Path) -> None:
    path = write_dataset_folder(tmp_path / "d", [([1, 2, 3], [0, 1, 1])])
    tokens = path / "tokens.safetensors"
    content = tokens.read_bytes()
    tokens.write_bytes(content[:-1])
    with pytest.raises(DamagedData, match=r"tokens\.safetensors has"):
        Dataset(path)
    tokens.write_bytes(b"\xff" * 8 + content[8:])
    with pytest.raises(DamagedData, match="header"):
        Dataset(path)
