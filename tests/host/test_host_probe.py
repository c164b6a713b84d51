"""Probes as a sensor gets them: the agent's verb, the command, the verdict."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle3_tasks.commands.probe import run_probe
from eagle3_tasks.contracts import codec
from eagle3_tasks.contracts.errors import InvalidInput
from eagle3_tasks.contracts.jobs import ProbeBody, run_key
from eagle3_tasks.contracts.paths import RootLayout
from eagle3_tasks.contracts.rows import RowRange
from eagle3_tasks.contracts.run_records import PlanRecord
from eagle3_tasks.contracts.settings import settings_from_flat
from eagle3_tasks.contracts.stages import ProbeSpec, StageSpec
from eagle3_tasks.data.dataset import Dataset, DatasetWriter
from eagle3_tasks.host.probe_command import run_probe_command
from eagle3_tasks.host.sealed_folder import building
from eagle3_tasks.host.stage_context import StageContext
from eagle3_tasks.storage.shard_lock import shard_lock
from eagle3_tasks.storage.writer import ShardWriter
from tests.host.shard_folder import NAMES, fill, make_sample

GB = 10**9


def stage_spec(root: Path, **changes: Any) -> StageSpec:
    values: dict[str, Any] = {
        "root": str(root),
        "device": "cpu",
        "disk_reserve_gb": 0.5,
        "conversations_path": "/data/x.jsonl",
        "target_model": "some/model",
    }
    return StageSpec(
        run_key=run_key(dag_id="tests", run_id="probe"), settings=settings_from_flat(values | changes)
    )


def write_plan(spec: StageSpec, *, missing_bytes: int, bytes_per_token: int = 1) -> RootLayout[Path]:
    context = StageContext(spec=spec, generation=1, report_progress=lambda _progress: None)
    context.write_record(
        PlanRecord(
            dataset="0" * 24,
            capture="1" * 24,
            num_samples=3,
            num_tokens=60,
            distinct_trained_tokens=10,
            shards=(RowRange(start=0, stop=3),),
            aux_layer_ids=(1, 3, 4),
            hidden_size=128,
            num_layers=8,
            target_vocab_size=2048,
            capture_dtype="float32",
            bytes_per_token=bytes_per_token,
            forecast_bytes=missing_bytes,
            missing_bytes=missing_bytes,
            release="2" * 24,
        )
    )
    return context.layout


def test_a_disk_with_room_for_what_the_plan_misses_is_ready(tmp_path: Path):
    spec = stage_spec(tmp_path)
    write_plan(spec, missing_bytes=12_345)
    verdict = run_probe(ProbeSpec(kind="disk", stage=spec))
    assert verdict.is_ready is True
    assert verdict.figures["needed_bytes"] == 12_345
    assert verdict.line.startswith(os.uname().nodename)


def test_what_was_committed_since_the_plan_is_not_needed_again_and_other_runs_samples_do_not_count(
    tmp_path: Path,
):
    spec = stage_spec(tmp_path)
    layout = write_plan(spec, missing_bytes=60 * GB * 10_000, bytes_per_token=10_000 * GB)
    folder = layout.dataset("0" * 24)
    with building(folder) as building_folder:
        assert building_folder is not None
        with DatasetWriter(building_folder) as writer:
            for first in range(3):
                writer.add(np.arange(first, first + 20, dtype=np.int32), np.ones(20, dtype=np.bool_))
            writer.finish()
    fill(layout.capture("1" * 24) / "rows_000000-000012", NAMES)
    verdict = run_probe(ProbeSpec(kind="disk", stage=spec))
    assert (verdict.is_ready, verdict.figures["needed_bytes"]) == (False, 60 * GB * 10_000)
    done = [Dataset(folder).sample(row) for row in (0, 2)]
    shard = layout.capture("1" * 24) / "rows_000000-000003"
    with shard_lock(shard), ShardWriter(shard, segment_bytes=10_000) as writer:
        for name in done:
            writer.append(name, make_sample("5"))
    assert run_probe(ProbeSpec(kind="disk", stage=spec)).figures["needed_bytes"] == 20 * GB * 10_000


def test_the_disk_can_not_be_judged_before_the_plan(tmp_path: Path):
    with pytest.raises(InvalidInput, match=r"plan\.json is missing"):
        run_probe(ProbeSpec(kind="disk", stage=stage_spec(tmp_path)))


@pytest.mark.parametrize("purpose", ["regenerate", "extract", "train"])
def test_a_run_on_the_cpu_waits_for_no_gpu(tmp_path: Path, purpose: Any):
    verdict = run_probe(ProbeSpec(kind="gpus", stage=stage_spec(tmp_path), purpose=purpose))
    assert verdict.is_ready is True
    assert "the run chose the CPU" in verdict.line


def test_the_agent_runs_the_command_and_passes_its_verdict_or_its_error_on(tmp_path: Path):
    spec = ProbeSpec(kind="gpus", stage=stage_spec(tmp_path))
    report = run_probe_command(ProbeBody(spec=codec.to_plain(spec)), os.environ)
    assert report["is_ready"] is True
    disk = ProbeSpec(kind="disk", stage=stage_spec(tmp_path))
    with pytest.raises(InvalidInput, match=r"plan\.json is missing"):
        run_probe_command(ProbeBody(spec=json.loads(codec.dumps(disk))), os.environ)
