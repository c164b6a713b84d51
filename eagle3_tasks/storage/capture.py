"""Finding and reading the samples of a capture, whatever run, order or shard size asked for them.

The index is made from receipts alone: no tensor is read to learn a length, and only
:meth:`Capture.read` needs torch.
"""

from __future__ import annotations

import array
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from eagle3_tasks.contracts.errors import DamagedData
from eagle3_tasks.contracts.receipts import QuarantineRecord
from eagle3_tasks.storage.receipts import LinePlace, open_shard, read_receipt, walk_receipts
from eagle3_tasks.storage.sample import TENSORS, CapturedSample

if TYPE_CHECKING:
    import safetensors

_OPEN_SEGMENTS = 64


class SampleLocation(NamedTuple):
    """Where a committed sample lies; ``segment`` is relative to the capture's folder."""

    segment: str
    num_tokens: int
    num_bytes: int


class _Segment(NamedTuple):
    name: str
    num_bytes: int
    receipt: LinePlace


class _Index:
    """What is known of each sample, some 200 bytes a sample: a capture may hold millions.

    Checksums stay on the disk: :meth:`Capture.receipt` reads them for whoever verifies.
    """

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self.segments: list[_Segment] = []
        self.segment_numbers: dict[str, int] = {}
        self._segment_of = array.array("l")
        self._num_tokens = array.array("q")
        self._num_bytes = array.array("q")

    def add(self, record: dict[str, Any]) -> None:
        """Add a sample of the segment that was added last."""
        self.numbers[record["sample"]] = len(self.numbers)
        self._segment_of.append(len(self.segments) - 1)
        self._num_tokens.append(record["num_tokens"])
        self._num_bytes.append(record["num_bytes"])

    def add_segment(self, segment: _Segment) -> None:
        self.segment_numbers[segment.name] = len(self.segments)
        self.segments.append(segment)

    def location(self, number: int) -> SampleLocation:
        segment = self.segments[self._segment_of[number]]
        return SampleLocation(segment.name, self._num_tokens[number], self._num_bytes[number])

    @property
    def num_bytes(self) -> int:
        return sum(self._num_bytes)


def shard_folders(capture_folder: Path) -> list[Path]:
    """List the shards' folders in the order of their names."""
    if not capture_folder.is_dir():
        return []
    return sorted(
        path for path in capture_folder.iterdir() if path.is_dir() and path.name.startswith("rows_")
    )


class Capture:
    """The committed samples of one capture's folder.

    The index is a snapshot: :meth:`load_index` takes a new one. A folder that doesn't
    exist is an empty capture.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.quarantined: dict[str, QuarantineRecord] = {}
        self._index = _Index()
        self._open_segment = functools.lru_cache(maxsize=_OPEN_SEGMENTS)(self._open_segment_file)

    def load_index(self) -> None:
        """Read the receipts of all shards.

        Raises:
            DamagedData: a record of another storage version.
        """
        index = _Index()
        quarantined: dict[str, QuarantineRecord] = {}
        for folder in shard_folders(self.folder):
            records = open_shard(folder)
            for place, receipt in walk_receipts(records):
                name: str = receipt["segment"]
                index.add_segment(_Segment(f"{folder.name}/{name}", receipt["num_bytes"], place))
                for record in receipt["samples"]:
                    sample: str = record["sample"]
                    if sample not in index.numbers and (name, sample) not in records.voided:
                        index.add(record)
            for line in records.quarantined:
                fields = {key: value for key, value in line.items() if key != "checksum"}
                quarantined[line["sample"]] = QuarantineRecord(**fields)
        self._index = index
        self.quarantined = {
            sample: record for sample, record in quarantined.items() if sample not in index.numbers
        }

    def __len__(self) -> int:
        return len(self._index.numbers)

    def __iter__(self) -> Iterator[str]:
        return iter(self._index.numbers)

    @property
    def num_bytes(self) -> int:
        """Tensor bytes of all committed samples."""
        return self._index.num_bytes

    def has(self, sample: str) -> bool:
        return sample in self._index.numbers

    def num_tokens(self, sample: str) -> int:
        return self.location(sample).num_tokens

    def location(self, sample: str) -> SampleLocation:
        """Find a sample.

        Raises:
            DamagedData: it isn't committed.
        """
        number = self._index.numbers.get(sample)
        if number is None:
            raise DamagedData(f"{self.folder}: sample {sample} is not committed. Clear the extract stage.")
        return self._index.location(number)

    def segment_bytes(self, segment: str) -> int:
        """Give the size that a segment must have, by its receipt."""
        return self._segment(segment).num_bytes

    def receipt(self, segment: str) -> dict[str, Any]:
        """Read a segment's :class:`~eagle3_tasks.contracts.receipts.Receipt` again, as a dictionary.

        Raises:
            DamagedData: it changed since the index was loaded.
        """
        return read_receipt((self.folder / segment).parent, self._segment(segment).receipt)

    def _segment(self, segment: str) -> _Segment:
        return self._index.segments[self._index.segment_numbers[segment]]

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
