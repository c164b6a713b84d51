"""Where everything lies under ROOT.

What is found there is found by relative names: a disk that moved is the same ROOT.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import PurePath
from typing import Generic, TypeVar

from eagle3_tasks.contracts.errors import RequestRefused
from eagle3_tasks.contracts.jobs import check_job_key, check_run_key

_DIGEST = re.compile(r"[0-9a-f]{24}")
P = TypeVar("P", bound=PurePath)


@dataclasses.dataclass(frozen=True)
class RootLayout(Generic[P]):
    """Names of folders and files under one ROOT; pure, touches no disk."""

    root: P

    @property
    def environment(self) -> P:
        return self.root / "env"

    def release(self, digest: str) -> P:
        return self.root / "releases" / check_digest(digest)

    def job(self, key: str) -> P:
        return self.root / "jobs" / check_job_key(key)

    def slots(self, pool: str) -> P:
        return self.root / "slots" / pool

    def run(self, key: str) -> P:
        return self.root / "runs" / check_run_key(key)

    def conversations(self, digest: str) -> P:
        return self.root / "conversations" / check_digest(digest)

    def dataset(self, digest: str) -> P:
        return self.root / "datasets" / check_digest(digest)

    def capture(self, digest: str) -> P:
        return self.root / "captures" / check_digest(digest)

    def vocabulary(self, digest: str) -> P:
        return self.root / "vocabularies" / check_digest(digest)

    def training(self, digest: str) -> P:
        return self.root / "training" / check_digest(digest)

    @property
    def fingerprints(self) -> P:
        return self.root / "fingerprints"

    def draft_model(self, digest: str) -> P:
        return self.root / "draft_models" / check_digest(digest)


def check_digest(digest: str) -> str:
    """Return ``digest`` if it is 24 hexadecimal digits.

    Raises:
        RequestRefused: it is not; so no name read from a file leads outside ROOT.
    """
    if _DIGEST.fullmatch(digest) is None:
        raise RequestRefused(f"{digest!r} is not a digest of 24 hexadecimal digits.")
    return digest
