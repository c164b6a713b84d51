"""Receipts and manifests: the record of what a capture holds.

Every line of a ``.jsonl`` file in a shard's folder is one of these records and, as its
last key, ``checksum``: the CRC-32 of the line as it would be without that key.
"""

from __future__ import annotations

import dataclasses

STORAGE_VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleRecord:
    """One committed sample.

    ``sample`` is the hash of its token ids. ``checksums`` holds one ``crc32:XXXXXXXX`` a
    tensor, by the tensor's short name (``token_ids``, ``aux_hidden``, ``last_hidden``).
    ``num_states`` counts the auxiliary states and the last one; ``num_bytes`` its tensors.
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
    """One committed segment. Without a receipt a segment does not exist.

    ``generation`` counts the writers that ever opened the shard's folder, from 1.
    ``segment`` is a file of that folder, ``num_bytes`` its size, ``header_checksum`` that of
    all bytes before its first tensor.
    """

    version: int = STORAGE_VERSION
    generation: int
    segment: str
    num_bytes: int
    header_checksum: str
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
class VoidRecord:
    """Samples of a segment that verification found damaged: they count as missing again."""

    version: int = STORAGE_VERSION
    segment: str
    samples: tuple[str, ...]
    reason: str
    voided_at: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fence:
    """Up to which byte each older file of a shard's folder counts.

    The first thing that a new generation writes: what an older writer appends later is
    ignored. An older file that isn't named does not count at all. Only the newest fence
    matters: it holds what the former one said.
    """

    version: int = STORAGE_VERSION
    generation: int
    counted_bytes: dict[str, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ManifestEntry:
    """Where a sample of the shard lies; ``segment`` is relative to the capture's folder."""

    sample: str
    row: int
    num_tokens: int
    segment: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardManifest:
    """One dataset's rows of a shard, written when each of them is committed or quarantined.

    For people and other tools: receipts alone say what is committed.
    """

    version: int = STORAGE_VERSION
    dataset: str
    start: int
    stop: int
    num_samples: int
    num_tokens: int
    num_bytes: int
    entries: tuple[ManifestEntry, ...]
    quarantined: tuple[QuarantineRecord, ...]
