"""The reference engine against transformers itself, on a tiny random Llama."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from eagle3_tasks.contracts.errors import InvalidInput, InvalidSettings, OutOfMemory
from eagle3_tasks.contracts.settings import Settings
from eagle3_tasks.engines.batches import batches_by_length
from eagle3_tasks.engines.huggingface import HuggingFaceEngine, check_loadable
from eagle3_tasks.engines.interface import default_aux_layer_ids
from eagle3_tasks.engines.target_folder import target_fingerprint
from tests.host.tiny_target import (
    AUX_LAYER_IDS,
    HIDDEN_SIZE,
    NUM_LAYERS,
    make_settings,
    make_target,
    random_rows,
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("engine") / "target")


@pytest.fixture(scope="module")
def engine(target: Path, tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceEngine:
    return HuggingFaceEngine.load(make_settings(tmp_path_factory.mktemp("root"), target))


@pytest.fixture(scope="module")
def reference(target: Path):
    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()


def test_a_padded_batch_gives_the_states_that_transformers_gives_one_by_one(engine, reference):
    rows = random_rows(9)
    captured = engine.capture(rows)
    for ids, sample in zip(rows, captured, strict=True):
        with torch.no_grad():
            output = reference(input_ids=torch.tensor([ids]), output_hidden_states=True)
        assert sample.token_ids.tolist() == ids
        for index, layer in enumerate(AUX_LAYER_IDS):
            torch.testing.assert_close(
                sample.aux_hidden[:, index], output.hidden_states[layer + 1][0], atol=2e-5, rtol=1e-4
            )
        torch.testing.assert_close(sample.last_hidden, output.hidden_states[-1][0], atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(
            reference.lm_head(sample.last_hidden), output.logits[0], atol=2e-5, rtol=1e-4
        )


def test_a_layer_id_names_the_output_of_that_decoder_layer(engine, reference):
    """Layer 0's output is computed here by hand: embedding, then the first layer, nothing else."""
    ids = torch.tensor([[9, 10, 11, 12]])
    model = reference.model
    embedded = model.embed_tokens(ids)
    positions = torch.arange(4)[None]
    mask = torch.full((4, 4), torch.finfo(torch.float32).min).triu(1)[None, None]
    with torch.no_grad():
        output = model.layers[0](
            embedded,
            attention_mask=mask,
            position_embeddings=model.rotary_emb(embedded, position_ids=positions),
        )
    (sample,) = engine.capture(ids.tolist())
    torch.testing.assert_close(sample.aux_hidden[:, 0], output[0], atol=1e-5, rtol=1e-4)
    assert not torch.allclose(sample.aux_hidden[:, 0], embedded[0], atol=1e-2)


def test_default_layers_are_those_of_every_engine():
    assert default_aux_layer_ids(61) == (1, 29, 57)
    assert default_aux_layer_ids(8) == (1, 3, 4)
    with pytest.raises(InvalidSettings, match="6 layers"):
        default_aux_layer_ids(6)


def test_the_last_layer_can_be_captured(target: Path, tmp_path: Path, reference):
    engine = HuggingFaceEngine.load(make_settings(tmp_path, target, aux_layer_ids=[0, 1, NUM_LAYERS - 1]))
    (sample,) = engine.capture([[9, 10, 11]])
    normed = reference.model.norm(sample.aux_hidden[:, 2])
    torch.testing.assert_close(normed, sample.last_hidden, atol=1e-5, rtol=1e-4)


def test_bfloat16_states_are_those_of_a_bfloat16_model(target: Path, tmp_path: Path):
    engine = HuggingFaceEngine.load(make_settings(tmp_path, target, capture_dtype="bfloat16"))
    (sample,) = engine.capture([[9, 10, 11]])
    assert sample.aux_hidden.dtype == sample.last_hidden.dtype == torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        output = model(input_ids=torch.tensor([[9, 10, 11]]), output_hidden_states=True)
    assert torch.equal(sample.aux_hidden[:, 1], output.hidden_states[2][0])


