"""The engine of a shard's job, and its share of the host's processor cores."""

from __future__ import annotations

import os

from eagle3_tasks.contracts.settings import Settings
from eagle3_tasks.engines.interface import Engine


def load_shard_engine(settings: Settings) -> Engine:
    """Load the engine that the settings name.

    Shards that run side by side divide the cores: with all cores each, their threads spin
    on one another's locks, and two shards together are slower than one.
    """
    import torch

    from eagle3_tasks.engines.huggingface import HuggingFaceEngine

    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // settings.host.shard_slots))
    return HuggingFaceEngine.load(settings)
