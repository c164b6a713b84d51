"""What a job's commands say about themselves: the measure that no code of the product touches.

Each command takes a file lock that its whole tree inherits. Who finds it taken has found two
trees of one job alive at once, and says so in a file.
"""

from __future__ import annotations

import contextlib
from pathlib import Path


class Witness:
    """What the commands of one job have written about themselves, in a folder of the test's own."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder = folder

    def script(self, body: str) -> str:
        """Make ``body`` a command that bears witness: beginning, overlap, orderly end."""
        return (
            f"exec 9>>{self.folder}/busy; flock -n 9 || echo $$ >> {self.folder}/overlaps; "
            f"basename $EAGLE3_GENERATION_FOLDER >> {self.folder}/begun; {body}; "
            f"basename $EAGLE3_GENERATION_FOLDER >> {self.folder}/done"
        )

    def lines(self, name: str) -> list[str]:
        file = self.folder / name
        return file.read_text().split() if file.exists() else []

    @property
    def begun(self) -> list[str]:
        """The generations whose command has begun, in order."""
        return self.lines("begun")

    def living(self) -> list[str]:
        """Name the processes of the job that live: who has the lock's file open."""
        lock = self.folder / "busy"
        found = []
        for descriptor in Path("/proc").glob("[0-9]*/fd/9"):
            with contextlib.suppress(OSError):
                if lock.exists() and descriptor.samefile(lock):
                    process = descriptor.parents[1]
                    words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
                    found.append(f"{process.name}: {' '.join(words)}")
        return found

    def check(self) -> None:
        assert self.lines("overlaps") == [], "two trees of one job at once"
        begun = self.begun
        assert len(set(begun)) == len(begun), "a generation's command ran twice"
