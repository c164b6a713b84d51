"""Finding and reading the samples of a capture, whatever run, order or shard size asked for them.

The index is made from receipts alone: no tensor is read to learn a length, and only
:meth:`Capture.read` needs torch.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from eagle3_tasks.contracts.errors import DamagedData
from eagle3_tasks.contracts.receipts import QuarantineRecord
from eagle3_tasks.storage.receipts import read_shard
from eagle3_tasks.storage.sample import TENSORS, CapturedSample

if TYPE_CHECKING:
    import safetensors

_OPEN_SEGMENTS = 64


class SampleLocation(NamedTuple):
    """Where a committed sample lies.

    ``segment`` is relative to the capture's folder; ``receipt`` and ``record`` are the
    lines of :class:`~eagle3_tasks.contracts.receipts.Receipt` and ``SampleRecord`` as dictionaries.
    """

    segment: str
    receipt: dict[str, Any]
    record: dict[str, Any]


def shard_folders(capture_folder: Path) -> list[Path]:
    """List the shards' folders in the order of their names."""
    if not capture_folder.is_dir():
        return []
    return sorted(
        path for path in capture_folder.iterdir() if path.is_dir() and path.name.startswith("rows_")
    )


def committed_bytes(capture_folder: Path) -> int:
    """Count the tensor bytes of all committed samples, from receipts alone."""
    index = Capture(capture_folder)
    index.load_index()
    return index.num_bytes


class Capture:
    """The committed samples of one capture's folder.

    The index is a snapshot: :meth:`load_index` takes a new one. A folder that doesn't
    exist is an empty capture.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.quarantined: dict[str, QuarantineRecord] = {}
        self._locations: dict[str, SampleLocation] = {}
        self._open_segment = functools.lru_cache(maxsize=_OPEN_SEGMENTS)(self._open_segment_file)

    def load_index(self) -> None:
        """Read the receipts of all shards.

        Raises:
            DamagedData: a record of another storage version.
        """
        locations: dict[str, SampleLocation] = {}
        quarantined: dict[str, QuarantineRecord] = {}
        for folder in shard_folders(self.folder):
            records = read_shard(folder)
            for receipt in records.receipts:
                name: str = receipt["segment"]
                segment = f"{folder.name}/{name}"
                for record in receipt["samples"]:
                    sample: str = record["sample"]
                    if sample not in locations and (name, sample) not in records.voided:
                        locations[sample] = SampleLocation(segment, receipt, record)
            for line in records.quarantined:
                fields = {key: value for key, value in line.items() if key != "checksum"}
                quarantined[line["sample"]] = QuarantineRecord(**fields)
        self._locations = locations
        self.quarantined = {
            sample: record for sample, record in quarantined.items() if sample not in locations
        }

    def __len__(self) -> int:
        return len(self._locations)

    def __iter__(self) -> Iterator[str]:
        return iter(self._locations)

    @property
    def num_bytes(self) -> int:
        """Tensor bytes of all committed samples."""
        return sum(location.record["num_bytes"] for location in self._locations.values())

    def has(self, sample: str) -> bool:
        return sample in self._locations

    def num_tokens(self, sample: str) -> int:
        return self.location(sample).record["num_tokens"]

    def location(self, sample: str) -> SampleLocation:
        """Find a sample.

        Raises:
            DamagedData: it isn't committed.
        """
        location = self._locations.get(sample)
        if location is None:
            raise DamagedData(f"{self.folder}: sample {sample} is not committed. Clear the extract stage.")
        return location

    def read(self, sample: str) -> CapturedSample:
        """Map a sample's tensors into memory; pages are read when they are touched.

        Raises:
            DamagedData: not committed, or its segment is missing or cut short.
        """
        location = self.location(sample)
        segment = self._open_segment(location.segment)
        try:
            tensors = {name: segment.get_tensor(f"{sample}.{name}") for name in TENSORS}
        except _safetensors_error() as error:
            raise self._damaged(location.segment, error) from error
        return CapturedSample(**tensors)

    def _open_segment_file(self, segment: str) -> safetensors.safe_open:
        import safetensors

        try:
            return safetensors.safe_open(self.folder / segment, framework="pt")
        except (OSError, _safetensors_error()) as error:
            raise self._damaged(segment, error) from error

    def _damaged(self, segment: str, error: Exception) -> DamagedData:
        return DamagedData(
            f"{self.folder / segment} can't be read ({error}). Clear the verify stage: it sets damaged "
            "samples aside; then clear extract, which captures exactly these again."
        )


def _safetensors_error() -> type[Exception]:
    import safetensors

    return safetensors.SafetensorError
