"""Remote jobs: their names, states, and the messages between orchestrator and agent.

The orchestrator runs one constant command over SSH and writes one :class:`Hello` line
to its standard input, then :class:`Request` lines. Each answer comes back inside a frame
that carries the connection's nonce, so noise of shells and banners is harmless.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import re
from collections.abc import Mapping
from typing import Any, Literal

from eagle3_tasks.contracts import codec
from eagle3_tasks.contracts.errors import ErrorRecord, RequestRefused
from eagle3_tasks.contracts.rows import RowRange

PROTOCOL_VERSION = 1
MAX_LOG_PIECE_BYTES = 65_536
MAX_PROGRESS_BYTES = 1_024
MAX_REPORT_BYTES = 262_144
"""Holds the shards of the largest run: 1,024 of them, each with its host."""
AGENT_PYTHON = "@python"
"""First word of a job's argv that stands for the interpreter which the agent runs under."""

_KEY = re.compile(r"[a-z0-9][a-z0-9_]{0,47}(-[a-z0-9_]{1,40})?-[0-9a-f]{24}")
_RUN_KEY = re.compile(r"[a-z0-9_]{1,60}-[0-9a-f]{16}")


class JobState(enum.StrEnum):
    """What is known of a job's newest generation."""

    ABSENT = "ABSENT"
    QUEUED = "QUEUED"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    LOST = "LOST"

    @property
    def is_final(self) -> bool:
        return self not in (JobState.ABSENT, JobState.QUEUED, JobState.RUNNING)


def job_key(*, dag_id: str, run_id: str, stage: str, rows: RowRange | None = None, host: str = "") -> str:
    """Name a job by what it is, never by the attempt.

    The readable part is for people; only the hash distinguishes, so identifiers of any
    content are safe as a folder name.
    """
    digest = hashlib.sha256(
        codec.canonical([dag_id, run_id, stage, [rows.start, rows.stop] if rows else None, host])
    ).hexdigest()[:24]
    middle = f"-{rows.start:06d}_{rows.stop:06d}" if rows else ""
    return f"{_readable(stage, 48) or 'job'}{middle}-{digest}"


def run_key(*, dag_id: str, run_id: str) -> str:
    """Name a run's folder: a readable part, and a hash that alone distinguishes."""
    digest = hashlib.sha256(codec.canonical([dag_id, run_id])).hexdigest()[:16]
    return f"{_readable(run_id, 60) or 'run'}-{digest}"


def check_job_key(key: str) -> str:
    """Return ``key`` if it has the form of a job's name.

    Raises:
        RequestRefused: it has not; so no message can name a folder outside ROOT/jobs.
    """
    if _KEY.fullmatch(key) is None:
        raise RequestRefused(f"{key!r} is not the key of a job.")
    return key


def check_run_key(key: str) -> str:
    """Return ``key`` if it has the form of a run's name.

    Raises:
        RequestRefused: it has not.
    """
    if _RUN_KEY.fullmatch(key) is None:
        raise RequestRefused(f"{key!r} is not the key of a run.")
    return key


