"""What every stage gets: its spec, ROOT's layout, the run's records, and where progress goes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from eagle3_tasks.contracts.errors import InvalidInput
from eagle3_tasks.contracts.jobs import Progress
from eagle3_tasks.contracts.paths import RootLayout
from eagle3_tasks.contracts.settings import Settings
from eagle3_tasks.contracts.stages import StageSpec
from eagle3_tasks.host.files import make_private_folder, read_json, write_json

R = TypeVar("R")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageContext:
    """One attempt at one stage.

    ``generation`` counts the attempts at this job, from 1, for the log.
    ``report_progress`` is cheap and may be called often: it writes at most once a second.
    """

    spec: StageSpec
    generation: int
    report_progress: Callable[[Progress], None]

    @property
    def settings(self) -> Settings:
        return self.spec.settings

    @property
    def layout(self) -> RootLayout[Path]:
        return RootLayout(Path(self.settings.host.root))

    def write_record(self, record: object) -> None:
        """Write one of ``contracts.run_records`` into the run's folder."""
        folder = make_private_folder(self.layout.run(self.spec.run_key))
        write_json(folder / _file_name(type(record)), record)

    def read_record(self, kind: type[R]) -> R:
        """Read one of ``contracts.run_records`` of this run.

        Raises:
            InvalidInput: the stage that writes it has not ended yet in this run.
        """
        path = self.layout.run(self.spec.run_key) / _file_name(kind)
        record = read_json(kind, path)
        if record is None:
            raise InvalidInput(f"{path} is missing: the stage that writes it has not run. Run it first.")
        return record


def _file_name(kind: type) -> str:
    """``ConversationsRecord`` lies in ``conversations.json``."""
    words = re.findall(r"[A-Z][a-z0-9]*", kind.__name__.removesuffix("Record"))
    return "_".join(word.lower() for word in words) + ".json"
