"""Live progress of a run in the terminal, read through Airflow's REST API."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from demo.airflow_client import AirflowClient

POLL_SECONDS = 2.0
PLAIN_LINE_SECONDS = 5.0
ENDED = ("success", "failed", "upstream_failed", "skipped", "removed")


def follow_run(
    client: AirflowClient, dag_id: str, run_id: str, *, check_services: Callable[[], None] = lambda: None
) -> str:
    """Print what happens until the run ends; gives its final state.

    On a terminal the progress is one line that is rewritten; elsewhere a line every few
    seconds if there is something new to say, so that a log file stays readable.
    """
    line = _StatusLine()
    states: dict[tuple[str, int], str] = {}
    began = time.monotonic()
    while True:
        check_services()
        state = client.run_state(dag_id, run_id)
        instances = client.task_instances(dag_id, run_id)
        for one in sorted(instances, key=lambda one: str(one["start_date"] or "~")):
            _print_change(one, states, line, time.monotonic() - began)
        line.show(*_progress_text(client, dag_id, run_id, instances))
        if state in ("success", "failed"):
            line.clear()
            return state
        time.sleep(POLL_SECONDS)


def _print_change(
    one: Mapping[str, Any], states: dict[tuple[str, int], str], line: _StatusLine, seconds: float
) -> None:
    key, state = (str(one["task_id"]), int(one["map_index"])), str(one["state"])
    if states.get(key) == state:
        return
    states[key] = state
    if state not in (*ENDED, "up_for_retry"):
        return
    name = (
        one["task_id"]
        if one["map_index"] < 0
        else f"{one['task_id']} {one['rendered_map_index'] or one['map_index']}"
    )
    duration = f"{one['duration']:7.1f} s" if one["duration"] else " " * 9
    line.print(f"{seconds:6.0f} s  {name:<38} {state:<12} {duration}")


def _progress_text(
    client: AirflowClient, dag_id: str, run_id: str, instances: Sequence[Mapping[str, Any]]
) -> tuple[str, str]:
    """Say what runs now: the stage, and how far it is: shards done, rate, time left, and loss."""
    active = [one for one in instances if one["state"] in ("running", "deferred", "queued")]
    if not active:
        return "", ""
    task_id = active[-1]["task_id"]
    shards = [one for one in instances if one["task_id"] == task_id and one["map_index"] >= 0]
    records = [
        client.xcom(dag_id, run_id, task_id, "progress", one["map_index"])
        for one in active
        if one["task_id"] == task_id
    ]
    parts: list[str] = []
    if shards:
        done = sum(one["state"] == "success" for one in shards)
        parts.append(f"{done}/{len(shards)} shards")
    parts += [text for record in records if isinstance(record, dict) and (text := _record_text(record))]
    return task_id, " | ".join(parts)


def _record_text(record: Mapping[str, Any]) -> str:
    text = f"{record['done']}/{record['total']} {record['unit']}"
    if record.get("rate_per_second"):
        text += f", {record['rate_per_second']:.1f}/s"
    if record.get("eta_seconds") is not None:
        text += f", ETA {record['eta_seconds']:.0f} s"
    if "loss" in record.get("values", {}):
        text += f", loss {record['values']['loss']:.3f}"
    return text


class _StatusLine:
    """The last line of a terminal, rewritten; plain lines at intervals elsewhere."""

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty()
        self._shown = ""
        self._shown_at = 0.0

    def show(self, stage: str, progress: str) -> None:
        text = " | ".join(part for part in (stage, progress) if part)
        if self._is_terminal:
            # A line that wraps could not be taken back.
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\033[K{text[:width]}", end="", flush=True)
        elif progress and text != self._shown and time.monotonic() - self._shown_at >= PLAIN_LINE_SECONDS:
            print(f"          {text}", flush=True)
            self._shown_at = time.monotonic()
            self._shown = text

    def print(self, text: str) -> None:
        self.clear()
        print(text, flush=True)

    def clear(self) -> None:
        if self._is_terminal:
            print("\r\033[K", end="", flush=True)
