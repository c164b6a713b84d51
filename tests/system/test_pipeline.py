"""The whole DAG in a real Airflow, over a real sshd, with the demo's target.

One Airflow and one ROOT serve all tests of this file, in their order: a later test
reuses what an earlier one made, as a user's second run does.
"""

import json
import struct
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from demo.airflow_client import AirflowClient
from eagle3_tasks.contracts.jobs import run_key
from eagle3_tasks.contracts.run_records import DraftModelRecord, EvaluationRecord, PlanRecord
from tests.system.conftest import DAG_ID, Pipeline

pytestmark = pytest.mark.timeout(900)

FAILING_SHARD = "rows_000150-000300"
FAILING_INDEX = 1
FIRST_RUN = "-rf~first.run"
DRAFT_TENSORS = {
    "fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d", "midlayer.hidden_norm.weight",
    "midlayer.input_layernorm.weight", "midlayer.post_attention_layernorm.weight",
    "midlayer.self_attn.q_proj.weight", "midlayer.self_attn.k_proj.weight",
    "midlayer.self_attn.v_proj.weight", "midlayer.self_attn.o_proj.weight",
    "midlayer.mlp.gate_proj.weight", "midlayer.mlp.up_proj.weight", "midlayer.mlp.down_proj.weight",
}  # fmt: skip


def committed_samples(capture: Path) -> Counter[str]:
    """Count how often each sample stands in the capture's receipts, read without the product's reader."""
    counts: Counter[str] = Counter()
    for path in capture.glob("rows_*/receipts-*.jsonl"):
        for line in path.read_text().splitlines():
            receipt = json.loads(line)
            counts.update(sample["sample"] for sample in receipt["samples"])
            assert (path.parent / receipt["segment"]).stat().st_size == receipt["num_bytes"]
    return counts


