"""A shard's manifests: one a dataset, made from receipts when all its rows are there."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from eagle3_tasks.contracts.errors import RequestRefused
from eagle3_tasks.contracts.receipts import ManifestEntry, ShardManifest
from eagle3_tasks.contracts.rows import RowRange
from eagle3_tasks.host.files import read_json, write_json
from eagle3_tasks.storage import names
from eagle3_tasks.storage.capture import Capture
from eagle3_tasks.storage.disk_guard import disk_errors
from eagle3_tasks.storage.fault_points import fault_point

logger = logging.getLogger(__name__)


def make_manifest(capture: Capture, *, dataset: str, rows: RowRange, samples: Sequence[str]) -> ShardManifest:
    """List where the samples of ``rows`` lie, also in segments of other shards.

    Args:
        capture: with its index loaded; each sample is committed or quarantined.
        dataset: the digest of the dataset that has these rows.
        rows: the shard's rows.
        samples: the name of each row's sample, in row order.
    """
    entries = tuple(
        ManifestEntry(
            sample=sample,
            row=row,
            num_tokens=capture.num_tokens(sample),
            segment=capture.location(sample).segment,
        )
        for row, sample in enumerate(samples, start=rows.start)
        if capture.has(sample)
    )
    unique = dict.fromkeys(entry.sample for entry in entries)
    return ShardManifest(
        dataset=dataset,
        start=rows.start,
        stop=rows.stop,
        num_samples=len(entries),
        num_tokens=sum(entry.num_tokens for entry in entries),
        num_bytes=sum(capture.location(sample).num_bytes for sample in unique),
        entries=entries,
        quarantined=tuple(
            capture.quarantined[sample] for sample in dict.fromkeys(samples) if sample in capture.quarantined
        ),
    )


def write_manifest(folder: Path, manifest: ShardManifest) -> None:
    """Write the dataset's manifest unless an equal one lies there. The caller holds the folder's lock."""
    path = folder / names.manifest_name(manifest.dataset)
    try:
        former = read_json(ShardManifest, path)
    except RequestRefused as error:
        logger.warning("manifest replaced: %s", error)
        former = None
    if former != manifest:
        with disk_errors(path):
            write_json(path, manifest)
        fault_point("manifest_written", folder.name)
