"""What a stage's command reads on standard input, and the files it may write for its job."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from eagle3_tasks.contracts import codec
from eagle3_tasks.contracts.jobs import check_run_key
from eagle3_tasks.contracts.rows import RowRange
from eagle3_tasks.contracts.settings import Settings

STAGE_VERSION = 1

Stage = Literal[
    "preflight", "read-conversations", "regenerate", "prepare-data", "plan", "extract", "verify",
    "map-vocab", "train", "export-candidate", "evaluate", "publish", "setup-host", "check-host",
]  # fmt: skip

GENERATION_FOLDER_VARIABLE = "EAGLE3_GENERATION_FOLDER"
"""Environment variable of a job's command: the folder for the three files below. Unset by hand."""
PROGRESS_FILE = "progress.json"
REPORT_FILE = "report.json"
ERROR_FILE = "error.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageSpec:
    """One stage's work. The state of the run is in the folders under ``settings.host.root``.

    ``rows`` is the shard of a mapped stage, else None.
    """

    version: int = STAGE_VERSION
    run_key: str
    settings: Settings
    rows: RowRange | None = None

    def __post_init__(self) -> None:
        check_run_key(self.run_key)


def parse_stage_spec(text: str | bytes, *, where: str) -> StageSpec:
    """Read a spec, strictly.

    Raises:
        RequestRefused: not of the declared form.
        InvalidSettings: its settings can't work.
    """
    return codec.loads(StageSpec, text, where=where)


ProbeKind = Literal["disk", "gpus"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbeSpec:
    """What a sensor wants to know of the host, for one run."""

    kind: ProbeKind
    stage: StageSpec
    purpose: Literal["regenerate", "extract", "train"] = "extract"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbeVerdict:
    """Whether the host is ready, in one line for the log and in figures.

    ``is_ready`` None means: cannot tell. It is never treated as ready.
    """

    is_ready: bool | None
    line: str
    figures: dict[str, Any]
