"""A second reader, written from ``docs/storage-format.md`` alone, against what the product wrote.

It uses the standard library and safetensors; nothing of the product is imported by it.
"""

from __future__ import annotations

import array
import dataclasses
import hashlib
import itertools
import json
import math
import re
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch

from eagle3_tasks.contracts import receipts as contracts
from eagle3_tasks.contracts.errors import DamagedData
from eagle3_tasks.data.dataset import Dataset, DatasetWriter, sample_name
from eagle3_tasks.host.sealed_folder import building
from eagle3_tasks.storage.capture import Capture
from eagle3_tasks.storage.receipts import read_shard
from eagle3_tasks.storage.verify import Damage, set_aside, verify_samples
from eagle3_tasks.storage.writer import ShardWriter
from eagle3_tasks.vocab.mapping import read_vocabulary
from eagle3_tasks.vocab.stage import _write_vocabulary
from tests.host.shard_folder import NAMES, fill, make_sample

CHECKOUT = Path(__file__).parents[2]
PAGE = (CHECKOUT / "docs" / "storage-format.md").read_text(encoding="utf-8")
GOLDEN = CHECKOUT / "tests" / "golden" / "storage-v1"

# --- The second reader. -------------------------------------------------------------------------

SEAL_BYTES = 32
WIDTHS = {"BF16": 2, "F32": 4, "I32": 4, "I64": 8, "U8": 1, "BOOL": 1}
DTYPES = {"bfloat16": "BF16", "float32": "F32"}


def crc32(content: bytes) -> str:
    return f"crc32:{zlib.crc32(content):08x}"


def unsealed(line: bytes) -> dict[str, Any] | None:
    """Give a line's record; None if the line counts for nothing."""
    body = line[:-SEAL_BYTES] + b"}"
    if line[-SEAL_BYTES:] != b', "checksum": "%s"}\n' % crc32(body).encode():
        return None
    record = json.loads(line)
    if record["version"] != 1:
        raise ValueError(f"version {record['version']}")
    return record


def counted_records(path: Path, limit: int | None) -> list[dict[str, Any]]:
    content = path.read_bytes()[:limit]
    lines = content[: content.rfind(b"\n") + 1].split(b"\n")[:-1]
    return [record for line in lines if (record := unsealed(line + b"\n")) is not None]


def numbered(folder: Path, kind: str) -> dict[int, Path]:
    found = {path: re.fullmatch(rf"{kind}-(\d{{4,}})\.jsonl?", path.name) for path in folder.iterdir()}
    return dict(sorted((int(match[1]), path) for path, match in found.items() if match))


def read_capture(capture: Path) -> tuple[dict[str, tuple[Path, dict, dict]], dict[str, str]]:
    """Give the committed samples (segment, receipt, record) and the quarantined ones (reason)."""
    committed: dict[str, tuple[Path, dict, dict]] = {}
    given_up: dict[str, str] = {}
    for folder in sorted(path for path in capture.iterdir() if path.name.startswith("rows_")):
        fences = numbered(folder, "fence")
        fence = json.loads(fences[max(fences)].read_bytes()) if fences else None

        def records(kind: str, folder: Path = folder, fence: Any = fence) -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = []
            for generation, path in numbered(folder, kind).items():
                is_older = fence is not None and generation < fence["generation"]
                limit = fence["counted_bytes"].get(path.name, 0) if is_older else None
                found += counted_records(path, limit)
            return found

        voids = folder / "voids.jsonl"
        voided = {
            (void["segment"], sample)
            for void in (counted_records(voids, None) if voids.exists() else [])
            for sample in void["samples"]
        }
        for receipt in records("receipts"):
            for record in receipt["samples"]:
                if (receipt["segment"], record["sample"]) not in voided:
                    committed.setdefault(record["sample"], (folder / receipt["segment"], receipt, record))
        given_up |= {record["sample"]: record["reason"] for record in records("quarantine")}
    return committed, {sample: reason for sample, reason in given_up.items() if sample not in committed}


def read_sample(segment: Path, receipt: dict[str, Any], record: dict[str, Any]) -> dict[str, bytes]:
    """Give a sample's three tensors as bytes, everything checked that the page promises."""
    content = segment.read_bytes()
    header_bytes = 8 + struct.unpack("<Q", content[:8])[0]
    assert len(content) == receipt["num_bytes"]
    assert crc32(content[:header_bytes]) == receipt["header_checksum"]
    metadata = json.loads(content[8:header_bytes])["__metadata__"]
    assert metadata == {"format": "pt", "eagle3_storage": "1", "generation": str(receipt["generation"])}
    tensors = dict(safetensors.deserialize(content))
    num_tokens, hidden_size, dtype = record["num_tokens"], record["hidden_size"], DTYPES[record["dtype"]]
    assert record["num_states"] == 4
    assert record["num_bytes"] == num_tokens * (4 * hidden_size * WIDTHS[dtype] + 4)
    found: dict[str, bytes] = {}
    for name, kind, shape in (
        ("token_ids", "I32", [num_tokens]),
        ("aux_hidden", dtype, [num_tokens, 3, hidden_size]),
        ("last_hidden", dtype, [num_tokens, hidden_size]),
    ):
        tensor = tensors[f"{record['sample']}.{name}"]
        found[name] = bytes(tensor["data"])
        assert (tensor["dtype"], list(tensor["shape"])) == (kind, shape)
        assert len(found[name]) == math.prod(shape) * WIDTHS[kind]
        assert crc32(found[name]) == record["checksums"][name]
    return found


