"""The one writer of a shard's folder: samples in, committed segments and receipts out.

Commit order: a temporary file on the same file system, all tensors, header, fsync,
rename, fsync of the folder, receipt, fsync. A crash between any two steps leaves
either a whole counted segment or none.

Shapes: T tokens, A auxiliary states (3), D hidden size of the target.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import torch

from eagle3_tasks.contracts.errors import DiskProblem
from eagle3_tasks.contracts.receipts import QuarantineRecord, Receipt, SampleRecord
from eagle3_tasks.host.files import PRIVATE_FILE, sync_folder, temporary_sibling
from eagle3_tasks.storage import names
from eagle3_tasks.storage.disk_guard import GB, check_reserve, disk_errors
from eagle3_tasks.storage.fault_points import fault_point
from eagle3_tasks.storage.receipts import append_record
from eagle3_tasks.storage.recovery import begin_generation
from eagle3_tasks.storage.sample import TENSORS, CapturedSample
from eagle3_tasks.storage.segment_format import (
    checksum,
    data_start,
    first_entry,
    header_bytes,
    tensor_entry,
)

logger = logging.getLogger(__name__)

# Room that is kept in a header for one more sample: three entries of about 130 bytes.
_ENTRY_ROOM = 1024


@dataclasses.dataclass(kw_only=True)
class _OpenSegment:
    path: Path
    temporary: Path
    file: BinaryIO
    start: int
    opened_at: float
    entries: list[str]
    header_size: int
    data_size: int = 0
    samples: list[SampleRecord] = dataclasses.field(default_factory=list[SampleRecord])


class ShardWriter:
    """Appends samples to segments of a shard's folder. The caller holds the folder's lock.

    Leaving the ``with`` block commits the open segment, also when the engine failed:
    captured samples are good work. After an error of the disk it is discarded.

    Args:
        folder: the shard's folder.
        segment_bytes: a segment is closed at about this size.
        max_age_seconds: a segment is closed at this age by :meth:`commit_if_due`.
        reserve_bytes: free space that is never used.
        on_commit: called after each commit, with the receipt.
        clock: seconds, never going back.
    """

    def __init__(
        self,
        folder: Path,
        *,
        segment_bytes: int,
        max_age_seconds: float = 60.0,
        reserve_bytes: int = 0,
        on_commit: Callable[[Receipt], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._max_age_seconds = max_age_seconds
        self._reserve_bytes = reserve_bytes
        self._on_commit = on_commit
        self._clock = clock
        self._segment: _OpenSegment | None = None
        self._num_segments = 0
        with disk_errors(folder):
            self.generation = begin_generation(folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._segment is not None:
            self.commit()

    def append(self, sample: str, captured: CapturedSample) -> None:
        """Write one sample that the guards let pass into the open segment.

        Raises:
            DiskProblem: the reserve would be touched (everything before is committed), or
                the disk failed (the open segment is discarded).
        """
        tensors = {name: getattr(captured, name).detach().cpu().contiguous() for name in TENSORS}
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        self._make_room(num_bytes)
        segment = self._segment or self._open_segment()
        checksums: dict[str, str] = {}
        try:
            with disk_errors(segment.path):
                for name, tensor in tensors.items():
                    content = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
                    entry = tensor_entry(
                        f"{sample}.{name}", _dtype_name(tensor), tensor.shape,
                        segment.data_size, segment.data_size + len(content),
                    )  # fmt: skip
                    segment.file.write(content)
                    segment.entries.append(entry)
                    segment.header_size += len(entry) + 1
                    segment.data_size += len(content)
                    checksums[name] = checksum(content)
        except BaseException:
            self._discard()
            raise
        segment.samples.append(
            SampleRecord(
                sample=sample,
                num_tokens=captured.token_ids.shape[0],
                num_states=captured.aux_hidden.shape[1] + 1,
                hidden_size=captured.last_hidden.shape[1],
                dtype=_dtype_name(captured.last_hidden),
                num_bytes=num_bytes,
                checksums=checksums,
            )
        )
        fault_point("sample_written", self._folder.name)

    def commit_if_due(self) -> None:
        """Commit the open segment if it has reached its age."""
        if self._segment is not None and self._clock() - self._segment.opened_at >= self._max_age_seconds:
            self.commit()

    def commit(self) -> None:
        """Make the open segment count. Does nothing when there is none.

        Raises:
            DiskProblem: the disk failed; the segment doesn't count.
        """
        segment = self._segment
        if segment is None:
            return
        try:
            with disk_errors(segment.path):
                receipt = self._commit(segment)
        except BaseException:
            self._discard()
            raise
        self._segment = None
        if self._on_commit is not None:
            self._on_commit(receipt)

    def quarantine(self, *, sample: str, row: int, num_tokens: int, reason: str) -> None:
        """Record durably that a sample could not be captured, and why."""
        path = self._folder / names.quarantine_name(self.generation)
        record = QuarantineRecord(
            generation=self.generation, sample=sample, row=row, num_tokens=num_tokens, reason=reason
        )
        with disk_errors(path):
            append_record(path, record)
        fault_point("quarantine_appended", self._folder.name)

    def _commit(self, segment: _OpenSegment) -> Receipt:
        header = header_bytes(segment.entries, segment.start)
        segment.file.seek(0)
        segment.file.write(header)
        segment.file.flush()
        fault_point("header_written", self._folder.name)
        os.fsync(segment.file.fileno())
        segment.file.close()
        fault_point("segment_synced", self._folder.name)
        segment.temporary.replace(segment.path)
        fault_point("segment_renamed", self._folder.name)
        sync_folder(self._folder)
        fault_point("folder_synced", self._folder.name)
        receipt = Receipt(
            generation=self.generation,
            segment=segment.path.name,
            num_bytes=segment.start + segment.data_size,
            header_checksum=checksum(header),
            committed_at=time.time(),
            samples=tuple(segment.samples),
        )
        append_record(self._folder / names.receipts_name(self.generation), receipt)
        fault_point("receipt_appended", self._folder.name)
        return receipt

    def _make_room(self, num_bytes: int) -> None:
        segment = self._segment
        if segment is not None and (
            segment.data_size + num_bytes > self._segment_bytes
            or segment.header_size + _ENTRY_ROOM > segment.start
        ):
            self.commit()
        needed = num_bytes + (0 if self._segment else data_start(self._segment_bytes))
        try:
            check_reserve(
                self._folder, needed_bytes=needed, reserve_bytes=self._reserve_bytes,
                missing=f"the next sample needs {needed / GB:.3f} GB",
            )  # fmt: skip
        except DiskProblem:
            self.commit()
            raise

    def _open_segment(self) -> _OpenSegment:
        path = self._folder / names.segment_name(self.generation, self._num_segments)
        temporary = temporary_sibling(path)
        with disk_errors(path):
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE_FILE)
        file = os.fdopen(descriptor, "wb")
        start = data_start(self._segment_bytes)
        file.seek(start)
        first = first_entry(self.generation)
        self._segment = _OpenSegment(
            path=path, temporary=temporary, file=file, start=start, opened_at=self._clock(),
            entries=[first], header_size=len(first) + 10,
        )  # fmt: skip
        self._num_segments += 1
        return self._segment

    def _discard(self) -> None:
        segment, self._segment = self._segment, None
        if segment is None:
            return
        try:
            segment.file.close()
        except OSError as error:
            # The buffer could not be flushed to the failing disk; the file goes away anyway.
            logger.debug("discarded segment could not be flushed error=%s", error)
        segment.temporary.unlink(missing_ok=True)


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