def test_greedy_answers_are_those_of_the_argmax_loop_with_their_end_token(engine, reference):
    prompts = random_rows(6, seed=1)
    answers = engine.generate(prompts, max_new_tokens=10, stop_ids=[11, 12, 13, 14, 15, 16])
    assert {answer.finish for answer in answers} == {"stop", "length"}
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = list(prompt)
        for _ in range(10):
            with torch.no_grad():
                ids.append(int(reference(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] in (2, 11, 12, 13, 14, 15, 16):
                break
        assert list(answer.ids) == ids[len(prompt) :]
        assert (answer.finish == "stop") == (ids[-1] in (2, 11, 12, 13, 14, 15, 16))


def test_penalties_in_the_targets_own_generation_config_do_not_bend_greedy(
    target: Path, tmp_path: Path, engine
):
    bent = shutil.copytree(target, tmp_path / "bent")
    GenerationConfig(repetition_penalty=5.0, do_sample=True, eos_token_id=[2, 20]).save_pretrained(bent)
    bent_engine = HuggingFaceEngine.load(make_settings(tmp_path, bent))
    assert bent_engine.end_ids == (2, 20)
    prompts = random_rows(4, seed=2)
    assert bent_engine.generate(prompts, max_new_tokens=8) == engine.generate(
        prompts, max_new_tokens=8, stop_ids=[20]
    )


def test_sampling_depends_on_the_seed_alone(engine):
    prompts = random_rows(4, seed=3)
    torch.manual_seed(1)
    first = engine.generate(prompts, max_new_tokens=8, temperature=1.0, seed=5)
    torch.manual_seed(2)
    assert engine.generate(prompts, max_new_tokens=8, temperature=1.0, seed=5) == first
    assert engine.generate(prompts, max_new_tokens=8, temperature=1.0, seed=6) != first


def test_out_of_memory_halves_the_batch_and_every_sequence_keeps_its_place(
    target: Path, tmp_path: Path, engine
):
    small = HuggingFaceEngine.load(make_settings(tmp_path, target, capture_batch_tokens=4096))
    sizes: list[int] = []
    forward = small._decoder.forward

    def forward_with_little_memory(ids, mask, layers):
        sizes.append(ids.shape[0])
        if ids.shape[0] > 2:
            raise torch.OutOfMemoryError("injected")
        return forward(ids, mask, layers)

    small._decoder.forward = forward_with_little_memory
    rows = random_rows(7, seed=4)
    captured = small.capture(rows)
    assert [sample.token_ids.tolist() for sample in captured] == rows
    assert sizes[0] == 7
    assert max(sizes[-2:]) <= 2
    torch.testing.assert_close(captured[3].last_hidden, engine.capture([rows[3]])[0].last_hidden)


def test_a_single_sequence_that_does_not_fit_is_out_of_memory(target: Path, tmp_path: Path):
    engine = HuggingFaceEngine.load(make_settings(tmp_path, target))

    def no_memory(*_):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes")

    engine._decoder.forward = no_memory
    with pytest.raises(OutOfMemory, match="one sequence of 5 tokens"):
        engine.capture([[7, 8, 9, 10, 11]])


def test_other_decoders_are_found_by_the_length_of_their_layer_list(tmp_path: Path):
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = make_target(tmp_path / "gpt2")
    GPT2LMHeadModel(
        GPT2Config(
            vocab_size=96, n_embd=HIDDEN_SIZE, n_layer=NUM_LAYERS, n_head=4, eos_token_id=2, bos_token_id=2
        )
    ).save_pretrained(folder)
    engine = HuggingFaceEngine.load(make_settings(tmp_path, folder))
    assert engine.describe().num_layers == NUM_LAYERS
    (sample,) = engine.capture([[9, 10, 11]])
    assert sample.aux_hidden.shape == (3, 3, HIDDEN_SIZE)


def _rename(folder: Path, name: str, new_name: str) -> None:
    (folder / name).rename(folder / new_name)


UNKNOWN_MODEL = {
    "architectures": ["NewModel"],
    "model_type": "never_heard_of",
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "vocab_size": 96,
}
LFS_POINTER = "version https://git-lfs.github.com/spec/v1\n"
INDEX = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}


def _cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (shutil.rmtree, "is not a folder"),
        (lambda folder: _rename(folder, "config.json", "config"), "holds no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "can't be read"),
        (lambda folder: (folder / "config.json").write_text("[]"), "is not a JSON object"),
        (lambda folder: (folder / "config.json").write_text(json.dumps(UNKNOWN_MODEL)), "never_heard_of"),
        (lambda folder: (folder / "model.safetensors").unlink(), "holds no weights"),
        (lambda folder: _rename(folder, "model.safetensors", "pytorch_model.bin"), "pickles are not loaded"),
        (lambda folder: (folder / "model.safetensors").write_text(LFS_POINTER), "git lfs pull"),
        (_cut, r"1 of 1 weight files .* model\.safetensors \(\d+ bytes"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b""), "weight files are cut short"),
        (lambda folder: (folder / "b.safetensors").symlink_to("gone"), r"1 of 2 .* b\.safetensors \(0 bytes"),
        (lambda folder: [path.unlink() for path in folder.glob("tokenizer*")], "holds no tokenizer"),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text(json.dumps(INDEX)),
            "lacks 1 weight files",
        ),
    ],
)
def test_a_folder_that_is_no_target_is_refused_with_what_to_do(
    target: Path, tmp_path: Path, spoil, message: str
):
    folder = shutil.copytree(target, tmp_path / "target")
    spoil(folder)
    with pytest.raises(InvalidInput, match=message):
        check_loadable(make_settings(tmp_path, folder))