def tensor_shapes(path: Path) -> dict[str, list[int]]:
    """Read a safetensors header by its published form."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    return {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}


def shards(client: AirflowClient, run_id: str) -> dict[str, dict[str, Any]]:
    instances = client.task_instances(DAG_ID, run_id)
    return {str(one["rendered_map_index"]): one for one in instances if one["task_id"] == "extract"}


def wait_for(condition: Callable[[], bool], *, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.3)


def test_a_failed_shard_fails_the_run_and_its_log_says_why(pipeline: Pipeline) -> None:
    pipeline.inject(
        [{"point": "extract_started", "match": FAILING_SHARD, "raise": "InvalidInput: injected reason 4711"}]
    )
    pipeline.client.trigger(DAG_ID, run_id=FIRST_RUN, conf=pipeline.conf())
    assert pipeline.wait(FIRST_RUN) == "failed"
    states = {name: one["state"] for name, one in shards(pipeline.client, FIRST_RUN).items()}
    assert states.pop(FAILING_SHARD) == "failed"
    assert len(states) >= 3
    assert set(states.values()) == {"success"}
    log = pipeline.client.log(DAG_ID, FIRST_RUN, "extract", try_number=1, map_index=FAILING_INDEX)
    assert "injected reason 4711" in log


def test_clearing_that_shard_reruns_it_alone_and_survives_the_death_of_all_of_airflow(
    pipeline: Pipeline,
) -> None:
    before = shards(pipeline.client, FIRST_RUN)
    # Slow enough to be killed in the middle.
    pipeline.inject([{"point": "sample_written", "match": FAILING_SHARD, "sleep_seconds": 0.06}])
    pipeline.client.clear(DAG_ID, FIRST_RUN, "extract", FAILING_INDEX, include_downstream=True)

    def is_writing() -> bool:
        return bool(list(pipeline.root.glob(f"captures/*/{FAILING_SHARD}/.segment-*.tmp")))

    wait_for(is_writing, seconds=90, what="the cleared shard writes its first segment")
    pipeline.services.kill()
    pipeline.start_airflow()
    assert pipeline.wait(FIRST_RUN) == "success"
    after = shards(pipeline.client, FIRST_RUN)
    assert {name for name in after if after[name]["try_number"] != before[name]["try_number"]} == {
        FAILING_SHARD
    }
    assert len(list(pipeline.root.glob("jobs/extract-000150_000300-*/gen-*"))) == 2

    plan = pipeline.record(PlanRecord, FIRST_RUN, "plan.json")
    counts = committed_samples(pipeline.layout.capture(plan.capture))
    assert len(counts) == plan.num_samples
    assert set(counts.values()) == {1}


def test_the_draft_model_reaches_its_accept_lengths_and_has_exactly_the_served_keys(
    pipeline: Pipeline,
) -> None:
    evaluation = pipeline.record(EvaluationRecord, FIRST_RUN, "evaluation.json")
    results = {one.name: one for one in evaluation.results}
    assert results["training"].looped_accept_length >= 2.6
    assert results["reworded"].looped_accept_length >= 1.6
    assert "new_questions" in results
    for one in results.values():
        assert one.untrained_accept_length <= 1.1
        assert one.is_identical_to_greedy
        assert one.simulated_accept_length == pytest.approx(one.looped_accept_length, rel=0.02)
    model = pipeline.record(DraftModelRecord, FIRST_RUN, "draft_model.json")
    folder = pipeline.layout.draft_model(model.draft_model)
    assert (folder / "config.json").exists()
    shapes = tensor_shapes(folder / "model.safetensors")
    assert set(shapes) - {"embed_tokens.weight"} == DRAFT_TENSORS
    assert shapes["fc.weight"] == [128, 3 * 128]
    assert shapes["d2t"] == [1024]
    assert shapes["t2d"] == [2048]


def test_other_training_settings_reuse_dataset_and_capture(pipeline: Pipeline) -> None:
    pipeline.inject([])
    run_id = "other_training_settings"
    conf = pipeline.conf(epochs=1, min_accept_length=0.0, seed=7, evaluation_rows=4, evaluation_sets=[])
    pipeline.client.trigger(DAG_ID, run_id=run_id, conf=conf)
    assert pipeline.wait(run_id) == "success"
    reports = [
        pipeline.client.xcom(DAG_ID, run_id, "extract", "report", index)
        for index in range(len(shards(pipeline.client, run_id)))
    ]
    assert [report["extracted"] for report in reports] == [0] * len(reports)
    first, second = (pipeline.record(PlanRecord, one, "plan.json") for one in (FIRST_RUN, run_id))
    assert (first.capture, first.dataset) == (second.capture, second.dataset)
    assert second.missing_bytes == 0


WRONG_INPUTS = {
    "no_file": ({"conversations_path": "/nowhere/chat.jsonl"}, "/nowhere/chat.jsonl"),
    "no_model": ({"target_model": "/nowhere/model"}, "/nowhere/model"),
    "vocabulary": ({"draft_vocab_size": 4096}, "2048"),
    "root": ({"root": "/proc/eagle3"}, "/proc/eagle3"),
    "connection": ({"ssh_conn_id": "no_such_host"}, "no_such_host"),
    "host_key": ({"ssh_conn_id": "eagle3_changed_host"}, "host key"),
}


def test_wrong_input_is_one_clear_error_before_any_work(pipeline: Pipeline) -> None:
    for name, (change, _) in WRONG_INPUTS.items():
        pipeline.client.trigger(DAG_ID, run_id=f"wrong_{name}", conf=pipeline.conf(**change))
    for name, (_, words) in WRONG_INPUTS.items():
        run_id = f"wrong_{name}"
        assert pipeline.wait(run_id) == "failed"
        states = {one["task_id"]: one["state"] for one in pipeline.client.task_instances(DAG_ID, run_id)}
        assert states.pop("preflight") == "failed"
        assert set(states.values()) == {"upstream_failed"}
        assert words in pipeline.client.log(DAG_ID, run_id, "preflight", try_number=1)
        assert not (pipeline.layout.run(run_key(dag_id=DAG_ID, run_id=run_id)) / "plan.json").exists()
