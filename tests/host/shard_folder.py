"""Filling a shard's folder as an extraction does, and checking it without the product's reader."""

from __future__ import annotations

import json
import os
from pathlib import Path

import safetensors.torch
import torch

from eagle3_tasks.storage import fault_points
from eagle3_tasks.storage.capture import Capture
from eagle3_tasks.storage.sample import CapturedSample
from eagle3_tasks.storage.shard_lock import shard_lock
from eagle3_tasks.storage.writer import ShardWriter

HIDDEN = 8
NAMES = [f"{index:032x}" for index in range(12)]


def make_sample(name: str, dtype: torch.dtype = torch.bfloat16) -> CapturedSample:
    """Derive a sample from its name, so that any process makes the same one."""
    generator = torch.Generator().manual_seed(int(name, 16))
    num_tokens = 3 + int(name, 16) % 5
    return CapturedSample(
        token_ids=torch.randint(0, 99, (num_tokens,), generator=generator, dtype=torch.int32),
        aux_hidden=torch.randn(num_tokens, 3, HIDDEN, generator=generator).to(dtype),
        last_hidden=torch.randn(num_tokens, HIDDEN, generator=generator).to(dtype),
    )


def fill(folder: Path, samples: list[str]) -> None:
    """Do what an extraction does: commit what is missing, two samples a segment."""
    with shard_lock(folder):
        capture = Capture(folder.parent)
        capture.load_index()
        missing = [name for name in samples if not capture.has(name)]
        if not missing:
            return
        with ShardWriter(folder, segment_bytes=10_000) as writer:
            for index, name in enumerate(missing):
                writer.append(name, make_sample(name))
                if index % 2:
                    writer.commit()
            writer.quarantine(sample="f" * 32, row=99, num_tokens=1, reason="never finite")


def start_writer(folder: Path, **environment: str) -> int:
    """Fill the folder in another process, forked because torch takes seconds to import."""
    pid = os.fork()
    if pid == 0:
        os.environ.update(environment)
        fault_points._passes.clear()
        status = 1
        try:
            fill(folder, NAMES)
            status = 0
        finally:
            os._exit(status)
    return pid


def exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def check_whole(capture_folder: Path, samples: list[str]) -> None:
    """Check the folder without the writer's or the reader's code, but for the fences' meaning."""
    found: list[str] = []
    for folder in sorted(capture_folder.glob("rows_*")):
        fences = [json.loads(path.read_bytes()) for path in folder.glob("fence-*.json")]
        for path in sorted(folder.glob("receipts-*.jsonl")):
            generation = int(path.name[9:13])
            limits = [f["counted_bytes"].get(path.name, 0) for f in fences if f["generation"] > generation]
            content = path.read_bytes()[: min(limits, default=None)]
            for line in content.splitlines(keepends=True):
                if not line.endswith(b"\n"):
                    continue
                receipt = json.loads(line)
                segment = folder / receipt["segment"]
                assert segment.stat().st_size == receipt["num_bytes"]
                tensors = safetensors.torch.load_file(segment)
                for record in receipt["samples"]:
                    found.append(record["sample"])
                    expected = make_sample(record["sample"])
                    for name in ("token_ids", "aux_hidden", "last_hidden"):
                        assert torch.equal(tensors[f"{record['sample']}.{name}"], getattr(expected, name))
    assert sorted(found) == sorted(samples)