def test_the_fingerprint_is_that_of_the_content(target: Path, tmp_path: Path):
    moved = shutil.copytree(target, tmp_path / "elsewhere")
    assert target_fingerprint(make_settings(tmp_path, moved)) == target_fingerprint(
        make_settings(tmp_path, target)
    )
    # Another training: same configuration, same names and sizes, other numbers.
    other = make_target(tmp_path / "other", seed=1)
    assert (other / "config.json").read_bytes() == (target / "config.json").read_bytes()
    assert (other / "model.safetensors").stat().st_size == (target / "model.safetensors").stat().st_size
    assert target_fingerprint(make_settings(tmp_path, other)) != target_fingerprint(
        make_settings(tmp_path, target)
    )


@pytest.fixture
def large_target(tmp_path: Path) -> Path:
    """A folder with a configuration and one file of weights that is larger than a few blocks."""
    folder = tmp_path / "large"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(13_000_000))
    return folder


def test_one_changed_byte_anywhere_in_the_weights_changes_the_fingerprint(tmp_path: Path, large_target: Path):
    settings = make_settings(tmp_path / "root", large_target)
    weights = large_target / "model.safetensors"
    before = target_fingerprint(settings)
    status = weights.stat()
    with weights.open("r+b") as file:
        file.seek(6_300_001)
        file.write(b"x")
    # As a copy does that keeps the times of its source.
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert target_fingerprint(settings) != before


def test_weights_are_read_once_for_all_processes_until_they_change(
    tmp_path: Path, large_target: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    settings = make_settings(tmp_path / "root", large_target)
    first = target_fingerprint(settings)
    assert "reading all weights to name their content files=1 bytes=13000000" in caplog.text
    assert not any(str(tmp_path) in path.read_text() for path in (tmp_path / "root").rglob("*.json"))
    caplog.clear()
    assert target_fingerprint(settings) == first
    assert "reading all weights" not in caplog.text
    for path in (tmp_path / "root" / "fingerprints").glob("*.json"):
        path.write_text("{")
    (large_target / "model-2.safetensors").write_bytes(b"more")
    assert target_fingerprint(settings) != first
    assert "known digest ignored" in caplog.text
    assert "files=2 bytes=13000004" in caplog.text


def test_code_of_a_target_counts_where_it_is_trusted(tmp_path: Path, large_target: Path):
    trusting, strict = (
        make_settings(tmp_path / "root", large_target, trust_remote_code=trusted) for trusted in (True, False)
    )
    code = large_target / "modeling_own.py"
    code.write_text("SCALE = 1")
    before = (target_fingerprint(trusting), target_fingerprint(strict))
    code.write_text("SCALE = 2")
    assert target_fingerprint(trusting) != before[0]
    assert target_fingerprint(strict) == before[1]


def test_weights_that_turn_out_damaged_while_they_are_loaded_are_the_users_to_mend(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = shutil.copytree(target, tmp_path / "target")
    monkeypatch.setattr("eagle3_tasks.engines.huggingface.check_target_folder", _cut_after_the_check)
    with pytest.raises(InvalidInput, match=r"cut short or damaged: model\.safetensors"):
        HuggingFaceEngine.load(make_settings(tmp_path / "root", folder))


def _cut_after_the_check(settings: Settings) -> None:
    _cut(Path(settings.target.target_model))


def test_no_batch_pads_beyond_its_bound_and_every_sequence_is_in_one():
    lengths = [3, 50, 7, 7, 31, 1, 64, 120, 8]
    batches = batches_by_length(lengths, 64)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[index] for index in batch) <= 64
