"""Committing to a shard's folder, with crashes, late writers and a full disk."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import tracemalloc
from pathlib import Path

import pytest
import torch

from eagle3_tasks.contracts.errors import DamagedData, DiskProblem
from eagle3_tasks.contracts.receipts import Receipt, SampleRecord
from eagle3_tasks.storage import disk_guard, names
from eagle3_tasks.storage.capture import Capture
from eagle3_tasks.storage.receipts import append_record, read_shard
from eagle3_tasks.storage.sample import TENSORS, CapturedSample
from eagle3_tasks.storage.shard_lock import shard_lock
from eagle3_tasks.storage.verify import verify_samples
from eagle3_tasks.storage.writer import ShardWriter
from tests.host.shard_folder import HIDDEN, NAMES, check_whole, exit_code, fill, make_sample, start_writer

POINTS = [
    "fence_written", "sample_written", "header_written", "segment_synced", "segment_renamed", "folder_synced",
    "receipt_appended", "quarantine_appended",
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "capture" / "rows_000000-000012"


def test_any_tool_reads_back_what_was_written_bit_for_bit(folder: Path):
    fill(folder, NAMES)
    check_whole(folder.parent, NAMES)
    capture = Capture(folder.parent)
    capture.load_index()
    for name in NAMES:
        read, made = capture.read(name), make_sample(name)
        assert torch.equal(read.aux_hidden.view(torch.int16), made.aux_hidden.view(torch.int16))
        assert torch.equal(read.last_hidden.view(torch.int16), made.last_hidden.view(torch.int16))
        assert read.token_ids.tolist() == made.token_ids.tolist()
        assert capture.num_tokens(name) == len(made.token_ids)
    tokens = sum(capture.num_tokens(name) for name in NAMES)
    assert capture.num_bytes == tokens * (4 * HIDDEN * 2 + 4)
    assert oct(folder.stat().st_mode & 0o777) == "0o700"
    assert {oct(path.stat().st_mode & 0o777) for path in folder.iterdir()} == {"0o600"}


def test_a_segment_is_closed_by_size_and_by_age(folder: Path):
    now = 0.0
    with shard_lock(folder), ShardWriter(folder, segment_bytes=1_000, clock=lambda: now) as writer:
        for name in NAMES:
            writer.append(name, make_sample(name))
        assert 1 < len(read_shard(folder).receipts) < len(NAMES)
        before = len(read_shard(folder).receipts)
        writer.commit_if_due()
        assert len(read_shard(folder).receipts) == before
        now = 61.0
        writer.commit_if_due()
        assert len(read_shard(folder).receipts) == before + 1
    check_whole(folder.parent, NAMES)


def test_the_index_of_many_samples_is_small(folder: Path):
    num_segments, num_samples = 40, 250
    folder.mkdir(parents=True)
    path = folder / names.receipts_name(1)
    for segment in range(num_segments):
        samples = tuple(
            SampleRecord(
                sample=f"{segment * num_samples + index:032x}",
                num_tokens=1000 + index,
                num_states=4,
                hidden_size=4096,
                dtype="bfloat16",
                num_bytes=(1000 + index) * 32_772,
                checksums=dict.fromkeys(TENSORS, f"crc32:{index:08x}"),
            )
            for index in range(num_samples)
        )
        receipt = Receipt(
            generation=1, segment=names.segment_name(1, segment), num_bytes=1 + segment,
            header_checksum="crc32:00000000", committed_at=0.0, samples=samples,
        )  # fmt: skip
        append_record(path, receipt)
    capture = Capture(folder.parent)
    tracemalloc.start()
    capture.load_index()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(capture) == num_segments * num_samples
    # 60 MB for 100,000 samples.
    assert peak < 600 * len(capture)
    sample = f"{17 * num_samples + 3:032x}"
    segment = capture.location(sample).segment
    assert segment == f"{folder.name}/{names.segment_name(1, 17)}"
    assert (capture.segment_bytes(segment), capture.num_tokens(sample)) == (18, 1003)
    assert capture.receipt(segment)["samples"][3]["sample"] == sample
    receipts = path.read_bytes()
    path.write_bytes(receipts.replace(b'"num_bytes": 18', b'"num_bytes": 19'))
    with pytest.raises(DamagedData, match="changed"):
        capture.receipt(segment)


def test_a_header_full_of_small_samples_closes_the_segment(folder: Path):
    tiny = CapturedSample(
        token_ids=torch.ones(1, dtype=torch.int32),
        aux_hidden=torch.ones(1, 3, 1),
        last_hidden=torch.ones(1, 1),
    )
    samples = [f"{index:032x}" for index in range(400)]
    with shard_lock(folder), ShardWriter(folder, segment_bytes=1_000_000) as writer:
        for name in samples:
            writer.append(name, tiny)
    capture = Capture(folder.parent)
    capture.load_index()
    assert len(read_shard(folder).receipts) > 1
    assert verify_samples(capture, samples, tier="full").damages == ()


@pytest.mark.parametrize("point", POINTS)
def test_a_process_stopped_at_any_point_costs_what_was_in_flight_and_nothing_else(folder: Path, point: str):
    faults = folder.parents[1] / "faults.json"
    faults.write_text(
        json.dumps([{"point": point, "after": 1 if point.startswith(("fence", "quar")) else 2, "exit": 9}])
    )
    assert exit_code(start_writer(folder, EAGLE3_FAULT_POINTS=str(faults))) == 9
    committed = [record["sample"] for receipt in read_shard(folder).receipts for record in receipt["samples"]]
    if point != "quarantine_appended":
        assert len(committed) < len(NAMES)
    check_whole(folder.parent, committed)
    fill(folder, NAMES)
    check_whole(folder.parent, NAMES)
    capture = Capture(folder.parent)
    capture.load_index()
    assert verify_samples(capture, NAMES, tier="full").damages == ()
    receipted = {receipt["segment"] for receipt in read_shard(folder).receipts}
    assert {path.name for path in folder.glob("*.safetensors")} == receipted
    assert not list(folder.glob(".*"))


def test_a_torn_last_receipt_is_cut_off_and_its_samples_are_extracted_again(folder: Path):
    fill(folder, NAMES)
    receipts = folder / names.receipts_name(1)
    receipts.write_bytes(receipts.read_bytes()[:-40])
    capture = Capture(folder.parent)
    capture.load_index()
    assert len(capture) == len(NAMES) - 2
    fill(folder, NAMES)
    check_whole(folder.parent, NAMES)
    assert receipts.read_bytes().endswith(b"\n")


def test_a_damaged_receipt_counts_for_nothing_and_no_segment_is_removed_for_it(folder: Path):
    fill(folder, NAMES)
    receipts = folder / names.receipts_name(1)
    content = bytearray(receipts.read_bytes())
    content[content.index(b'"num_tokens": ') + 14] ^= 1
    receipts.write_bytes(content)
    segments = {path.name for path in folder.glob("*.safetensors")}
    records = read_shard(folder)
    assert records.num_damaged_lines == 1
    fill(folder, NAMES)
    assert segments < {path.name for path in folder.glob("*.safetensors")}
    capture = Capture(folder.parent)
    capture.load_index()
    assert verify_samples(capture, NAMES, tier="full").damages == ()


def test_what_an_old_writer_appends_after_a_new_one_began_is_ignored(folder: Path, caplog):
    old = ShardWriter(_made(folder), segment_bytes=100_000)
    old.append(NAMES[0], make_sample(NAMES[0]))
    old.commit()
    old.append(NAMES[1], make_sample(NAMES[1]))
    new = ShardWriter(folder, segment_bytes=100_000)
    new.append(NAMES[1], make_sample(NAMES[1]))
    new.commit()
    # The sleeper's temporary file was cleared away, so its commit fails; a bare append comes through.
    with pytest.raises(DiskProblem):
        old.commit()
    receipts = folder / names.receipts_name(1)
    receipts.write_bytes(receipts.read_bytes() + (folder / names.receipts_name(2)).read_bytes())
    assert [[r["sample"] for r in one["samples"]] for one in read_shard(folder).receipts] == [
        [NAMES[0]],
        [NAMES[1]],
    ]
    assert "late records ignored" in caplog.text
    fill(folder, NAMES)
    assert [path.name for path in folder.glob("fence-*")] == ["fence-0003.json"]
    check_whole(folder.parent, NAMES)


def test_two_writers_at_once_commit_each_sample_once(folder: Path):
    writers = [start_writer(folder) for _ in range(2)]
    assert [exit_code(writer) for writer in writers] == [0, 0]
    check_whole(folder.parent, NAMES)


def test_a_second_writer_waits_for_the_first_and_says_so(folder: Path):
    waits: list[float] = []
    entered = threading.Event()

    def wait() -> None:
        with shard_lock(folder, report_waiting=waits.append):
            entered.set()

    with shard_lock(folder):
        thread = threading.Thread(target=wait)
        thread.start()
        while not waits:
            time.sleep(0.01)
        assert not entered.is_set()
    thread.join(10)
    assert entered.is_set()


def test_the_reserve_is_never_touched_and_all_counted_work_is_committed(folder: Path, monkeypatch):
    free = 1_000_000
    monkeypatch.setattr(disk_guard, "free_bytes", lambda _: free)
    writer = ShardWriter(_made(folder), segment_bytes=1_000_000, reserve_bytes=500_000)
    with writer:
        writer.append(NAMES[0], make_sample(NAMES[0]))
        free = 500_100
        with pytest.raises(DiskProblem, match="are the reserve"):
            writer.append(NAMES[1], make_sample(NAMES[1]))
    check_whole(folder.parent, NAMES[:1])


def test_a_full_disk_leaves_only_whole_segments(folder: Path, monkeypatch):
    class FullDisk:
        """Stands before the file and refuses its third write, as a full disk does."""

        def __init__(self, file) -> None:
            self.file, self.writes = file, 0

        def write(self, content) -> int:
            self.writes += 1
            if self.writes > 3:
                raise OSError(28, "No space left on device")
            return self.file.write(content)

        def __getattr__(self, name: str):
            return getattr(self.file, name)

    writer = ShardWriter(_made(folder), segment_bytes=100_000)
    writer.append(NAMES[0], make_sample(NAMES[0]))
    writer.commit()
    with contextlib.suppress(DiskProblem), writer:
        open_file = os.fdopen
        monkeypatch.setattr(os, "fdopen", lambda *arguments: FullDisk(open_file(*arguments)))
        writer.append(NAMES[1], make_sample(NAMES[1]))
        with pytest.raises(DiskProblem, match="no space is left"):
            writer.append(NAMES[2], make_sample(NAMES[2]))
    check_whole(folder.parent, NAMES[:1])
    assert [path.name for path in folder.iterdir() if path.suffix == ".tmp"] == []


def test_a_sample_in_two_shards_is_found_once(folder: Path):
    fill(folder, NAMES)
    other = folder.with_name("rows_000000-000024")
    with shard_lock(other), ShardWriter(other, segment_bytes=100_000) as writer:
        writer.append(NAMES[0], make_sample(NAMES[0]))
    capture = Capture(folder.parent)
    capture.load_index()
    assert len(capture) == len(NAMES)
    assert list(capture.quarantined) == ["f" * 32]


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, mode=0o700)
    return folder
