"""The demo's last words: what was made, how long each stage took, how good the draft model is."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from demo.airflow_client import AirflowClient
from eagle3_tasks.contracts import codec
from eagle3_tasks.contracts.jobs import run_key
from eagle3_tasks.contracts.paths import RootLayout
from eagle3_tasks.contracts.run_records import (
    ConversationsRecord,
    DatasetRecord,
    DraftModelRecord,
    EvaluationRecord,
    EvaluationResult,
    PlanRecord,
    TrainingRecord,
)

R = TypeVar("R")
BAR_WIDTH = 30


def print_report(client: AirflowClient, dag_id: str, run_id: str, *, root: Path, seconds: float) -> None:
    """Print what is known of the run; a run that failed prints as far as it came."""
    layout = RootLayout(root)
    folder = layout.run(run_key(dag_id=dag_id, run_id=run_id))
    instances = client.task_instances(dag_id, run_id)
    print(f"\n== report of {run_id}")
    _print_stages(instances)
    if conversations := _read(ConversationsRecord, folder / "conversations.json"):
        print(f"rows          {conversations.num_rows:,} kept, {conversations.num_rejects:,} rejected")
    if dataset := _read(DatasetRecord, folder / "dataset.json"):
        trained = 100 * dataset.num_trained_tokens / dataset.num_tokens
        print(
            f"samples       {dataset.num_samples:,}\n"
            f"tokens        {dataset.num_tokens:,} ({trained:.0f} % trained)"
        )
    if plan := _read(PlanRecord, folder / "plan.json"):
        print(f"bytes         {plan.forecast_bytes:,} of hidden states, {plan.missing_bytes:,} of them new")
    if training := _read(TrainingRecord, folder / "training.json"):
        print(f"training      {training.num_steps:,} steps, final loss {training.final_loss:.3f}")
    if evaluation := _read(EvaluationRecord, folder / "evaluation.json"):
        _print_evaluation(evaluation.results)
    if model := _read(DraftModelRecord, folder / "draft_model.json"):
        print(f"draft model   {layout.draft_model(model.draft_model)}")
        print(f"plot          {layout.draft_model(model.draft_model) / 'training.png'}")
    for one in instances:
        if one["state"] == "failed":
            log = client.log(
                dag_id, run_id, one["task_id"], try_number=one["try_number"], map_index=one["map_index"]
            )
            reason = next((line for line in reversed(log.splitlines()) if "Exception: " in line), "")
            print(f"failed        {one['task_id']} {one['rendered_map_index'] or ''} {reason}")
    print(f"all           {seconds:.0f} s")


def _print_stages(instances: Sequence[Mapping[str, Any]]) -> None:
    spans: dict[str, tuple[datetime.datetime, datetime.datetime, int]] = {}
    for one in instances:
        if not one["start_date"] or not one["end_date"]:
            continue
        begin, end = (datetime.datetime.fromisoformat(one[name]) for name in ("start_date", "end_date"))
        first, last, count = spans.get(one["task_id"], (begin, end, 0))
        spans[one["task_id"]] = (min(first, begin), max(last, end), count + 1)
    longest = max(((end - begin).total_seconds() for begin, end, _ in spans.values()), default=0.0) or 1.0
    for task_id, (begin, end, count) in sorted(spans.items(), key=lambda item: item[1][0]):
        lasted = (end - begin).total_seconds()
        shards = f"  {count} shards" if count > 1 else ""
        print(f"  {task_id:<28} {lasted:7.1f} s  {'#' * round(BAR_WIDTH * lasted / longest)}{shards}")


def _print_evaluation(results: Sequence[EvaluationResult]) -> None:
    print("accept length untrained  simulated  looped  demanded  identical to greedy")
    for one in results:
        demanded = f"{one.min_accept_length:.2f}" if one.min_accept_length else "-"
        print(
            f"  {one.name:<14} {one.untrained_accept_length:5.2f}  {one.simulated_accept_length:9.2f}"
            f"  {one.looped_accept_length:6.2f}  {demanded:>8}"
            f"  {'yes' if one.is_identical_to_greedy else 'NO'}"
        )


def _read(kind: type[R], path: Path) -> R | None:
    return codec.loads(kind, path.read_bytes(), where=str(path)) if path.exists() else None
