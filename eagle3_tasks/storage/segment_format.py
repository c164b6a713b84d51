"""Segments are plain safetensors files; here is their header, in the standard library alone.

A file is an 8-byte little-endian length N, N bytes of JSON padded with spaces, and the
tensors without gaps. Room for the header is reserved first, so tensors go to disk as
they come and a segment never has to fit in memory.

Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from eagle3_tasks.contracts.errors import DamagedData
from eagle3_tasks.contracts.receipts import STORAGE_VERSION
from eagle3_tasks.storage.sample import TENSORS

DTYPE_NAMES = {"bfloat16": "BF16", "float32": "F32", "int32": "I32"}
ITEM_SIZES = {"bfloat16": 2, "float32": 4, "int32": 4}

_PAGE = 4096
_LENGTH_BYTES = 8


class TensorPlace(NamedTuple):
    """Where one tensor lies: bytes ``[start, stop)`` of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def data_start(segment_bytes: int) -> int:
    """Choose where the tensors begin: room for the names of the samples, in whole pages."""
    room = min(max(segment_bytes // 64, 16 * _PAGE), 1024 * _PAGE)
    return -(-room // _PAGE) * _PAGE


def first_entry(generation: int) -> str:
    return (
        f'"__metadata__":{{"format":"pt","eagle3_storage":"{STORAGE_VERSION}","generation":"{generation}"}}'
    )


def tensor_entry(name: str, dtype: str, shape: Sequence[int], start: int, stop: int) -> str:
    """Encode one tensor's entry; ``start`` and ``stop`` count from the first tensor."""
    fields = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, stop]}
    return f"{json.dumps(name)}:{json.dumps(fields, separators=(',', ':'))}"


def header_bytes(entries: Sequence[str], start: int) -> bytes:
    """Join the entries into the file's first ``start`` bytes.

    Raises:
        ValueError: they don't fit; the caller closes a segment before that.
    """
    text = ("{" + ",".join(entries) + "}").encode()
    room = start - _LENGTH_BYTES
    if len(text) > room:
        raise ValueError(f"a header of {len(text)} bytes does not fit into {room}.")
    return struct.pack("<Q", room) + text.ljust(room, b" ")


def read_header(path: Path) -> tuple[dict[str, TensorPlace], str]:
    """Read where the tensors of a segment lie, and the checksum of its header.

    Raises:
        DamagedData: the header isn't that of a whole safetensors file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(_LENGTH_BYTES)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == _LENGTH_BYTES else size
        if length > size - _LENGTH_BYTES:
            raise DamagedData(f"{path}: the header's length {length} does not fit a file of {size} bytes.")
        text = file.read(length)
    try:
        entries: dict[str, Any] = json.loads(text)
        entries.pop("__metadata__", None)
        places = {name: _place(fields, _LENGTH_BYTES + length) for name, fields in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedData(f"{path}: the header can't be read ({error}).") from error
    return places, checksum(prefix + text)


def _place(fields: dict[str, Any], base: int) -> TensorPlace:
    start, stop = fields["data_offsets"]
    return TensorPlace(fields["dtype"], tuple(fields["shape"]), base + int(start), base + int(stop))


def checksum(content: bytes | bytearray | memoryview) -> str:
    """Give the CRC-32 of ``content`` as it stands in receipts."""
    return f"crc32:{zlib.crc32(content):08x}"


def expected_shapes(num_tokens: int, num_states: int, hidden_size: int) -> dict[str, tuple[int, ...]]:
    """List the shapes of one sample's tensors; ``num_states`` counts the last one too."""
    return dict(
        zip(
            TENSORS,
            [(num_tokens,), (num_tokens, num_states - 1, hidden_size), (num_tokens, hidden_size)],
            strict=True,
        )
    )
