"""Named sets of values for the trigger form: what a field left empty takes."""

from __future__ import annotations

from collections.abc import Mapping

PRESETS: Mapping[str, Mapping[str, object]] = {
    "default": {},
    "demo": {
        # A target of 1.8 M parameters on two CPU cores; folders come from `make demo`.
        "device": "cpu",
        "extraction_gpus": 0,
        "training_processes": 2,
        "shard_slots": 2,
        "disk_reserve_gb": 1.0,
        "poll_seconds": 1.0,
        "max_tokens": 256,
        "answers": "regenerate",
        "answer_max_tokens": 128,
        "rows_per_answer_shard": 300,
        "capture_dtype": "float32",
        "rows_per_shard": 150,
        "capture_batch_tokens": 16384,
        "segment_mb": 16,
        "draft_vocab_size": 1024,
        "epochs": 24,
        "learning_rate": 4e-3,
        "ttt_steps": 3,
        "batch_tokens": 384,
        "checkpoint_minutes": 0.25,
        "evaluation_rows": 40,
        "evaluation_max_tokens": 128,
        "min_accept_length": 2.6,
        "verify_tier": "full",
    },
    "kimi_k2_5": {
        # A mixture of experts with 1 T parameters on 8 cards, 61 layers of width 7168.
        "target_model": "moonshotai/Kimi-K2.5",
        "trust_remote_code": True,
        "extraction_gpus": 8,
        "training_processes": 4,
        "max_tokens": 4096,
        "rows_per_shard": 2000,
        "capture_dtype": "bfloat16",
        "draft_vocab_size": 32000,
        "draft_intermediate_size": 12288,
        "draft_num_heads": 64,
        "draft_num_kv_heads": 64,
        "draft_head_dim": 128,
        "epochs": 5,
        "learning_rate": 5e-5,
        "ttt_steps": 4,
        "batch_tokens": 4096,
    },
    "pilot": {
        # Every stage on 64 conversations, to learn the time and space of the rest.
        "max_rows": 64,
        "rows_per_shard": 32,
        "epochs": 1,
        "draft_vocab_size": 1024,
        "evaluation_rows": 8,
        "min_accept_length": 0.0,
    },
}
