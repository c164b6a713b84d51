"""What a plan refuses, and what must not stop it."""

from __future__ import annotations

import json
import logging
import zlib
from pathlib import Path

import pytest

from eagle3_tasks.contracts.errors import InvalidInput, InvalidSettings
from eagle3_tasks.contracts.rows import RowRange, choose_shards
from eagle3_tasks.contracts.run_records import PlanRecord
from eagle3_tasks.extraction.plan_stage import run_plan
from eagle3_tasks.host.stage_context import StageContext
from tests.host.tiny_target import make_context, make_dataset, make_settings, make_target, random_rows

ROWS = random_rows(12)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("plan") / "target")


@pytest.fixture
def context(tmp_path: Path, target: Path) -> StageContext:
    context = make_context(make_settings(tmp_path / "root", target))
    make_dataset(context, ROWS)
    return context


def test_what_lies_in_other_captures_never_stops_a_plan(context, caplog):
    caplog.set_level(logging.INFO)
    run_plan(context)
    capture = context.layout.capture(context.read_record(PlanRecord).capture)
    captures = capture.parent
    facts = json.loads((capture / "capture.json").read_bytes())
    (captures / "notes.txt").write_text("mine")
    (captures / "empty").mkdir()
    spoiled = {"a" * 24: {**facts, "added_later": 1}, "b" * 24: facts, "c" * 24: facts}
    for name, values in spoiled.items():
        (captures / name).mkdir()
        (captures / name / "capture.json").write_text(json.dumps(values))
    (captures / ("b" * 24) / "rows_000000-000001").mkdir()
    line = b'{"version": 9'
    crc = f"{zlib.crc32(line + b'}'):08x}".encode()
    (captures / ("b" * 24) / "rows_000000-000001" / "receipts-0001.jsonl").write_bytes(
        line + b', "checksum": "crc32:' + crc + b'"}\n'
    )
    run_plan(context)
    assert f"other capture not looked at capture={'a' * 24}" in caplog.text
    assert f"other capture not looked at capture={'b' * 24}" in caplog.text
    assert "storage version 9" in caplog.text
    assert f"other capture capture={'c' * 24} target=target samples_of_this_dataset=0" in caplog.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"draft_vocab_size": 97}, "draft_vocab_size is 97, but the target's vocabulary has 96"),
        ({"draft_vocab_size": 96}, r"only \d+ distinct tokens occur under the loss mask, .* at most \d+\."),
        ({"aux_layer_ids": [0, 1, 4]}, "names layer 4, but the target has 4 layers"),
        ({"aux_layer_ids": None}, "too few for the default"),
    ],
)
def test_a_plan_that_cannot_work_is_refused(context, changes, message: str):
    settings = make_settings(
        Path(context.settings.host.root), context.settings.target.target_model, **changes
    )
    with pytest.raises(InvalidSettings, match=message):
        run_plan(make_context(settings))


def test_more_shards_than_airflow_maps_are_refused_with_a_size_that_works():
    with pytest.raises(InvalidSettings, match="at least 10") as refused:
        choose_shards(10_000, 3, setting="rows_per_shard")
    assert "3334 shards" in str(refused.value)
    assert len(choose_shards(10_000, 10, setting="rows_per_shard")) == 1000
    assert choose_shards(10_000, 10, setting="rows_per_shard")[-1] == RowRange(start=9990, stop=10_000)


def test_a_tokenizer_of_another_model_is_refused(tmp_path, target):
    context = make_context(make_settings(tmp_path / "root", target))
    make_dataset(context, [[7, 8, 96, 9]])
    with pytest.raises(InvalidInput, match="target's own tokenizer"):
        run_plan(context)