def _readable(text: str, limit: int) -> str:
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")[:limit].strip("_")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotRule:
    """At most ``count`` jobs of the pool ``name`` run at once on a host, lowest ``order`` first."""

    name: str
    count: int
    order: int = 0

    def __post_init__(self) -> None:
        if re.fullmatch(r"[a-z][a-z0-9_]{0,31}", self.name) is None or self.count < 1:
            raise RequestRefused(f"slot pool {self.name!r} with {self.count} places is not possible.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobSpec:
    """What a job is asked. Goes down on standard input, never on a command line.

    ``argv`` is executed without a shell; its first word may be :data:`AGENT_PYTHON`.
    ``stdin`` is the text that the command reads.
    """

    version: int = PROTOCOL_VERSION
    key: str
    stage: str
    run_key: str
    argv: tuple[str, ...]
    stdin: str = ""
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    slots: SlotRule | None = None
    orphan_minutes: float = 1440.0
    grace_seconds: float = 20.0

    def __post_init__(self) -> None:
        check_job_key(self.key)
        check_run_key(self.run_key)
        if not self.argv:
            raise RequestRefused("a job needs a command: argv is empty.")
        if any("\0" in word for word in self.argv):
            raise RequestRefused("a command's word holds a zero byte.")
        for name, value in self.environment.items():
            if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) is None or "\0" in value:
                raise RequestRefused(f"{name!r} can't be an environment variable.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a job is. Under 1 KiB as JSON; ``done`` doubles as the progress counter."""

    stage: str
    done: int
    total: int
    unit: str
    seconds: float
    rate_per_second: float | None = None
    eta_seconds: float | None = None
    values: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExitRecord:
    """Written last by the runner: without it a job has not ended.

    ``exit_code`` is the command's own, or None where a signal ended it.
    """

    state: JobState
    exit_code: int | None
    signal: int | None
    error: ErrorRecord | None
    ended_at: float
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogPiece:
    """Bytes ``[start, stop)`` of the job's log; ``data`` is base64.

    ``omitted_bytes`` were left out just before ``start`` because the log flooded.
    ``size`` is the log's length when the piece was read.
    """

    start: int
    stop: int
    size: int
    data: str
    omitted_bytes: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobStatus:
    """The agent's answer about one job.

    ``detail`` says in words what a person would ask: the holder of a slot, or how a job
    was lost. ``report`` is there once the job has succeeded.
    """

    key: str
    state: JobState
    generation: int = 0
    detail: str = ""
    heartbeat_age_seconds: float | None = None
    acknowledged: bool = False
    progress: Progress | None = None
    exit: ExitRecord | None = None
    report: Mapping[str, Any] | None = None
    log: LogPiece | None = None
    log_path: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hello:
    """First line to the agent. ``release`` is the digest of the code that must answer.

    Only with ``make_root`` is a ROOT made that isn't there. Everybody else takes its absence
    for a disk that is not mounted.
    """

    protocol: int = PROTOCOL_VERSION
    nonce: str
    root: str
    release: str
    python: str = ""
    make_root: bool = False


Verb = Literal["hello", "submit", "poll", "cancel", "acknowledge", "probe"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One line to the agent. ``body`` is a dataclass of the verb, as plain JSON."""

    id: int
    verb: Verb
    body: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """One framed line from the agent: ``body``, or ``error``."""

    id: int
    body: Mapping[str, Any] | None = None
    error: ErrorRecord | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class HelloBody:
    """Body of ``hello``: nothing to say, only to learn who answers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HelloReply:
    """Who answers: the machine's identity, the interpreter and the verified release."""

    host_name: str
    machine_id: str
    python: str
    python_version: str
    release: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class SubmitBody:
    spec: JobSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class PollItem:
    """One job to ask about.

    ``confirmed`` is the offset up to which this reader has handed the log on, with the
    ``generation`` it belongs to; None on a reader's first poll.
    """

    key: str
    generation: int = 0
    confirmed: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PollBody:
    jobs: tuple[PollItem, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PollReply:
    """A job that could not be looked at just now is UNKNOWN: it stands in ``errors``, by key."""

    jobs: tuple[JobStatus, ...]
    errors: Mapping[str, ErrorRecord] = dataclasses.field(default_factory=dict[str, ErrorRecord])


@dataclasses.dataclass(frozen=True, kw_only=True)
class CancelBody:
    key: str
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class AcknowledgeBody:
    """Airflow has recorded the success of ``generation``."""

    key: str
    generation: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbeBody:
    """Run ``eagle3 probe`` on the host with this spec and give back its report."""

    spec: Mapping[str, Any]
    deadline_seconds: float = 30.0


def frame_marks(nonce: str) -> tuple[str, str]:
    """Give what opens and what closes a frame."""
    return f"<<<EAGLE:{nonce} ", f" EAGLE:{nonce}>>>"


def frame(nonce: str, answer: Answer) -> str:
    """Wrap an answer so that it is found in any noise. One line, with its newline."""
    opening, closing = frame_marks(nonce)
    return f"{opening}{codec.dumps(answer)}{closing}\n"


def find_frames(nonce: str, text: str) -> tuple[list[Answer], str]:
    """Find the complete answers in ``text``.

    Returns:
        the answers in order, and the rest that may hold the beginning of a further one.

    Raises:
        RequestRefused: a frame with this nonce holds something else than an answer.
    """
    opening, closing = frame_marks(nonce)
    answers: list[Answer] = []
    while (start := text.find(opening)) >= 0:
        stop = text.find(closing, start)
        if stop < 0:
            return answers, text[start:]
        answers.append(codec.loads(Answer, text[start + len(opening) : stop], where="answer"))
        text = text[stop + len(closing) :]
    # A frame's opening may be cut by the end of a network packet.
    return answers, text[-(len(opening) - 1) :]
