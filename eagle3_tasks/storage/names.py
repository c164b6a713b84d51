"""Names of the files in a shard's folder.

::

    rows_000000-002000/
        shard.lock                          held by the one writer
        fence-0001.json                     written first by writer 1: what counts of older ones
        segment-0001-000000.safetensors     first segment of writer 1
        receipts-0001.jsonl                 one line per committed segment of writer 1
        quarantine-0001.jsonl               samples that writer 1 gave up
        voids.jsonl                         samples that verification has set aside
        manifest-DIGEST.json                one dataset's rows, written when all are there

A generation here is one writer's opening of the folder. Segments carry it in their
name: a writer that wakes up late can never overwrite a newer one's segment.
"""

from __future__ import annotations

import re

LOCK = "shard.lock"
VOIDS = "voids.jsonl"
CAPTURE_FACTS = "capture.json"
SET_ASIDE_SUFFIX = ".damaged"

_NUMBERED = re.compile(r"(?:fence|receipts|quarantine|segment)-(\d{4,})[.-].*")
_SEGMENT = re.compile(r"segment-\d{4,}-\d{6,}\.safetensors")


def fence_name(generation: int) -> str:
    return f"fence-{generation:04d}.json"


def receipts_name(generation: int) -> str:
    return f"receipts-{generation:04d}.jsonl"


def quarantine_name(generation: int) -> str:
    return f"quarantine-{generation:04d}.jsonl"


def segment_name(generation: int, number: int) -> str:
    return f"segment-{generation:04d}-{number:06d}.safetensors"


def manifest_name(dataset: str) -> str:
    return f"manifest-{dataset}.json"


def is_manifest(name: str) -> bool:
    """Say whether it is a manifest, of whatever dataset."""
    return name.startswith("manifest") and name.endswith(".json")


def is_segment(name: str) -> bool:
    return _SEGMENT.fullmatch(name) is not None


def generation_of(name: str) -> int | None:
    """Read the generation that a file's name carries; None for the other files."""
    match = _NUMBERED.fullmatch(name)
    return int(match[1]) if match else None
