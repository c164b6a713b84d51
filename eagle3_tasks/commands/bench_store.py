"""``eagle3 bench store``: our writer against raw sequential writes of the same bytes, in pairs.

A disk's speed drifts by a factor while one looks, so each figure is the median of ratios
of neighbours in time, and raw and ours take turns in going first.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch

from eagle3_tasks.storage.sample import CapturedSample
from eagle3_tasks.storage.writer import ShardWriter

PAIRS = 7
MB = 1_000_000
SEGMENT_BYTES = 1024 * MB
# Tokens of a sample, hidden size, samples a round: 115 MB and 1 MB a sample in bfloat16.
SHAPES = {"large": (2000, 7168, 3), "small": (140, 896, 150)}


def run_bench_store(folder: Path) -> dict[str, float]:
    """Measure under ``folder``, on the file system that matters.

    Returns:
        flat figures; ``write_ratio_*`` is our bytes per second, with checksums, receipts
        and fsync, divided by those of plain writes with one fsync.
    """
    figures: dict[str, float] = {"pairs": PAIRS}
    with tempfile.TemporaryDirectory(dir=folder, prefix="bench-") as name:
        for size, (num_tokens, hidden_size, num_samples) in SHAPES.items():
            sample = _sample(num_tokens, hidden_size)
            content = [
                memoryview(tensor.reshape(-1).view(torch.uint8).numpy()) for tensor in vars(sample).values()
            ]
            num_bytes = num_samples * sum(map(len, content))
            ratios: list[float] = []
            speeds: list[float] = []
            for pair in range(PAIRS):
                seconds = [0.0, 0.0]
                for which in (0, 1) if pair % 2 else (1, 0):
                    place = Path(name) / f"{size}-{pair}-{which}"
                    place.mkdir()
                    began = time.perf_counter()
                    if which:
                        _write_ours(place, sample, num_samples)
                    else:
                        _write_raw(place / "raw", content, num_samples)
                    seconds[which] = time.perf_counter() - began
                    shutil.rmtree(place)
                ratios.append(seconds[0] / seconds[1])
                speeds.append(num_bytes / MB / seconds[1])
            figures[f"write_ratio_{size}"] = round(statistics.median(ratios), 3)
            figures[f"write_mb_per_second_{size}"] = round(statistics.median(speeds), 1)
    return figures


def _sample(num_tokens: int, hidden_size: int) -> CapturedSample:
    generator = torch.Generator().manual_seed(0)
    return CapturedSample(
        token_ids=torch.arange(num_tokens, dtype=torch.int32),
        aux_hidden=torch.randn(num_tokens, 3, hidden_size, generator=generator).bfloat16(),
        last_hidden=torch.randn(num_tokens, hidden_size, generator=generator).bfloat16(),
    )


def _write_ours(folder: Path, sample: CapturedSample, num_samples: int) -> None:
    with ShardWriter(folder, segment_bytes=SEGMENT_BYTES) as writer:
        for number in range(num_samples):
            writer.append(f"{number:032x}", sample)


def _write_raw(path: Path, content: list[memoryview], num_samples: int) -> None:
    with path.open("wb", buffering=0) as file:
        for _ in range(num_samples):
            for piece in content:
                file.write(piece)
        os.fsync(file.fileno())
