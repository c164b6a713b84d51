"""Every error of the pipeline, its exit code, and what Airflow may do about it.

::

    PipelineError
    ├── UserProblem               only a person can help: Airflow fails the task at once
    │   ├── InvalidSettings       10  a value, or two values together, can't work
    │   ├── InvalidInput          11  conversations, tokenizer or target can't be used
    │   ├── ConnectionProblem     12  Airflow connection missing, login refused, host key
    │   ├── MissingSoftware       13  interpreter or package absent on the GPU host
    │   ├── IncompatibleRelease   14  the run's pinned code is gone and the new one differs
    │   ├── GateNotPassed         15  the draft model is worse than the run demands
    │   └── RequestRefused        16  a message that is not of the agreed form
    ├── NodeProblem               the machine or a process: Airflow retries
    │   ├── DiskProblem           30  no space, no inodes, read-only, stalled
    │   ├── GpuProblem            31  a card missing, broken or held by somebody else
    │   ├── OutOfMemory           32
    │   ├── DamagedData           33  checksums, sizes or receipts that don't agree
    │   ├── EngineProblem         34  the target model's engine gave something unusable
    │   ├── TrainingProblem       35  a rank died, or numbers stopped being finite
    │   ├── JobLost               36  the job's processes are gone without an exit record
    │   └── UnexpectedFailure     37  anything that is not in this table
    ├── HostUnreachable           50  says nothing about the job: wait, never start anything
    └── Cancelled                 60  a person asked for it: neither failure nor success
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

ProblemKind = Literal["user", "node", "unreachable", "cancelled"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ErrorRecord:
    """An error as it crosses the wire and as it lies in a job's folder."""

    code: str
    kind: ProblemKind
    message: str


class PipelineError(Exception):
    """Root of the tree. The message is the fact with its numbers, then what to do."""

    kind: ClassVar[ProblemKind] = "node"
    exit_code: ClassVar[int] = 37

    @property
    def code(self) -> str:
        """Short stable name, such as ``INVALID_INPUT``."""
        return _screaming_snake(type(self).__name__)

    def record(self) -> ErrorRecord:
        return ErrorRecord(code=self.code, kind=self.kind, message=str(self))


class UserProblem(PipelineError):
    kind = "user"


class InvalidSettings(UserProblem):
    exit_code = 10


class InvalidInput(UserProblem):
    exit_code = 11


class ConnectionProblem(UserProblem):
    exit_code = 12


class MissingSoftware(UserProblem):
    exit_code = 13


class IncompatibleRelease(UserProblem):
    exit_code = 14


class GateNotPassed(UserProblem):
    exit_code = 15


class RequestRefused(UserProblem):
    exit_code = 16


class NodeProblem(PipelineError):
    kind = "node"


class DiskProblem(NodeProblem):
    exit_code = 30


class GpuProblem(NodeProblem):
    exit_code = 31


class OutOfMemory(NodeProblem):
    exit_code = 32


class DamagedData(NodeProblem):
    exit_code = 33


class EngineProblem(NodeProblem):
    exit_code = 34


class TrainingProblem(NodeProblem):
    exit_code = 35


class JobLost(NodeProblem):
    exit_code = 36


class UnexpectedFailure(NodeProblem):
    exit_code = 37


class HostUnreachable(PipelineError):
    kind = "unreachable"
    exit_code = 50


class Cancelled(PipelineError):
    kind = "cancelled"
    exit_code = 60


def _screaming_snake(name: str) -> str:
    return "".join(f"_{letter}" if letter.isupper() else letter for letter in name).strip("_").upper()


def _leaves(parent: type[PipelineError]) -> list[type[PipelineError]]:
    children = parent.__subclasses__()
    return [leaf for child in children for leaf in _leaves(child)] if children else [parent]


LEAVES: tuple[type[PipelineError], ...] = tuple(_leaves(PipelineError))
_BY_CODE = {_screaming_snake(leaf.__name__): leaf for leaf in LEAVES}
_BY_EXIT_CODE = {leaf.exit_code: leaf for leaf in LEAVES}


def error_from_record(record: ErrorRecord) -> PipelineError:
    """Turn a record back into the error that it came from.

    A code that this release doesn't know keeps its kind: an older orchestrator still
    tells a user's problem from a node's.
    """
    leaf = _BY_CODE.get(record.code)
    if leaf is not None:
        return leaf(record.message)
    if record.kind == "user":
        return RequestRefused(f"{record.code}: {record.message}")
    return UnexpectedFailure(f"{record.code}: {record.message}")


def error_from_exit_code(exit_code: int, message: str) -> PipelineError:
    """Classify a command that left no error record. Unknown codes are the node's problem."""
    return _BY_EXIT_CODE.get(exit_code, UnexpectedFailure)(message)
