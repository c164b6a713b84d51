"""What the canary refuses: targets whose stored states are not what training would take them for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eagle3_tasks.contracts.errors import InvalidInput
from eagle3_tasks.engines import canary
from eagle3_tasks.engines.canary import check_model
from eagle3_tasks.engines.huggingface import HuggingFaceEngine
from tests.host.tiny_target import AUX_LAYER_IDS, HIDDEN_SIZE, NUM_LAYERS, make_settings, make_target


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceEngine:
    folder = tmp_path_factory.mktemp("canary")
    return HuggingFaceEngine.load(make_settings(folder / "root", make_target(folder / "target")))


def test_scaled_logits_are_refused(tmp_path: Path):
    from transformers import GraniteConfig, GraniteForCausalLM

    folder = make_target(tmp_path / "granite")
    config = GraniteConfig(
        vocab_size=96, hidden_size=HIDDEN_SIZE, intermediate_size=48, num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4, num_key_value_heads=2, logits_scaling=4.0, eos_token_id=2, bos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    GraniteForCausalLM(config).save_pretrained(folder)
    with pytest.raises(InvalidInput, match="scales or soft-caps"):
        HuggingFaceEngine.load(make_settings(tmp_path, folder))


def test_soft_capped_logits_are_refused_although_small_ones_hardly_differ(tmp_path: Path):
    from transformers import Gemma2Config, Gemma2ForCausalLM

    folder = make_target(tmp_path / "gemma")
    config = Gemma2Config(
        vocab_size=96, hidden_size=HIDDEN_SIZE, intermediate_size=48, num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, final_logit_softcapping=30.0,
        eos_token_id=2, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    Gemma2ForCausalLM(config).save_pretrained(folder)
    with pytest.raises(InvalidInput, match="soft-caps"):
        HuggingFaceEngine.load(make_settings(tmp_path, folder))


def test_a_bias_of_the_output_layer_is_refused(tmp_path: Path):
    from transformers import PhiConfig, PhiForCausalLM

    folder = make_target(tmp_path / "phi")
    config = PhiConfig(
        vocab_size=96, hidden_size=HIDDEN_SIZE, intermediate_size=48, num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4, eos_token_id=2, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = PhiForCausalLM(config)
    model.save_pretrained(folder)
    HuggingFaceEngine.load(make_settings(tmp_path, folder))
    with torch.no_grad():
        model.lm_head.bias[7] = 0.5
    model.save_pretrained(folder)
    with pytest.raises(InvalidInput, match=r"adds a bias to its logits \(up to 0\.5\)"):
        HuggingFaceEngine.load(make_settings(tmp_path, folder))


def test_an_output_layer_that_is_more_than_its_weight_is_refused(engine, monkeypatch):
    head = engine._decoder.head
    forward = head.forward
    monkeypatch.setattr(head, "forward", lambda states: 2 * forward(states))
    with pytest.raises(InvalidInput, match="scales or soft-caps"):
        check_model(engine._model, engine._decoder, layer_ids=AUX_LAYER_IDS, vocab_size=96)


def test_the_canary_compares_the_logits_with_the_state_of_their_own_pass(engine, monkeypatch):
    """A pass that rounds otherwise than the one before it is no fault of the model."""
    forward, num_passes = engine._decoder.module.norm.forward, 0

    def forward_unsteadily(states):
        nonlocal num_passes
        num_passes += 1
        return forward(states) * (1 + 0.005 * num_passes)

    monkeypatch.setattr(engine._decoder.module.norm, "forward", forward_unsteadily)
    monkeypatch.setattr(canary, "_check_padding", lambda *_: None)
    check_model(engine._model, engine._decoder, layer_ids=AUX_LAYER_IDS, vocab_size=96)