def name_of(token_ids: bytes) -> str:
    return hashlib.sha256(token_ids).hexdigest()[:32]


def read_finished(folder: Path) -> dict[str, bytes]:
    seal = json.loads((folder / "complete.json").read_bytes())
    assert (seal["version"], seal["digest"]) == (1, folder.name)
    files = {name: (folder / name).read_bytes() for name in seal["files"]}
    assert {name: len(content) for name, content in files.items()} == seal["files"]
    return files


# --- What it finds. -----------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "capture" / "rows_000000-000012"


def check_equal_readers(capture_folder: Path) -> set[str]:
    """Compare both readers' committed and quarantined samples, and give the committed."""
    committed, given_up = read_capture(capture_folder)
    capture = Capture(capture_folder)
    capture.load_index()
    assert {
        name: segment.relative_to(capture_folder).as_posix() for name, (segment, _, _) in committed.items()
    } == {name: capture.location(name).segment for name in capture}
    assert given_up == {name: record.reason for name, record in capture.quarantined.items()}
    return set(committed)


def test_the_second_reader_finds_every_committed_sample_bit_for_bit(folder: Path):
    fill(folder, NAMES)
    assert check_equal_readers(folder.parent) == set(NAMES)
    for name, place in read_capture(folder.parent)[0].items():
        made, found = make_sample(name), read_sample(*place)
        assert found["token_ids"] == made.token_ids.numpy().tobytes()
        assert found["aux_hidden"] == made.aux_hidden.view(torch.int16).numpy().tobytes()
        assert found["last_hidden"] == made.last_hidden.view(torch.int16).numpy().tobytes()


def test_both_readers_agree_after_crashes_late_writers_damage_and_voids(folder: Path):
    fill(folder, NAMES[:6])
    receipts = folder / "receipts-0001.jsonl"
    receipts.write_bytes(receipts.read_bytes()[:-40])
    assert check_equal_readers(folder.parent) == set(NAMES[:4])
    fill(folder, NAMES[:8])
    assert check_equal_readers(folder.parent) == set(NAMES[:8])

    # A late writer: its line is whole and true to the format, but beyond the fence.
    late = (folder / "receipts-0002.jsonl").read_bytes().splitlines(keepends=True)[-1]
    second = folder / "receipts-0002.jsonl"
    second.write_bytes(second.read_bytes().removesuffix(late))
    receipts.write_bytes(receipts.read_bytes() + late)
    assert check_equal_readers(folder.parent) == set(NAMES[:6])

    fill(folder, NAMES[:10])
    damaged = bytearray((folder / "receipts-0003.jsonl").read_bytes())
    damaged[damaged.index(b'"num_tokens": ') + 14] ^= 1
    (folder / "receipts-0003.jsonl").write_bytes(damaged)
    left = check_equal_readers(folder.parent)
    assert set(NAMES[:6]) < left < set(NAMES[:10])

    (segment, _, record) = read_capture(folder.parent)[0][NAMES[0]]
    void = Damage(segment=f"{folder.name}/{segment.name}", samples=(record["sample"],), reason="flipped")
    set_aside(folder.parent, [void])
    assert check_equal_readers(folder.parent) == left - {NAMES[0]}
    other = folder.with_name("rows_000000-000002")
    another = f"{len(NAMES):032x}"
    fill(other, [NAMES[0], another])
    assert check_equal_readers(folder.parent) == left | {another}
    fill(folder, NAMES)
    assert check_equal_readers(folder.parent) == {*NAMES, another}


def test_the_golden_capture_of_version_1_is_read_by_both(tmp_path: Path):
    expected = json.loads((GOLDEN / "expected.json").read_bytes())
    capture = Capture(GOLDEN / "capture")
    assert check_equal_readers(capture.folder) == set(expected["committed"])
    capture.load_index()
    committed, given_up = read_capture(capture.folder)
    assert given_up == expected["quarantined"]
    for name, (segment, receipt, record) in committed.items():
        found = read_sample(segment, receipt, record)
        assert name == name_of(found["token_ids"])
        assert {key: hashlib.sha256(value).hexdigest() for key, value in found.items()} == expected[
            "committed"
        ][name]
        tensors = vars(capture.read(name))
        assert {
            key: bytes(value.reshape(-1).view(torch.uint8).numpy()) for key, value in tensors.items()
        } == found
    assert verify_samples(capture, list(capture), tier="full").damages == ()
    shards = [read_shard(path) for path in sorted(capture.folder.glob("rows_*"))]
    assert [shard.num_damaged_lines for shard in shards] == [0, 1]
    assert [shard.newest_generation for shard in shards] == [1, 2]


