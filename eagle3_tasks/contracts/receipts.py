"""Receipts and manifests: the record of what a capture holds."""

from __future__ import annotations

import dataclasses

STORAGE_VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleRecord:
    """One committed sample.

    ``sample`` is the hash of its token ids. ``checksums`` holds one ``crc32:XXXXXXXX`` a
    tensor, by the tensor's short name (``token_ids``, ``aux_hidden``, ``last_hidden``).
    """

    sample: str
    num_tokens: int
    num_states: int
    hidden_size: int
    dtype: str
    num_bytes: int
    checksums: dict[str, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Receipt:
    """One committed segment. Without a receipt a segment does not exist."""

    version: int = STORAGE_VERSION
    generation: int
    segment: str
    num_bytes: int
    committed_at: float
    samples: tuple[SampleRecord, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuarantineRecord:
    """A sample that the engine could not capture as it must be, and why."""

    version: int = STORAGE_VERSION
    generation: int
    sample: str
    row: int
    num_tokens: int
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class ManifestEntry:
    """Where a sample of the shard lies; ``segment`` is relative to the capture's folder."""

    sample: str
    row: int
    num_tokens: int
    segment: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardManifest:
    """Written once, when every row of the shard is committed or quarantined."""

    version: int = STORAGE_VERSION
    start: int
    stop: int
    num_samples: int
    num_tokens: int
    num_bytes: int
    entries: tuple[ManifestEntry, ...]
    quarantined: tuple[QuarantineRecord, ...]
