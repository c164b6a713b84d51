"""Loss and gradients against a slow reference that goes one position at a time."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from eagle3_tasks.contracts.settings import settings_from_flat
from eagle3_tasks.draft.config import DraftConfig, draft_config
from eagle3_tasks.draft.initialize import random_draft_model
from eagle3_tasks.draft.model import DraftModel
from eagle3_tasks.draft.target_weights import TargetWeights
from eagle3_tasks.training import loss as loss_module
from eagle3_tasks.training import unroll
from eagle3_tasks.training.batch import TrainedSample, collate
from eagle3_tasks.training.loss import compute_sums
from eagle3_tasks.training.teacher import Teacher, ask_teacher, make_teacher
from eagle3_tasks.vocab.mapping import make_vocabulary

HIDDEN, VOCAB, DRAFT_VOCAB, HEADS, KV_HEADS, HEAD_DIM, TTT_STEPS = 16, 40, 24, 4, 2, 6, 4
THETA = 500.0


def make_model() -> DraftModel:
    config = DraftConfig(
        hidden_size=HIDDEN, intermediate_size=20, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM,
        target_vocab_size=VOCAB, draft_vocab_size=DRAFT_VOCAB, rms_norm_eps=1e-5,
        max_position_embeddings=128, rope_theta=THETA,
    )  # fmt: skip
    ids = np.sort(np.random.default_rng(1).permutation(VOCAB)[:DRAFT_VOCAB])
    vocabulary = make_vocabulary(ids, VOCAB)
    model = random_draft_model(config, d2t=vocabulary.d2t_V, t2d=vocabulary.t2d_W, seed=2)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.25)
    return model


def make_teacher_and_samples(
    lengths: tuple[int, ...], model: DraftModel
) -> tuple[Teacher, list[TrainedSample]]:
    generator = torch.Generator().manual_seed(4)
    weights = TargetWeights(
        embedding_WD=torch.randn(VOCAB, HIDDEN, generator=generator),
        head_WD=torch.randn(VOCAB, HIDDEN, generator=generator),
        final_norm_D=torch.ones(HIDDEN),
    )
    samples = [
        TrainedSample(
            token_ids_T=torch.randint(VOCAB, (length,), generator=generator),
            loss_mask_T=torch.rand(length, generator=generator) < 0.7,
            aux_hidden_TAD=torch.randn(length, 3, HIDDEN, generator=generator),
            last_hidden_TD=torch.randn(length, HIDDEN, generator=generator),
        )
        for length in lengths
    ]
    return make_teacher(weights, model, torch.device("cpu")), samples


class Reference:
    """EAGLE-3's training-time test in double precision, one vector at a time."""

    def __init__(self, model: DraftModel, teacher: Teacher) -> None:
        self.weights = {
            name: one.detach().double().requires_grad_() for name, one in model.named_parameters()
        }
        self.draft_ids = model.t2d.nonzero().flatten().tolist()
        self.embedding, self.head = teacher.embedding_WD.double(), teacher.head_WD.double()

    def norm(self, vector: Tensor, name: str) -> Tensor:
        return vector / torch.sqrt((vector * vector).mean() + 1e-5) * self.weights[name]

    def rotate(self, vector: Tensor, position: int) -> Tensor:
        half = HEAD_DIM // 2
        angles = position * torch.tensor(
            [THETA ** (-2 * i / HEAD_DIM) for i in range(half)], dtype=torch.float64
        )
        spun = torch.complex(vector[:half], vector[half:]) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((spun.real, spun.imag))

    def layer(
        self, token: int, hidden: Tensor, position: int, seen: list[tuple[list[Tensor], list[Tensor]]]
    ) -> tuple[Tensor, tuple[list[Tensor], list[Tensor]]]:
        """Give the layer's output and its own keys and values, one a head."""
        both = torch.cat(
            (
                self.norm(self.embedding[token], "midlayer.input_layernorm.weight"),
                self.norm(hidden, "midlayer.hidden_norm.weight"),
            )
        )
        project = {p: self.weights[f"midlayer.self_attn.{p}_proj.weight"] @ both for p in "qkv"}
        keys = [self.rotate(one, position) for one in project["k"].split(HEAD_DIM)]
        values = list(project["v"].split(HEAD_DIM))
        visible = [*seen, (keys, values)]
        mixed: list[Tensor] = []
        for head, query in enumerate(project["q"].split(HEAD_DIM)):
            group = head // (HEADS // KV_HEADS)
            turned = self.rotate(query, position)
            scores = torch.stack([turned @ one_keys[group] / HEAD_DIM**0.5 for one_keys, _ in visible])
            shares = torch.softmax(scores, dim=0)
            mixed.append(sum(share * one[group] for share, (_, one) in zip(shares, visible, strict=True)))
        hidden = hidden + self.weights["midlayer.self_attn.o_proj.weight"] @ torch.cat(mixed)
        inner = self.norm(hidden, "midlayer.post_attention_layernorm.weight")
        gate = self.weights["midlayer.mlp.gate_proj.weight"] @ inner
        up = self.weights["midlayer.mlp.up_proj.weight"] @ inner
        hidden = hidden + self.weights["midlayer.mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)
        return hidden, (keys, values)

    def loss(self, samples: list[TrainedSample]) -> Tensor:
        total, num_valid = torch.zeros((), dtype=torch.float64), 0
        for sample in samples:
            ids = sample.token_ids_T.tolist()
            answers = [self.answer(last) for last in sample.last_hidden_TD.double()]
            counts = [bool(m) and a is not None for m, a in zip(sample.loss_mask_T, answers, strict=True)]
            num_valid += sum(counts[1:])
            true_keys: list[tuple[list[Tensor], list[Tensor]]] = []
            for t in range(len(ids) - 1):
                hidden = self.weights["fc.weight"] @ sample.aux_hidden_TAD[t].double().flatten()
                own_keys: list[tuple[list[Tensor], list[Tensor]]] = []
                for k in range(TTT_STEPS):
                    newest = t + 1 + k
                    if newest >= len(ids):
                        break
                    hidden, made = self.layer(ids[newest], hidden, t + k, [*true_keys, *own_keys])
                    if counts[newest]:
                        logits = self.weights["lm_head.weight"] @ self.norm(hidden, "norm.weight")
                        cross_entropy = -(answers[newest] * torch.log_softmax(logits, dim=0)).sum()
                        total = total + 0.8**k * cross_entropy
                    own_keys.append(made)
                true_keys.append(own_keys[0])
        return total / num_valid

    def answer(self, last: Tensor) -> Tensor | None:
        logits = self.head @ last
        if int(logits.argmax()) not in self.draft_ids:
            return None
        return torch.softmax(logits[self.draft_ids], dim=0)


@pytest.fixture(scope="module", params=[(9,), (7, 12, 3)], ids=["one sample", "three padded samples"])
def compared(
    request: pytest.FixtureRequest,
) -> tuple[DraftModel, Teacher, list[TrainedSample], Reference, Tensor]:
    model = make_model()
    teacher, samples = make_teacher_and_samples(request.param, model)
    reference = Reference(model, teacher)
    loss = reference.loss(samples)
    loss.backward()
    return model, teacher, samples, reference, loss.detach()


def loss_and_gradients(
    model: DraftModel, teacher: Teacher, samples: list[TrainedSample], width: int = 0
) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    sums = compute_sums(model, teacher, collate(samples, width=width), TTT_STEPS)
    (sums.loss / sums.num_valid).backward()
    return float(sums.loss.detach() / sums.num_valid), {
        name: one.grad.clone() for name, one in model.named_parameters()
    }


def test_loss_and_every_gradient_are_those_of_the_slow_reference(compared) -> None:
    model, teacher, samples, reference, expected = compared
    loss, gradients = loss_and_gradients(model, teacher, samples)
    assert loss == pytest.approx(float(expected), rel=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            gradient.double(),
            reference.weights[name].grad,
            rtol=1e-3,
            atol=2e-5,
            msg=lambda text, n=name: f"{n}: {text}",
        )


def test_padding_changes_neither_loss_nor_gradients(compared) -> None:
    model, teacher, samples, _, _ = compared
    loss, gradients = loss_and_gradients(model, teacher, samples)
    padded_loss, padded_gradients = loss_and_gradients(model, teacher, samples, width=31)
    assert padded_loss == pytest.approx(loss, rel=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(padded_gradients[name], gradient, rtol=1e-4, atol=1e-6)


def test_attention_some_queries_at_a_time_gives_the_same_gradients(compared, monkeypatch) -> None:
    model, teacher, samples, _, _ = compared
    loss, gradients = loss_and_gradients(model, teacher, samples)
    monkeypatch.setattr(unroll, "_QUERIES_AT_ONCE", 4)
    blocked_loss, blocked_gradients = loss_and_gradients(model, teacher, samples)
    assert blocked_loss == pytest.approx(loss, rel=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(blocked_gradients[name], gradient, rtol=1e-4, atol=1e-6)


def test_a_loss_some_positions_at_a_time_gives_the_same_gradients(compared, monkeypatch) -> None:
    model, teacher, samples, _, _ = compared
    loss, gradients = loss_and_gradients(model, teacher, samples)
    monkeypatch.setattr(loss_module, "_POSITIONS_AT_ONCE", 2)
    parted_loss, parted_gradients = loss_and_gradients(model, teacher, samples)
    assert parted_loss == pytest.approx(loss, rel=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(parted_gradients[name], gradient, rtol=1e-4, atol=1e-6)


def test_no_logits_are_kept_for_the_backward_pass_of_more_positions_than_go_at_once(monkeypatch) -> None:
    model = make_model()
    teacher, (sample,) = make_teacher_and_samples((20,), model)
    answers = ask_teacher(teacher, model, sample.last_hidden_TD)

    def num_kept_as_wide_as_logits() -> int:
        kept: list[torch.Size] = []
        hidden = torch.ones(20, HIDDEN, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda one: kept.append(one.shape) or one, lambda _: None
        ):
            loss_module._compare(model, answers, hidden, torch.arange(20))
        return sum(shape[-1:] == (DRAFT_VOCAB,) for shape in kept)

    assert num_kept_as_wide_as_logits() > 0
    monkeypatch.setattr(loss_module, "_POSITIONS_AT_ONCE", 8)
    assert num_kept_as_wide_as_logits() == 0


def test_later_steps_see_true_keys_up_to_their_position_and_only_their_own_after() -> None:
    model = make_model()
    _, (sample,) = make_teacher_and_samples((8,), model)
    embedded = torch.randn(1, 8, HIDDEN, generator=torch.Generator().manual_seed(9))
    aux = sample.aux_hidden_TAD[None].clone().requires_grad_()
    for step, hidden in enumerate(unroll.unroll(model, embedded, aux, 3)):
        for position in range(8):
            (gradient,) = torch.autograd.grad(hidden[0, position].sum(), aux, retain_graph=True)
            reached = (gradient[0].abs().sum(dim=(1, 2)) > 0).nonzero().flatten().tolist()
            assert reached == list(range(position + 1)), f"step {step}, position {position}"


def test_the_first_round_of_serving_is_trained() -> None:
    # The last prompt token's position, which sees the answer's first token, has a loss.
    model = make_model()
    teacher, (sample,) = make_teacher_and_samples((8,), model)
    first_answer = 5
    mask = torch.arange(8) == first_answer
    sample = dataclasses.replace(sample, loss_mask_T=mask)
    batch = collate([sample])
    seen: list[int] = []
    for step in range(TTT_STEPS):
        seen += (batch.position_P - 1 - step).tolist()
    assert seen == [4, 3, 2, 1]
    assert compute_sums(model, teacher, batch, TTT_STEPS).num_trained_K.tolist() == [1, 1, 1, 1]


def test_positions_whose_first_choice_has_no_draft_id_give_no_gradient_but_count_as_wrong() -> None:
    model = make_model()
    teacher, (sample,) = make_teacher_and_samples((10,), model)
    outside = int((~model.t2d).nonzero()[0])
    last = teacher.head_WD[outside] * 10
    sample = dataclasses.replace(
        sample, last_hidden_TD=last.repeat(10, 1), loss_mask_T=torch.ones(10, dtype=torch.bool)
    )
    sums = compute_sums(model, teacher, collate([sample]), TTT_STEPS)
    sums.loss.backward()
    assert (float(sums.loss.detach()), int(sums.num_valid)) == (0.0, 0)
    assert all(not one.grad.any() for one in model.parameters() if one.grad is not None)
    assert sums.num_trained_K.tolist() == [9, 8, 7, 6]
    assert sums.num_correct_K.tolist() == [0, 0, 0, 0]


def test_shares_of_two_processes_add_up_to_the_whole_batch() -> None:
    model = make_model()
    teacher, samples = make_teacher_and_samples((7, 12, 3), model)
    whole = compute_sums(model, teacher, collate(samples), TTT_STEPS)
    whole.loss.backward()
    expected = {name: one.grad.clone() for name, one in model.named_parameters()}
    model.zero_grad()
    parts = [compute_sums(model, teacher, collate(part), TTT_STEPS) for part in (samples[:1], samples[1:])]
    for part in parts:
        part.loss.backward()
    assert sum(int(part.num_valid) for part in parts) == int(whole.num_valid)
    for name, one in model.named_parameters():
        torch.testing.assert_close(one.grad, expected[name], rtol=1e-4, atol=1e-5)


def yarn_target(**rope: float | str) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=4, vocab_size=100, intermediate_size=64,
        max_position_embeddings=4096, rope_parameters={"rope_theta": 50000.0, **rope},
    )  # fmt: skip


def test_yarn_scales_like_the_engines_whatever_mscale_the_target_names() -> None:
    settings = settings_from_flat(
        {
            "root": "/data/r",
            "conversations_path": "/data/c",
            "target_model": "/data/t",
            "draft_vocab_size": 10,
        }
    )
    plain = {
        "rope_type": "yarn",
        "factor": 64.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    }
    made = [
        draft_config(settings, yarn_target(**plain, **extra))
        for extra in ({}, {"mscale": 1.0, "mscale_all_dim": 1.0})
    ]
    assert made[0].rope_scaling == made[1].rope_scaling == plain
    model = DraftModel(made[0])
    cos, _ = model.rotary(torch.zeros(1, 1))
    # 0.1 ln(64) + 1, which vLLM and SGLang apply to a Llama.
    assert cos.flatten().tolist() == pytest.approx([0.1 * np.log(64.0) + 1] * 16)


@pytest.mark.parametrize("rope", [{"rope_type": "default"}, {"rope_type": "yarn", "factor": 4.0}])
def test_positions_of_a_bfloat16_draft_model_are_those_of_a_float32_one(rope: dict[str, Any]) -> None:
    config = dataclasses.replace(
        make_model().config, head_dim=32, rope_scaling={"original_max_position_embeddings": 1024, **rope}
    )
    positions = torch.tensor([[0, 1, 100, 3000]])
    cos, sin = DraftModel(config).rotary(positions)
    model = DraftModel(config).to(torch.bfloat16)
    assert model.fc.weight.dtype == torch.bfloat16
    for found, expected in zip(model.rotary(positions), (cos, sin), strict=True):
        assert found.dtype == torch.float32
        assert torch.equal(found, expected)


def test_a_shallow_mask_at_the_first_token_is_no_draft_input() -> None:
    model = make_model()
    teacher, samples = make_teacher_and_samples((6, 6), model)
    first_only = [dataclasses.replace(one, loss_mask_T=torch.arange(6) == 0) for one in samples]
    sums = compute_sums(model, teacher, collate(first_only), TTT_STEPS)
    assert int(sums.num_valid) == 0
    assert not any(itertools.chain(sums.num_trained_K.tolist()))
