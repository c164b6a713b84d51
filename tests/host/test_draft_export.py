"""The exported folder: exact keys, shapes and values, layer ids, and the gate before it is published."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3_tasks.contracts.errors import DamagedData, GateNotPassed, InvalidSettings
from eagle3_tasks.contracts.run_records import (
    DraftModelRecord,
    EvaluationRecord,
    EvaluationResult,
    PlanRecord,
    TrainingRecord,
)
from eagle3_tasks.draft.aux_layers import aux_layer_entries
from eagle3_tasks.draft.config import draft_config
from eagle3_tasks.draft.export import load_export
from eagle3_tasks.draft.export_stage import CANDIDATE_FOLDER, run_export_candidate
from eagle3_tasks.draft.initialize import initialize_draft_model
from eagle3_tasks.draft.publish_stage import run_publish
from eagle3_tasks.draft.target_config import read_target_config
from eagle3_tasks.draft.target_weights import read_target_weights
from eagle3_tasks.draft.trained import PLOT_FILE, TrainingResult, write_trained
from eagle3_tasks.host.stage_context import StageContext
from eagle3_tasks.training.plot import plot_history
from eagle3_tasks.training.spec import HistoryEntry
from tests.host.tiny_target import HIDDEN_SIZE, VOCAB_SIZE, make_context, make_target
from tests.host.training_world import DRAFT_VOCAB_SIZE, make_settings, plan_record_of, some_vocabulary

TRAINING = "e" * 24
HEADS, KV_HEADS, HEAD_DIM, MLP = 4, 2, 8, 48


def make_trained(folder: Path, **changes: Any) -> StageContext:
    """A run whose training has finished, with weights as training begins with."""
    target = make_target(folder / "target")
    settings = make_settings(folder / "root", target, **changes)
    context = make_context(settings)
    weights, vocabulary = read_target_weights(settings), some_vocabulary()
    model = initialize_draft_model(
        draft_config(settings, read_target_config(settings)), weights,
        d2t=vocabulary.d2t_V, t2d=vocabulary.t2d_W, seed=4,
    )  # fmt: skip
    result = TrainingResult(
        num_steps=10, num_samples=5, num_trained_tokens=70, final_loss=1.25, acceptance=(0.5,), seconds=3.0,
        num_bytes=0, crc32=0,
    )  # fmt: skip
    context.layout.training(TRAINING).mkdir(parents=True)
    write_trained(context.layout.training(TRAINING), model.state_dict(), result)
    context.write_record(plan_record_of(num_samples=5, num_tokens=100))
    context.write_record(TrainingRecord(training=TRAINING, num_steps=10, final_loss=1.25))
    return context


def candidate_of(context: StageContext) -> Path:
    return context.layout.training(TRAINING) / CANDIDATE_FOLDER


def result_of(name: str, *, reached: float, demanded: float | None) -> EvaluationResult:
    return EvaluationResult(
        name=name, num_rows=4, num_rounds=20, untrained_accept_length=1.0, simulated_accept_length=reached,
        looped_accept_length=reached, acceptance=(0.5,), is_identical_to_greedy=True,
        min_accept_length=demanded, passed=demanded is None or reached >= demanded,
    )  # fmt: skip


def write_evaluation(context: StageContext, *results: EvaluationResult, training: str = TRAINING) -> None:
    passed = all(one.passed for one in results)
    context.write_record(EvaluationRecord(training=training, results=results, passed=passed))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_file_holds_exactly_the_tensors_of_an_eagle3_checkpoint(tmp_path: Path, dtype: str) -> None:
    context = make_trained(tmp_path, capture_dtype=dtype)
    run_export_candidate(context)
    tensors = load_file(candidate_of(context) / "model.safetensors")
    heads, kv_heads = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == {
        "fc.weight": [HIDDEN_SIZE, 3 * HIDDEN_SIZE],
        "midlayer.self_attn.q_proj.weight": [heads, 2 * HIDDEN_SIZE],
        "midlayer.self_attn.k_proj.weight": [kv_heads, 2 * HIDDEN_SIZE],
        "midlayer.self_attn.v_proj.weight": [kv_heads, 2 * HIDDEN_SIZE],
        "midlayer.self_attn.o_proj.weight": [HIDDEN_SIZE, heads],
        "midlayer.mlp.gate_proj.weight": [MLP, HIDDEN_SIZE],
        "midlayer.mlp.up_proj.weight": [MLP, HIDDEN_SIZE],
        "midlayer.mlp.down_proj.weight": [HIDDEN_SIZE, MLP],
        "midlayer.input_layernorm.weight": [HIDDEN_SIZE],
        "midlayer.hidden_norm.weight": [HIDDEN_SIZE],
        "midlayer.post_attention_layernorm.weight": [HIDDEN_SIZE],
        "norm.weight": [HIDDEN_SIZE],
        "lm_head.weight": [DRAFT_VOCAB_SIZE, HIDDEN_SIZE],
        "d2t": [DRAFT_VOCAB_SIZE],
        "t2d": [VOCAB_SIZE],
    }
    kinds = {name: tensor.dtype for name, tensor in tensors.items()}
    assert (kinds.pop("d2t"), kinds.pop("t2d")) == (torch.int64, torch.bool)
    assert set(kinds.values()) == {getattr(torch, dtype)}
    target_ids = tensors["d2t"] + torch.arange(DRAFT_VOCAB_SIZE)
    assert torch.equal(target_ids, tensors["t2d"].nonzero().flatten())
    config = json.loads((candidate_of(context) / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["vocab_size"], config["draft_vocab_size"]) == (VOCAB_SIZE, DRAFT_VOCAB_SIZE)
    assert (config["torch_dtype"], config["dtype"]) == (dtype, dtype)
    assert config["rope_parameters"]["rope_theta"] == config["rope_theta"]
    assert (config["norm_before_residual"], config["tie_word_embeddings"]) == (False, False)


def test_a_fresh_draft_model_begins_as_the_targets_late_state_read_by_its_own_head(tmp_path: Path) -> None:
    context = make_trained(tmp_path)
    run_export_candidate(context)
    model = load_export(candidate_of(context))
    weights = read_target_weights(context.settings)
    aux = torch.randn(1, 5, 3, HIDDEN_SIZE)
    torch.testing.assert_close(model.fuse(aux), aux[:, :, 2], atol=0.4, rtol=0)
    ids = model.target_ids(torch.arange(DRAFT_VOCAB_SIZE))
    assert torch.equal(model.lm_head.weight, weights.head_WD[ids])
    assert torch.equal(model.norm.weight, weights.final_norm_D)


def test_default_layers_are_not_named_and_others_in_each_engines_own_way() -> None:
    assert aux_layer_entries((1, 15, 28), 32, "llama") == {}
    assert aux_layer_entries((1, 29, 57), 61, "kimi_k25") == {}
    assert aux_layer_entries((2, 8, 20), 32, "llama") == {
        "eagle_aux_hidden_state_layer_ids": [3, 9, 21],
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [2, 8, 20]},
    }
    assert aux_layer_entries((2, 8, 20), 61, "deepseek_v3") == {
        "eagle_aux_hidden_state_layer_ids": [3, 9, 21],
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [3, 9, 21]},
    }


def test_a_list_that_sglang_would_take_for_outputs_is_refused() -> None:
    with pytest.raises(InvalidSettings, match="first layer other than 0"):
        aux_layer_entries((0, 8, 20), 61, "deepseek_v3")
    assert aux_layer_entries((0, 8, 20), 61, "llama") != {}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda t: t.pop("d2t"), "missing"),
        (lambda t: t.update({"embed_tokens.weight": torch.zeros(2)}), "unknown"),
        (lambda t: t.update({"norm.weight": torch.zeros(3)}), "shape"),
        (lambda t: t["d2t"].__setitem__(3, 0), "different target ids"),
        (lambda t: t["t2d"].fill_(value=True), "different target ids"),
        (lambda t: t["fc.weight"].__setitem__((0, 0), float("inf")), "not finite"),
        (lambda t: t.update({"fc.weight": t["fc.weight"].half()}), "float16"),
    ],
)
def test_what_an_engine_would_swallow_silently_is_found(tmp_path: Path, spoil: Any, message: str) -> None:
    context = make_trained(tmp_path)
    run_export_candidate(context)
    path = candidate_of(context) / "model.safetensors"
    tensors = load_file(path)
    spoil(tensors)
    save_file(tensors, path)
    with pytest.raises(DamagedData, match=message):
        load_export(candidate_of(context))
    assert not run_export_candidate(context)["is_reused"]
    load_export(candidate_of(context))


def draw_course(context: StageContext) -> None:
    entry = HistoryEntry(
        step=1, loss=2.0, acceptance=(0.5, 0.25), learning_rate=1e-3, gradient_norm=1.0, trained_tokens=7
    )
    training = context.read_record(TrainingRecord).training
    plot_history(context.layout.training(training) / PLOT_FILE, [entry])


def test_only_a_candidate_that_passed_is_published_and_the_refusal_names_the_set(tmp_path: Path) -> None:
    context = make_trained(tmp_path)
    run_export_candidate(context)
    write_evaluation(
        context,
        result_of("training", reached=2.0, demanded=2.6),
        result_of("new", reached=1.1, demanded=None),
    )
    with pytest.raises(GateNotPassed, match=r"'training': accept length 2\.00 reached, 2\.60 demanded"):
        run_publish(context)
    assert candidate_of(context).is_dir()
    assert not (context.layout.root / "draft_models").exists()


def test_publishing_moves_the_candidate_once_and_tells_its_accept_lengths(tmp_path: Path) -> None:
    context = make_trained(tmp_path)
    run_export_candidate(context)
    write_evaluation(context, result_of("training", reached=3.1, demanded=2.6))
    draw_course(context)
    first = run_publish(context)
    second = run_publish(context)
    assert (first["is_reused"], second["is_reused"]) == (False, True)
    folder = context.layout.draft_model(context.read_record(DraftModelRecord).draft_model)
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
        "training.png",
    ]
    load_export(folder)
    assert not candidate_of(context).exists()
    card = (folder / "README.md").read_text()
    assert "| training (4) | 1.00 | 3.10 | 3.10 | 2.60 |" in card
    assert str(tmp_path) not in card


def test_the_evaluation_of_another_training_publishes_nothing(tmp_path: Path) -> None:
    context = make_trained(tmp_path)
    run_export_candidate(context)
    write_evaluation(context, result_of("training", reached=3.1, demanded=2.6), training="f" * 24)
    with pytest.raises(DamagedData, match="Run evaluate again"):
        run_publish(context)


def test_a_target_too_shallow_for_default_layers_has_its_layers_named(tmp_path: Path) -> None:
    context = make_trained(tmp_path)
    run_export_candidate(context)
    config = json.loads((candidate_of(context) / "config.json").read_text())
    plan = context.read_record(PlanRecord)
    assert dataclasses.asdict(plan)["num_layers"] == 4
    assert config["eagle_aux_hidden_state_layer_ids"] == [layer + 1 for layer in plan.aux_layer_ids]
