"""Proving what lies in a shard's folder, and setting damage aside."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from eagle3_tasks.contracts.errors import DamagedData
from eagle3_tasks.storage import names
from eagle3_tasks.storage.capture import Capture
from eagle3_tasks.storage.verify import set_aside, verify_samples
from tests.host.shard_folder import NAMES, fill


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "capture" / "rows_000000-000012"


def test_every_flipped_bit_is_found_by_full_and_only_damaged_samples_are_captured_again(folder: Path):
    fill(folder, NAMES)
    chance = random.Random(7)
    segment = sorted(folder.glob("*.safetensors"))[1]
    good = segment.read_bytes()
    capture = Capture(folder.parent)
    capture.load_index()
    places = [chance.randrange(len(good)) for _ in range(60)] + list(range(8)) + [200, len(good) - 1]
    for place in places:
        bad = bytearray(good)
        bad[place] ^= 1 << chance.randrange(8)
        segment.write_bytes(bad)
        result = verify_samples(capture, NAMES, tier="full")
        assert [damage.segment for damage in result.damages] == [f"{folder.name}/{segment.name}"], place
    bad = bytearray(good)
    bad[-1] ^= 1
    segment.write_bytes(bad)
    (damage,) = verify_samples(capture, NAMES, tier="sample").damages
    assert len(damage.samples) == 1
    set_aside(folder.parent, [damage])
    capture.load_index()
    assert [name for name in NAMES if not capture.has(name)] == list(damage.samples)
    fill(folder, NAMES)
    capture.load_index()
    assert verify_samples(capture, NAMES, tier="full").damages == ()


@pytest.mark.parametrize(("spoil", "reason"), [("cut", "bytes lie on the disk"), ("remove", "missing")])
def test_a_cut_or_missing_file_is_found_by_quick_and_its_samples_are_captured_again(
    folder: Path, spoil, reason
):
    fill(folder, NAMES)
    manifests = [folder / names.manifest_name("d" * 24), folder / "manifest.json"]
    for manifest in manifests:
        manifest.write_text("{}")
    segment = min(folder.glob("*.safetensors"))
    if spoil == "cut":
        os.truncate(segment, segment.stat().st_size - 1)
    else:
        segment.unlink()
    capture = Capture(folder.parent)
    capture.load_index()
    result = verify_samples(capture, NAMES, tier="quick")
    (damage,) = result.damages
    assert reason in damage.reason
    assert len(damage.samples) == 2
    set_aside(folder.parent, result.damages)
    assert not segment.exists()
    assert not any(manifest.exists() for manifest in manifests)
    fill(folder, NAMES)
    capture.load_index()
    assert verify_samples(capture, NAMES, tier="full").damages == ()
    assert len(capture) == len(NAMES)


def test_verification_stops_at_its_time_and_says_that_it_did(folder: Path):
    fill(folder, NAMES)
    capture = Capture(folder.parent)
    capture.load_index()
    result = verify_samples(capture, NAMES, tier="full", max_seconds=-1.0)
    assert not result.is_complete
    assert result.num_samples == 0


def test_reading_a_cut_segment_names_the_file_and_the_remedy(folder: Path):
    fill(folder, NAMES)
    for segment in folder.glob("*.safetensors"):
        os.truncate(segment, segment.stat().st_size - 1)
    capture = Capture(folder.parent)
    capture.load_index()
    with pytest.raises(DamagedData, match="Clear the verify stage"):
        capture.read(NAMES[0])
    with pytest.raises(DamagedData, match="is not committed"):
        capture.read("e" * 32)
