"""Samples on disk: ``ROOT/datasets/DIGEST/``, written once, read memory-mapped.

``tokens.safetensors``   input_ids int32 [N], loss_mask uint8 [N], offsets int64 [samples + 1]
``statistics.json``      counts and length percentiles
``rejects.jsonl``        one line a conversation without a sample: row, id, reason, message
``complete.json``        the seal, written last

A sample has no name of its own on disk: its name is the hash of its token ids.
"""

from __future__ import annotations

import array
import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from eagle3_tasks.contracts.errors import DamagedData
from eagle3_tasks.host.sealed_folder import check_sealed

TOKENS_FILE = "tokens.safetensors"
STATISTICS_FILE = "statistics.json"
REJECTS_FILE = "rejects.jsonl"
SAMPLE_NAME_DIGITS = 32
_MAX_HEADER_BYTES = 1 << 20
_TENSORS = {"offsets": ("I64", "<i8"), "input_ids": ("I32", "<i4"), "loss_mask": ("U8", "u1")}
"""In the order in which they lie in the file: the widest first, so that each one is aligned."""


def sample_name(token_ids: Sequence[int] | NDArray[Any]) -> str:
    """Name a sample: 32 hexadecimal digits of the SHA-256 of its ids as little-endian int32."""
    return hashlib.sha256(np.asarray(token_ids, dtype="<i4").tobytes()).hexdigest()[:SAMPLE_NAME_DIGITS]


class Dataset:
    """A finished dataset. Rows are numbered from 0; arrays are views of the mapped file.

    Raises:
        DamagedData: the folder is not finished, or the file is not as it was written.
    """

    def __init__(self, path: Path) -> None:
        check_sealed(path)
        self.path = path
        arrays = _map_tensors(path / TOKENS_FILE)
        self._ids, self._mask, self._offsets = arrays["input_ids"], arrays["loss_mask"], arrays["offsets"]
        if self._offsets[0] != 0 or self._offsets[-1] != len(self._ids) or len(self._ids) != len(self._mask):
            raise DamagedData(f"{path / TOKENS_FILE}: offsets, ids and mask don't belong together.")

    @property
    def num_samples(self) -> int:
        return len(self._offsets) - 1

    @property
    def num_tokens(self) -> int:
        return len(self._ids)

    def lengths(self) -> NDArray[np.int64]:
        """Give every sample's number of tokens, int64 [samples]."""
        return np.diff(self._offsets)

    def token_ids(self, row: int) -> NDArray[np.int32]:
        """Give the row's token ids, int32 [T], read-only."""
        return self._ids[self._offsets[row] : self._offsets[row + 1]]

    def loss_mask(self, row: int) -> NDArray[np.bool_]:
        """Give the row's loss mask, bool [T], read-only: true where the target writes the token."""
        return self._mask[self._offsets[row] : self._offsets[row + 1]].view(np.bool_)

    def sample(self, row: int) -> str:
        """Give the row's name."""
        return sample_name(self.token_ids(row))


class DatasetWriter:
    """Writes samples one by one, in bounded memory; of each only a hash and a length stay.

    Use as a context manager; ``finish`` makes ``tokens.safetensors``.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / TOKENS_FILE
        self._parts = {name: folder / f"{name}.part" for name in ("input_ids", "loss_mask")}
        self._files: dict[str, BinaryIO] = {}
        self._seen: set[bytes] = set()
        self._is_trained = np.zeros(1 << 17, dtype=bool)
        self.offsets = array.array("q", [0])
        self.num_trained_tokens = 0
        self.num_duplicates = 0

    def __enter__(self) -> Self:
        self._files = {name: path.open("wb", buffering=1 << 20) for name, path in self._parts.items()}
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    @property
    def num_samples(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_distinct_trained_tokens(self) -> int:
        return int(self._is_trained.sum())

    def lengths(self) -> NDArray[np.int64]:
        return np.diff(np.array(self.offsets, dtype=np.int64))

    def add(self, token_ids: NDArray[np.int32], loss_mask: NDArray[np.bool_]) -> bool:
        """Append one sample. Says False, and counts, where the same ids and mask are there already."""
        ids, mask = token_ids.astype("<i4").tobytes(), loss_mask.astype("u1").tobytes()
        key = hashlib.blake2b(ids + mask, digest_size=16).digest()
        if key in self._seen:
            self.num_duplicates += 1
            return False
        self._seen.add(key)
        self._files["input_ids"].write(ids)
        self._files["loss_mask"].write(mask)
        self.offsets.append(self.offsets[-1] + len(token_ids))
        trained = token_ids[loss_mask]
        self.num_trained_tokens += len(trained)
        largest = int(trained.max())
        if largest >= len(self._is_trained):
            self._is_trained = np.concatenate([self._is_trained, np.zeros(largest, dtype=bool)])
        self._is_trained[trained] = True
        return True

    def finish(self) -> None:
        """Put the parts together as one safetensors file."""
        self.__exit__()
        offsets = np.array(self.offsets, dtype="<i8")
        num_tokens = self.offsets[-1]
        shapes = {"offsets": len(offsets), "input_ids": num_tokens, "loss_mask": num_tokens}
        header: dict[str, Any] = {}
        position = 0
        for name, (kind, dtype) in _TENSORS.items():
            num_bytes = shapes[name] * np.dtype(dtype).itemsize
            header[name] = {
                "dtype": kind,
                "shape": [shapes[name]],
                "data_offsets": [position, position + num_bytes],
            }
            position += num_bytes
        text = json.dumps(header).encode()
        # The data begins at a multiple of 8 bytes, so that the mapped arrays are aligned.
        text += b" " * (-len(text) % 8)
        with self._path.open("wb", buffering=1 << 20) as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.write(offsets.tobytes())
            for name in ("input_ids", "loss_mask"):
                with self._parts[name].open("rb") as part:
                    shutil.copyfileobj(part, file, 1 << 22)
                self._parts[name].unlink()


def _map_tensors(path: Path) -> dict[str, NDArray[Any]]:
    size = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if not 0 < header_bytes <= min(size, _MAX_HEADER_BYTES):
            raise DamagedData(f"{path}: the header would have {header_bytes} bytes. Run prepare-data again.")
        text = file.read(header_bytes)
    arrays: dict[str, NDArray[Any]] = {}
    try:
        header = json.loads(text)
        for name, (kind, dtype) in _TENSORS.items():
            entry = header[name]
            (count,) = entry["shape"]
            start, stop = entry["data_offsets"]
            if entry["dtype"] != kind or stop - start != count * np.dtype(dtype).itemsize:
                raise ValueError(f"{name} is described as {entry}")
            place = 8 + header_bytes + start
            arrays[name] = np.memmap(path, dtype=dtype, mode="r", offset=place, shape=(count,))
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedData(
            f"{path}: the header is not what was written ({error!r}). Run prepare-data again."
        ) from error
    return arrays
