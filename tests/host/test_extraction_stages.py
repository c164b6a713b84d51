"""plan, extract and verify over a tiny real target; every attempt goes on from what is on disk."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from eagle3_tasks.contracts.errors import (
    DamagedData,
    DiskProblem,
    EngineProblem,
    InvalidInput,
    RequestRefused,
)
from eagle3_tasks.contracts.jobs import Progress
from eagle3_tasks.contracts.rows import RowRange
from eagle3_tasks.contracts.run_records import PlanRecord
from eagle3_tasks.data.dataset import sample_name
from eagle3_tasks.engines.huggingface import HuggingFaceEngine
from eagle3_tasks.extraction.extract_stage import extract_rows, run_extract
from eagle3_tasks.extraction.plan_stage import run_plan
from eagle3_tasks.extraction.verify_stage import run_verify
from eagle3_tasks.host.stage_context import StageContext
from eagle3_tasks.storage import disk_guard
from eagle3_tasks.storage.capture import Capture
from tests.host.tiny_target import (
    AUX_LAYER_IDS,
    DATASET,
    HIDDEN_SIZE,
    make_context,
    make_dataset,
    make_settings,
    make_target,
    random_rows,
)

ROWS = random_rows(12)
NUM_TOKENS = sum(map(len, ROWS))
BYTES_PER_TOKEN = 4 * HIDDEN_SIZE * 4 + 4


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("extraction") / "target")


@pytest.fixture(scope="module")
def engine(target: Path) -> HuggingFaceEngine:
    return HuggingFaceEngine.load(make_settings(target.parent / "root", target))


@pytest.fixture
def context(tmp_path: Path, target: Path) -> StageContext:
    context = make_context(make_settings(tmp_path / "root", target))
    make_dataset(context, ROWS)
    return context


class Spoiled:
    """An engine that spoils what it captures of chosen samples, the first ``times`` times."""

    def __init__(self, engine: HuggingFaceEngine, rows: set[int], spoil, *, times: int = 99) -> None:
        self._engine, self._spoil = engine, spoil
        self._left = {tuple(ROWS[row]): times for row in rows}
        self.describe = engine.describe

    def capture(self, batch):
        samples = self._engine.capture(batch)
        for index, ids in enumerate(map(tuple, batch)):
            if self._left.get(ids, 0):
                self._left[ids] -= 1
                samples[index] = dataclasses.replace(samples[index], **self._spoil(samples[index]))
        return samples


def shard(
    context: StageContext, start: int, stop: int, *, progress: list[Progress] | None = None
) -> StageContext:
    return make_context(context.settings, RowRange(start=start, stop=stop), progress=progress)


def no_engine() -> HuggingFaceEngine:
    raise AssertionError("nothing is missing, so the target must not be loaded")


def capture_of(context: StageContext) -> Capture:
    capture = Capture(context.layout.capture(context.read_record(PlanRecord).capture))
    capture.load_index()
    return capture


def extract_all(context: StageContext, engine) -> list[dict]:
    plan = context.read_record(PlanRecord)
    return [extract_rows(shard(context, rows.start, rows.stop), lambda: engine) for rows in plan.shards]


def test_the_plan_pins_the_shards_and_forecasts_the_bytes_that_extraction_will_write(context, engine, caplog):
    caplog.set_level(logging.INFO)
    report = run_plan(context)
    host = context.settings.host.ssh_conn_id
    assert report["shards"] == [[0, 5, host], [5, 10, host], [10, 12, host]]
    assert report["forecast_bytes"] == report["missing_bytes"] == NUM_TOKENS * BYTES_PER_TOKEN
    trained = {token for ids in ROWS for token in ids[len(ids) // 2 :]}
    assert report["distinct_trained_tokens"] == len(trained)
    plan = context.read_record(PlanRecord)
    assert plan.aux_layer_ids == AUX_LAYER_IDS
    extract_all(context, engine)
    capture = Capture(context.layout.capture(plan.capture))
    capture.load_index()
    assert capture.num_bytes == report["forecast_bytes"]
    again = run_plan(context)
    assert again["missing_bytes"] == again["missing_samples"] == 0
    assert again["capture"] == report["capture"]
    assert "plan is the same" in caplog.text


def test_extraction_commits_what_transformers_computes_and_verify_proves_it(context, engine, caplog):
    caplog.set_level(logging.INFO)
    run_plan(context)
    progress: list[Progress] = []
    report = run_extract(shard(context, 0, 5, progress=progress))
    assert (report["samples"], report["extracted"], report["reused"]) == (5, 5, 0)
    assert report["tokens"] == sum(map(len, ROWS[:5]))
    assert (progress[-1].done, progress[-1].total) == (5, 5)
    assert f"shard written rows=[0,5) samples=5 tokens={report['tokens']}" in caplog.text
    assert "extract rows=[0,5) samples=5/5" in caplog.text
    with pytest.raises(DamagedData, match="rows_000005-000010, rows_000010-000012"):
        run_verify(context)
    extract_all(context, engine)
    capture = capture_of(context)
    for ids in ROWS:
        read, alone = capture.read(sample_name(ids)), engine.capture([ids])[0]
        torch.testing.assert_close(read.aux_hidden, alone.aux_hidden, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(read.last_hidden, alone.last_hidden, atol=2e-5, rtol=1e-4)
    verified = run_verify(context)
    assert verified["samples"] == verified["checked_samples"] == 12
    assert verified["bytes"] == NUM_TOKENS * BYTES_PER_TOKEN
    (path,) = (capture.folder / "rows_000005-000010").glob("manifest*.json")
    manifest = json.loads(path.read_bytes())
    assert (path.name, manifest["dataset"]) == (f"manifest-{DATASET}.json", DATASET)
    assert [entry["row"] for entry in manifest["entries"]] == [5, 6, 7, 8, 9]


@pytest.mark.parametrize("changes", [{"rows_per_shard": 4}, {"epochs": 9, "ttt_steps": 2}])
def test_another_run_over_the_same_samples_extracts_none(context, engine, changes):
    run_plan(context)
    extract_all(context, engine)
    order = np.random.default_rng(1).permutation(len(ROWS))
    settings = make_settings(
        Path(context.settings.host.root), context.settings.target.target_model, **changes
    )
    other = make_context(settings, run_key="other-0123456789abcdef")
    make_dataset(other, [ROWS[row] for row in order], digest="e" * 24)
    assert run_plan(other)["missing_bytes"] == 0
    for rows in other.read_record(PlanRecord).shards:
        one = make_context(settings, rows, run_key=other.spec.run_key)
        report = extract_rows(one, no_engine)
        assert (report["extracted"], report["reused"]) == (0, len(rows))
    assert run_verify(other)["samples"] == 12


def test_each_dataset_of_a_capture_has_its_own_manifest_in_a_shard(context, engine):
    run_plan(context)
    extract_all(context, engine)
    folder = capture_of(context).folder / "rows_000000-000005"
    first = (folder / f"manifest-{DATASET}.json").read_bytes()
    other = make_context(context.settings, RowRange(start=0, stop=5), run_key="other-0123456789abcdef")
    make_dataset(other, ROWS[::-1], digest="e" * 24)
    run_plan(other)
    extract_rows(other, no_engine)
    assert (folder / f"manifest-{DATASET}.json").read_bytes() == first
    second = json.loads((folder / f"manifest-{'e' * 24}.json").read_bytes())
    assert [entry["sample"] for entry in second["entries"]] == [sample_name(ids) for ids in ROWS[:-6:-1]]


def test_added_rows_alone_are_extracted(context, engine):
    run_plan(context)
    extract_all(context, engine)
    other = make_context(context.settings, run_key="other-0123456789abcdef")
    make_dataset(other, [random_rows(1, seed=9)[0], *ROWS], digest="e" * 24)
    run_plan(other)
    reports = [
        extract_rows(make_context(context.settings, rows, run_key=other.spec.run_key), lambda: engine)
        for rows in other.read_record(PlanRecord).shards
    ]
    assert [report["extracted"] for report in reports] == [1, 0, 0]


@pytest.mark.parametrize("changes", [{"aux_layer_ids": [0, 1, 3]}, {"capture_dtype": "bfloat16"}])
def test_other_layers_or_another_dtype_make_another_capture_and_the_plan_says_so(
    context, engine, changes, caplog
):
    caplog.set_level(logging.INFO)
    first = run_plan(context)
    extract_all(context, engine)
    settings = make_settings(
        Path(context.settings.host.root), context.settings.target.target_model, **changes
    )
    other = run_plan(make_context(settings))
    assert other["capture"] != first["capture"]
    assert other["missing_samples"] == 12
    differing = {"aux_layer_ids": "aux_layer_ids", "capture_dtype": "dtype"}[next(iter(changes))]
    assert (
        f"capture={first['capture']} target=target samples_of_this_dataset=12 differs_in={differing}"
        in caplog.text
    )


def test_a_target_that_changed_after_the_plan_is_not_mixed_into_its_capture(context, tmp_path):
    folder = shutil.copytree(context.settings.target.target_model, tmp_path / "target")
    context = make_context(make_settings(tmp_path / "root2", folder))
    make_dataset(context, ROWS)
    run_plan(context)
    make_target(folder, seed=5)
    with pytest.raises(InvalidInput, match="changed after the plan"):
        run_extract(shard(context, 0, 5))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda s: {"last_hidden": s.last_hidden * float("nan")}, "last_hidden is not finite"),
        (lambda s: {"aux_hidden": s.aux_hidden[: len(s.token_ids) // 3]}, "rows for"),
        (lambda s: {"aux_hidden": s.aux_hidden * 0}, "zero everywhere"),
    ],
)
def test_a_sample_that_stays_unusable_is_quarantined_with_its_reason_and_the_shard_ends(
    context, engine, spoil, reason
):
    changed = make_settings(
        Path(context.settings.host.root), context.settings.target.target_model, max_quarantine_percent=20.0
    )
    context = make_context(changed)
    run_plan(context)
    report = extract_rows(shard(context, 0, 5), lambda: Spoiled(engine, {3}, spoil))
    assert (report["samples"], report["quarantined"]) == (4, 1)
    record = capture_of(context).quarantined[sample_name(ROWS[3])]
    assert record.row == 3
    assert reason in record.reason
    assert extract_rows(shard(context, 0, 5), no_engine)["quarantined"] == 1
    extract_rows(shard(context, 5, 10), lambda: engine)
    extract_rows(shard(context, 10, 12), lambda: engine)
    assert run_verify(context)["quarantined"] == 1


def test_a_sample_that_comes_right_on_the_third_try_is_committed(context, engine):
    run_plan(context)
    spoiled = Spoiled(engine, {3}, lambda s: {"last_hidden": s.last_hidden[:1]}, times=2)
    report = extract_rows(shard(context, 0, 5), lambda: spoiled)
    assert (report["samples"], report["quarantined"]) == (5, 0)


def test_a_shard_beyond_the_quarantine_limit_fails_keeps_its_good_samples_and_a_retry_tries_all_again(
    context, engine
):
    run_plan(context)
    spoiled = Spoiled(engine, {0, 1, 2}, lambda s: {"last_hidden": s.last_hidden * float("inf")})
    with pytest.raises(EngineProblem, match="of 5 samples could not be captured"):
        extract_rows(shard(context, 0, 5), lambda: spoiled)
    committed = len(capture_of(context))
    report = extract_rows(shard(context, 0, 5), lambda: engine)
    assert (report["samples"], report["quarantined"], report["reused"]) == (5, 0, committed)


def test_an_engine_that_breaks_costs_only_the_batch_in_flight(context, engine):
    run_plan(context)

    class Breaking(Spoiled):
        calls = 0

        def capture(self, batch):
            Breaking.calls += 1
            if Breaking.calls == 3:
                raise EngineProblem("injected")
            return engine.capture(batch)

    with pytest.raises(EngineProblem, match="injected"):
        extract_rows(shard(context, 0, 12), lambda: Breaking(engine, set(), None))
    committed = len(capture_of(context))
    assert committed > 0
    assert extract_rows(shard(context, 0, 12), lambda: engine)["extracted"] == 12 - committed


def test_extraction_stops_before_the_reserve_and_goes_on_when_there_is_space(context, engine, monkeypatch):
    run_plan(context)
    free = iter([10**9] * 4)
    with monkeypatch.context() as patch:
        patch.setattr(disk_guard, "free_bytes", lambda _: next(free, 0))
        with pytest.raises(DiskProblem, match="GB free under"):
            extract_rows(shard(context, 0, 12), lambda: engine)
    assert len(capture_of(context)) == 4
    assert extract_rows(shard(context, 0, 12), lambda: engine)["extracted"] == 8


def test_verify_names_damage_and_clearing_the_named_shard_mends_it(context, engine):
    run_plan(context)
    extract_all(context, engine)
    capture = capture_of(context)
    (segment,) = (capture.folder / "rows_000005-000010").glob("*.safetensors")
    content = bytearray(segment.read_bytes())
    content[-1] ^= 4
    segment.write_bytes(content)
    with pytest.raises(DamagedData, match=r"1 of 12 samples .*extract tasks rows_000005-000010;"):
        run_verify(context)
    reports = extract_all(context, engine)
    assert [report["extracted"] for report in reports] == [0, 1, 0]
    assert run_verify(context)["samples"] == 12


def test_a_fault_file_fails_one_shard_until_it_is_deleted(context, engine, tmp_path, monkeypatch):
    run_plan(context)
    faults = tmp_path / "faults.json"
    faults.write_text(
        '[{"point": "extract_started", "match": "rows_000005-", "raise": "EngineProblem: injected"}]'
    )
    monkeypatch.setenv("EAGLE3_FAULT_POINTS", str(faults))
    extract_rows(shard(context, 0, 5), lambda: engine)
    with pytest.raises(EngineProblem, match="injected"):
        extract_rows(shard(context, 5, 10), lambda: engine)
    faults.unlink()
    assert extract_rows(shard(context, 5, 10), lambda: engine)["extracted"] == 5


def test_rows_that_differ_in_their_mask_alone_share_one_sample(context, engine):
    run_plan(context)
    ids = np.array(ROWS[0], dtype=np.int32)
    from eagle3_tasks.data.dataset import DatasetWriter
    from eagle3_tasks.host.sealed_folder import building

    with building(context.layout.dataset("f" * 24)) as folder, DatasetWriter(folder) as writer:
        writer.add(ids, np.arange(len(ids)) > 1)
        writer.add(ids, np.arange(len(ids)) > 2)
        writer.finish()
    make_dataset(context, [ROWS[0], ROWS[0]], digest="f" * 24)
    settings = make_settings(
        Path(context.settings.host.root), context.settings.target.target_model, draft_vocab_size=2
    )
    context = make_context(settings)
    assert run_plan(context)["forecast_bytes"] == len(ids) * BYTES_PER_TOKEN
    assert extract_rows(shard(context, 0, 2), lambda: engine)["samples"] == 1
    manifest = next(capture_of(context).folder.glob("rows_000000-000002/manifest-*.json"))
    assert json.loads(manifest.read_bytes())["num_samples"] == 2


def test_rows_outside_the_plan_are_refused(context):
    run_plan(context)
    with pytest.raises(RequestRefused, match="can't be extracted from 12 samples"):
        run_extract(shard(context, 10, 13))
