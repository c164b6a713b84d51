"""What a finished training leaves for the export: float32 weights and how it went.

``ROOT/training/DIGEST/trained/`` holds ``weights.safetensors`` and, written last,
``result.json``. Without the second the training has not finished.
"""

from __future__ import annotations

import dataclasses
import os
import zlib
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3_tasks.contracts.errors import DamagedData
from eagle3_tasks.host.files import (
    PRIVATE_FILE,
    make_private_folder,
    read_json,
    sync_folder,
    temporary_sibling,
    write_json,
)

TRAINED_FOLDER = "trained"
WEIGHTS_FILE = "weights.safetensors"
RESULT_FILE = "result.json"
PLOT_FILE = "training.png"
"""Loss and acceptance over the steps; lies beside the weights' folder."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """``result.json``. ``acceptance`` and ``final_loss`` are means over the last steps."""

    num_steps: int
    num_samples: int
    num_trained_tokens: int
    final_loss: float
    acceptance: tuple[float, ...]
    seconds: float
    num_bytes: int
    crc32: int


def write_trained(
    training_folder: Path, tensors: Mapping[str, Tensor], result: TrainingResult
) -> TrainingResult:
    """Write weights and result durably; size and CRC-32 of ``result`` are filled in."""
    folder = make_private_folder(training_folder / TRAINED_FOLDER)
    num_bytes, crc32 = write_tensors(folder / WEIGHTS_FILE, tensors)
    result = dataclasses.replace(result, num_bytes=num_bytes, crc32=crc32)
    write_json(folder / RESULT_FILE, result)
    return result


def read_result(training_folder: Path) -> TrainingResult | None:
    """Give the result, or None while the training has not finished."""
    return read_json(TrainingResult, training_folder / TRAINED_FOLDER / RESULT_FILE)


def read_trained(training_folder: Path) -> tuple[dict[str, Tensor], TrainingResult]:
    """Read weights and result, checksum compared.

    Raises:
        DamagedData: the training has not finished, or its weights changed since.
    """
    result = read_result(training_folder)
    if result is None:
        raise DamagedData(f"{training_folder}: the training has not finished. Run train again.")
    path = training_folder / TRAINED_FOLDER / WEIGHTS_FILE
    return read_tensors(path, num_bytes=result.num_bytes, crc32=result.crc32), result


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
    """Write a safetensors file atomically and durably.

    Returns:
        its bytes and its CRC-32.
    """
    temporary = temporary_sibling(path)
    try:
        save_file({name: one.detach().cpu().contiguous() for name, one in tensors.items()}, temporary,
                  metadata={"format": "pt"})  # fmt: skip
        temporary.chmod(PRIVATE_FILE)
        num_bytes, crc32 = temporary.stat().st_size, _crc32(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)
    return num_bytes, crc32


def read_tensors(path: Path, *, num_bytes: int, crc32: int) -> dict[str, Tensor]:
    """Read a file that :func:`write_tensors` wrote.

    Raises:
        DamagedData: it is missing, or has other bytes than were written.
    """
    try:
        found_bytes = path.stat().st_size
        if found_bytes != num_bytes:
            raise DamagedData(f"{path}: {found_bytes} bytes, {num_bytes} were written.")
        found = _crc32(path)
        if found != crc32:
            raise DamagedData(f"{path}: CRC-32 {found:08x}, {crc32:08x} was written.")
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise DamagedData(f"{path}: can't be read ({error}).") from error


def _crc32(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            value = zlib.crc32(block, value)
    return value
