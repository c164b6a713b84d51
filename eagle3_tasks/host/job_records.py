"""The files of a job's generation that only the host reads: who runs it, and what was asked of it."""

from __future__ import annotations

import dataclasses

from eagle3_tasks.host.process import ProcessIdentity

SPEC_FILE = "spec.json"
STARTED_FILE = "started.json"
HEARTBEAT_FILE = "heartbeat.json"
LOG_FILE = "output.log"
LOG_MARKS_FILE = "log_marks.json"
DELIVERED_FILE = "delivered.json"
CANCEL_FILE = "cancel.json"
EXIT_FILE = "exit.json"
ACKNOWLEDGED_FILE = "acknowledged.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartedRecord:
    """``started.json``, by the runner: first without a command (it waits for a place), then with."""

    machine_id: str
    runner: ProcessIdentity
    command: ProcessIdentity | None
    started_at: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeartbeatRecord:
    """``heartbeat.json``, by the runner. ``boot_seconds`` is immune to changes of the clock."""

    at: float
    boot_seconds: float
    detail: str
    done: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeliveredRecord:
    """``delivered.json``, by the agent: the log is handed on up to ``offset``."""

    offset: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class CancelRecord:
    """``cancel.json``, by the agent: a person wants the job to stop."""

    reason: str
    at: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class AcknowledgedRecord:
    """``acknowledged.json``, by the agent: Airflow has recorded the success."""

    at: float