def test_a_line_of_another_version_is_refused_by_both(folder: Path):
    fill(folder, NAMES[:2])
    receipts = folder / "receipts-0001.jsonl"
    body = receipts.read_bytes().replace(b'{"version": 1', b'{"version": 2')[:-SEAL_BYTES]
    receipts.write_bytes(b'%s, "checksum": "%s"}\n' % (body, crc32(body + b"}").encode()))
    with pytest.raises(ValueError, match="version 2"):
        read_capture(folder.parent)
    with pytest.raises(DamagedData, match="of storage version 2"):
        Capture(folder.parent).load_index()


def test_a_dataset_and_a_vocabulary_are_read_as_the_page_says(tmp_path: Path):
    rows = [([5, 6, 7], [0, 1, 1]), ([5, 6, 7], [0, 0, 1]), ([9, 5, 5, 5], [0, 1, 0, 0])]
    path = tmp_path / "datasets" / "0123456789abcdef01234567"
    with building(path) as temporary:
        assert temporary is not None
        with DatasetWriter(temporary) as writer:
            for ids, mask in [*rows, rows[0]]:
                writer.add(np.array(ids, dtype=np.int32), np.array(mask, dtype=bool))
            writer.finish()
    content = read_finished(path)["tokens.safetensors"]
    tensors = dict(safetensors.deserialize(content))
    assert {name: tensor["dtype"] for name, tensor in tensors.items()} == {
        "offsets": "I64", "input_ids": "I32", "loss_mask": "U8",
    }  # fmt: skip
    assert (8 + struct.unpack("<Q", content[:8])[0]) % 8 == 0
    ids, offsets = (
        array.array("i", tensors["input_ids"]["data"]),
        array.array("q", tensors["offsets"]["data"]),
    )
    mask = bytes(tensors["loss_mask"]["data"])
    ranges = list(itertools.pairwise(offsets))
    assert [(list(ids[a:b]), list(mask[a:b])) for a, b in ranges] == rows
    dataset = Dataset(path)
    assert [name_of(ids[a:b].tobytes()) for a, b in ranges] == [dataset.sample(row) for row in range(3)]

    vocabulary = tmp_path / "vocabularies" / "76543210fedcba9876543210"
    _write_vocabulary(vocabulary, dataset, 12, 2, [])
    maps = dict(safetensors.deserialize(read_finished(vocabulary)["vocabulary.safetensors"]))
    assert {name: tensor["dtype"] for name, tensor in maps.items()} == {"d2t": "I64", "t2d": "BOOL"}
    target_ids = [draft + offset for draft, offset in enumerate(array.array("q", maps["d2t"]["data"]))]
    assert target_ids == [index for index, is_chosen in enumerate(maps["t2d"]["data"]) if is_chosen] == [5, 7]
    assert read_vocabulary(vocabulary).d2t_V.tolist() == [5, 6]


# --- What the page says. ------------------------------------------------------------------------


def test_the_examples_of_the_page_are_true():
    (line,) = re.findall(r'^    (\{"version": 1, "generation".*\})$', PAGE, flags=re.MULTILINE)
    record = unsealed(line.encode() + b"\n")
    assert record is not None
    assert record["row"] == 7
    assert f"CRC-32 of the {len(line) - SEAL_BYTES + 1} bytes" in PAGE
    (name,) = re.findall(r"The ids\s+1, 2, 3 have the name `([0-9a-f]+)`", PAGE)
    assert name == sample_name([1, 2, 3]) == name_of(struct.pack("<3i", 1, 2, 3))


def test_the_page_names_every_key_of_a_record():
    kinds = [kind for kind in vars(contracts).values() if dataclasses.is_dataclass(kind)]
    keys = {field.name for kind in kinds for field in dataclasses.fields(kind)}
    assert {key for key in keys if f"`{key}`" not in PAGE} == set()
    facts = json.loads((GOLDEN / "capture" / "capture.json").read_bytes())
    assert {key for key in facts if f"`{key}`" not in PAGE} == set()


def test_the_commit_leaves_the_files_that_the_page_lists(folder: Path):
    folder.mkdir(parents=True)
    with ShardWriter(folder, segment_bytes=1_000_000) as writer:
        writer.append(NAMES[0], make_sample(NAMES[0]))
        writer.quarantine(sample=NAMES[1], row=1, num_tokens=3, reason="never finite")
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "fence-0001.json", "segment-0001-000000.safetensors", "receipts-0001.jsonl", "quarantine-0001.jsonl",
    }  # fmt: skip
    start = 8 + struct.unpack("<Q", (folder / "segment-0001-000000.safetensors").read_bytes()[:8])[0]
    assert start % 4096 == 0
