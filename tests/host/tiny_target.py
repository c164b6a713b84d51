"""A tiny random Llama with a chat template, and sealed datasets, for tests that need real ones."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from eagle3_tasks.contracts.jobs import Progress
from eagle3_tasks.contracts.rows import RowRange
from eagle3_tasks.contracts.run_records import DatasetRecord
from eagle3_tasks.contracts.settings import Settings, settings_from_flat
from eagle3_tasks.contracts.stages import StageSpec
from eagle3_tasks.data.dataset import DatasetWriter
from eagle3_tasks.host.files import make_private_folder
from eagle3_tasks.host.sealed_folder import building
from eagle3_tasks.host.stage_context import StageContext

VOCAB_SIZE = 96
HIDDEN_SIZE = 32
NUM_LAYERS = 4
AUX_LAYER_IDS = (0, 1, 2)
RUN_KEY = "test-0123456789abcdef"
DATASET = "d" * 24
WORDS = ["<pad>", "<turn>", "<end>", "user", "assistant", "system", "tool"]
TEMPLATE = (
    "{% for message in messages %}<turn> {{ message['role'] }} {{ message['content'] }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<turn> assistant {% endif %}"
)


def make_target(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Save a random Llama and its word-level tokenizer."""
    torch.manual_seed(seed)
    options = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 48,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "eos_token_id": 2,
        "bos_token_id": None,
        "initializer_range": 0.2,
    }
    LlamaForCausalLM(LlamaConfig(**{**options, **changes})).save_pretrained(folder)
    words = WORDS + [f"w{index}" for index in range(VOCAB_SIZE - len(WORDS))]
    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<end>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def random_rows(num_rows: int, *, seed: int = 0) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [
        generator.integers(7, VOCAB_SIZE, size=int(generator.integers(4, 24))).tolist()
        for _ in range(num_rows)
    ]


def make_settings(root: Path, target: Path | str, **changes: Any) -> Settings:
    values: dict[str, Any] = {
        "root": str(root),
        "conversations_path": "/nowhere/conversations.jsonl",
        "target_model": str(target),
        "device": "cpu",
        "extraction_gpus": 0,
        "disk_reserve_gb": 0.0,
        "aux_layer_ids": list(AUX_LAYER_IDS),
        "capture_dtype": "float32",
        "capture_batch_tokens": 64,
        "rows_per_shard": 5,
        "segment_mb": 1,
        "draft_vocab_size": 8,
        "max_tokens": 64,
        "answer_max_tokens": 8,
        "verify_tier": "full",
    }
    return settings_from_flat({**values, **changes})


def make_context(
    settings: Settings,
    rows: RowRange | None = None,
    *,
    run_key: str = RUN_KEY,
    progress: list[Progress] | None = None,
) -> StageContext:
    spec = StageSpec(run_key=run_key, settings=settings, rows=rows)
    seen: list[Progress] = [] if progress is None else progress
    return StageContext(spec=spec, generation=1, report_progress=seen.append)


def make_dataset(context: StageContext, rows: Sequence[Sequence[int]], *, digest: str = DATASET) -> None:
    """Write a sealed dataset of these rows, the second half of each under the loss mask."""
    with building(context.layout.dataset(digest)) as folder:
        if folder is not None:
            with DatasetWriter(folder) as writer:
                for ids in rows:
                    mask = np.arange(len(ids)) >= len(ids) // 2
                    writer.add(np.array(ids, dtype=np.int32), mask)
                writer.finish()
    make_private_folder(context.layout.root)
    context.write_record(
        DatasetRecord(
            dataset=digest,
            num_samples=len(rows),
            num_tokens=sum(map(len, rows)),
            num_trained_tokens=sum(len(ids) - len(ids) // 2 for ids in rows),
        )
    )


logging.getLogger("transformers").setLevel(logging.ERROR)
# The models are so small that a second thread only costs time.
torch.set_num_threads(1)
