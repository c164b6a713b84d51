"""Accept length: the decoding loop, the walk over captured states, and that both agree."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.modeling_outputs import CausalLMOutputWithPast

from eagle3_tasks.contracts.errors import EngineProblem, InvalidInput
from eagle3_tasks.contracts.run_records import EvaluationRecord, TrainingRecord
from eagle3_tasks.contracts.settings import EvaluationSet, Settings
from eagle3_tasks.data.dataset import Dataset
from eagle3_tasks.data.template import ChatTemplate
from eagle3_tasks.draft.config import draft_config
from eagle3_tasks.draft.export_stage import run_export_candidate
from eagle3_tasks.draft.initialize import initialize_draft_model, random_draft_model
from eagle3_tasks.draft.model import DraftModel
from eagle3_tasks.draft.target_config import read_target_config
from eagle3_tasks.draft.target_weights import read_target_weights
from eagle3_tasks.draft.trained import TrainingResult, write_trained
from eagle3_tasks.engines.decoder import Decoder
from eagle3_tasks.engines.huggingface import HuggingFaceEngine
from eagle3_tasks.evaluation import measure, speculative
from eagle3_tasks.evaluation.measure import accept_length, acceptance_by_step, check_agreement, decode_set
from eagle3_tasks.evaluation.question_sets import QuestionSet, held_out_questions, training_questions
from eagle3_tasks.evaluation.simulated import simulate_rounds
from eagle3_tasks.evaluation.speculative import DraftChain, LoopTarget, decode_greedily, speculate
from eagle3_tasks.evaluation.stage import run_evaluate
from eagle3_tasks.training.batch import TrainedSample, collate
from eagle3_tasks.training.loss import compute_sums
from eagle3_tasks.training.teacher import make_teacher
from tests.host.tiny_target import AUX_LAYER_IDS, NUM_LAYERS, VOCAB_SIZE, make_target
from tests.host.training_world import DATASET, make_settings, make_world, some_vocabulary

END_IDS = frozenset({2})
MAX_NEW_TOKENS = 24
DRAFT_STEPS = 3
# Nearly all ids: a random target says anything, and what has no draft id is never guessed.
WIDE_VOCABULARY = 90


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """A target, a draft model that has learnt a little of it, and questions with greedy answers."""

    settings: Settings
    target: LoopTarget
    draft: DraftModel
    prompts: list[list[int]]
    answers: list[tuple[int, ...]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("pair")
    settings = make_settings(
        folder / "root", make_target(folder / "target"), draft_vocab_size=WIDE_VOCABULARY
    )
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32).eval()
    target = LoopTarget(
        model=model, decoder=Decoder(model, num_layers=NUM_LAYERS), aux_layer_ids=AUX_LAYER_IDS
    )
    chance = np.random.default_rng(8)
    prompts = [chance.integers(7, VOCAB_SIZE, size=size).tolist() for size in (3, 5, 9, 12, 7, 4, 15, 6)]
    answers = [
        decode_greedily(target, prompt, max_new_tokens=MAX_NEW_TOKENS, end_ids=END_IDS) for prompt in prompts
    ]
    return Pair(
        settings=settings,
        target=target,
        draft=learn(settings, prompts, answers),
        prompts=prompts,
        answers=answers,
    )


def learn(settings: Settings, prompts: list[list[int]], answers: list[tuple[int, ...]]) -> DraftModel:
    """Train on half of the answers, so that guesses are sometimes right."""
    weights, vocabulary = read_target_weights(settings), some_vocabulary(WIDE_VOCABULARY)
    config = draft_config(settings, read_target_config(settings))
    draft = initialize_draft_model(config, weights, d2t=vocabulary.d2t_V, t2d=vocabulary.t2d_W, seed=0)
    captured = HuggingFaceEngine.load(settings).capture(
        [[*prompt, *answer] for prompt, answer in zip(prompts[::2], answers[::2], strict=True)]
    )
    batch = collate(
        [
            TrainedSample(
                token_ids_T=one.token_ids.long(),
                loss_mask_T=torch.arange(len(one.token_ids)) >= len(prompt),
                aux_hidden_TAD=one.aux_hidden,
                last_hidden_TD=one.last_hidden,
            )
            for one, prompt in zip(captured, prompts[::2], strict=True)
        ]
    )
    teacher = make_teacher(weights, draft, torch.device("cpu"))
    optimizer = torch.optim.AdamW(draft.parameters(), lr=8e-3)
    for _ in range(150):
        optimizer.zero_grad()
        sums = compute_sums(draft, teacher, batch, DRAFT_STEPS)
        (sums.loss / sums.num_valid).backward()
        optimizer.step()
    return draft.eval()


def speculate_all(pair: Pair, draft: DraftModel) -> list[speculative.SpeculativeAnswer]:
    return [
        speculate(
            pair.target,
            draft,
            prompt,
            draft_steps=DRAFT_STEPS,
            max_new_tokens=MAX_NEW_TOKENS,
            end_ids=END_IDS,
        )
        for prompt in pair.prompts
    ]


def test_the_plain_loop_decodes_what_transformers_generates(pair: Pair) -> None:
    config = GenerationConfig(
        do_sample=False, max_new_tokens=MAX_NEW_TOKENS, eos_token_id=[2], pad_token_id=0
    )
    for prompt, answer in zip(pair.prompts, pair.answers, strict=True):
        generated = pair.target.model.generate(torch.tensor([prompt]), generation_config=config)
        assert tuple(generated[0, len(prompt) :].tolist()) == answer


def test_speculative_output_is_greedy_whether_the_draft_model_is_good_or_random(pair: Pair) -> None:
    vocabulary = some_vocabulary(WIDE_VOCABULARY)
    random = random_draft_model(pair.draft.config, d2t=vocabulary.d2t_V, t2d=vocabulary.t2d_W, seed=6)
    lengths: list[float] = []
    for draft in (pair.draft, random):
        found = speculate_all(pair, draft)
        assert [one.ids for one in found] == pair.answers
        lengths.append(accept_length([one.accepted for one in found], pair.answers))
    assert lengths[0] > 1.3
    assert lengths[1] < 1.1


def test_the_walk_over_captured_states_takes_the_very_rounds_of_the_loop(pair: Pair) -> None:
    looped = [one.accepted for one in speculate_all(pair, pair.draft)]
    engine = HuggingFaceEngine.load(pair.settings)
    walked = [
        simulate_rounds(
            pair.draft,
            embedding_WD=read_target_weights(pair.settings).embedding_WD,
            prompt_ids=prompt,
            answer_ids=answer,
            aux_hidden_TAD=engine.capture([[*prompt, *answer]])[0].aux_hidden,
            draft_steps=DRAFT_STEPS,
        )
        for prompt, answer in zip(pair.prompts, pair.answers, strict=True)
    ]
    assert walked == looped
    assert {accepted for answer in walked for accepted in answer} == {0, 1, 2, 3}


def test_any_mixture_of_right_and_wrong_guesses_gives_the_greedy_answer_and_is_counted(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = np.random.default_rng(2)
    for prompt, answer in zip(pair.prompts, pair.answers, strict=True):
        wanted: list[int] = []
        known = 1

        def propose(
            _self: DraftChain, _next: Sequence[int], _aux: object, steps: int,
            *, answer: tuple[int, ...] = answer, wanted: list[int] = wanted,
        ) -> list[int]:  # fmt: skip
            nonlocal known
            num_right = int(chance.integers(0, steps + 1))
            guesses = [*answer[known : known + steps], *([0] * steps)][:steps]
            for place in range(num_right, steps):
                guesses[place] = (guesses[place] + 1) % VOCAB_SIZE
            wanted.append(min(num_right, len(answer) - known))
            known += num_right + 1
            return guesses

        monkeypatch.setattr(DraftChain, "propose", propose)
        found = speculate(
            pair.target, pair.draft, prompt, draft_steps=4, max_new_tokens=MAX_NEW_TOKENS, end_ids=END_IDS
        )
        assert found.ids == answer
        assert list(found.accepted) == wanted


def test_accept_length_is_tokens_a_round_and_acceptance_the_share_of_kept_guesses() -> None:
    accepted = [(3, 0), (1,), ()]
    answers = [(1,) * 6, (1,) * 3, (1,)]
    assert accept_length(accepted, answers) == pytest.approx(7 / 3)
    assert acceptance_by_step(accepted, 3) == pytest.approx((2 / 3, 1 / 3, 1 / 3))
    assert accept_length([()], [(1,)]) == 1.0


def test_rounds_that_differ_by_more_than_two_percent_are_refused() -> None:
    check_agreement("new", 1019, 1000)
    check_agreement("new", 12, 10)
    with pytest.raises(EngineProblem, match="1021 rounds by captured states, 1000"):
        check_agreement("new", 1021, 1000)


def decode_one(pair: Pair) -> measure.DecodedSet:
    questions = QuestionSet(name="some", min_accept_length=None, prompts=(tuple(pair.prompts[0]),))
    return decode_set(
        pair.target, pair.draft, questions,
        draft_steps=3, max_new_tokens=MAX_NEW_TOKENS, end_ids=END_IDS, report=lambda _: None,
    )  # fmt: skip


def change_answer(monkeypatch: pytest.MonkeyPatch, place: int, *, follow: LoopTarget | None = None) -> None:
    """Let speculation say another token at ``place``, and after it what ``follow`` would, or nothing new."""
    real = measure.speculate

    def changed(target: Any, draft: Any, prompt: Sequence[int], **named: Any) -> Any:
        answer = real(target, draft, prompt, **named)
        ids = list(answer.ids)
        ids[place] = 50 if ids[place] != 50 else 51
        if follow is not None:
            known = [*prompt, *ids[: place + 1]]
            num_left = MAX_NEW_TOKENS - place - 1
            rest = decode_greedily(follow, known, max_new_tokens=num_left, end_ids=END_IDS)
            ids = [*ids[: place + 1], *rest]
        return dataclasses.replace(answer, ids=tuple(ids), accepted=(1,) * len(ids))

    monkeypatch.setattr(measure, "speculate", changed)


def test_an_answer_that_is_not_the_targets_own_is_an_error_and_a_tie_is_not(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_answer(monkeypatch, 4)
    with pytest.raises(EngineProblem, match="leaves the target's own at token 4 "):
        decode_one(pair)
    monkeypatch.setattr(measure, "_TIE_UNITS", 1e12)
    assert decode_one(pair).num_ties == 1


def test_after_a_tie_both_figures_are_of_the_speculative_answer_and_its_rest_is_judged(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = 4
    greedy = pair.answers[0]
    other = 50 if greedy[place] != 50 else 51
    with torch.no_grad():
        logits = pair.target.model(torch.tensor([[*pair.prompts[0], *greedy[:place]]])).logits[0, -1]
    gap = float(logits.max() - logits[other]) / max(1.0, float(logits.max().abs()))
    # Wide enough for this one difference.
    monkeypatch.setattr(measure, "_TIE_UNITS", 1.01 * gap / torch.finfo(torch.float32).eps)
    change_answer(monkeypatch, place, follow=pair.target)
    decoded = decode_one(pair)
    assert decoded.num_ties == 1
    assert decoded.answers[0][: place + 1] == (*greedy[:place], other)
    assert len(decoded.accepted[0]) == len(decoded.answers[0])

    follow = dataclasses.replace(pair.target, model=Worst(pair.target.model))
    monkeypatch.undo()
    monkeypatch.setattr(measure, "_TIE_UNITS", 1.01 * gap / torch.finfo(torch.float32).eps)
    change_answer(monkeypatch, place, follow=follow)
    with pytest.raises(EngineProblem, match=f"leaves the target's own at token {place + 1} "):
        decode_one(pair)


class Worst:
    """A target that says its last choice first."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, **named: Any) -> Any:
        output = self.model(**named)
        output.logits = -output.logits
        return output


class FixedLogits(torch.nn.Module):
    """Weights of ``dtype``, and float32 logits that are everywhere 10 for id 7 and ``gap`` less for id 8."""

    def __init__(self, dtype: torch.dtype, gap: float) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCAB_SIZE, 4, dtype=dtype)
        self.gap = gap

    def get_input_embeddings(self) -> torch.nn.Embedding:
        return self.embedding

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        logits = torch.zeros(*input_ids.shape, VOCAB_SIZE)
        logits[..., 7], logits[..., 8] = 10.0, 10.0 - self.gap
        return CausalLMOutputWithPast(logits=logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_tie_is_as_wide_as_the_weights_are_coarse_whatever_type_the_logits_have(
    pair: Pair, dtype: torch.dtype
) -> None:
    for units, is_tie in ((3, True), (5, False)):
        model = FixedLogits(dtype, 10.0 * units * torch.finfo(dtype).eps)
        target = dataclasses.replace(pair.target, model=model)
        with contextlib.nullcontext() if is_tie else pytest.raises(EngineProblem, match="at token 1 "):
            measure._check_ties(
                target, name="some", index=0, prompt_ids=(9, 9), greedy=(7, 7, 7), speculative=(7, 8, 7)
            )


def test_training_questions_end_where_the_first_trained_token_begins(tmp_path: Path) -> None:
    context = make_world(tmp_path, num_rows=6)
    dataset = Dataset(context.layout.dataset(DATASET))
    questions = training_questions(dataset, context.settings.evaluation)
    assert len(questions.prompts) == context.settings.evaluation.evaluation_rows == 4
    halves = {tuple(dataset.token_ids(row)[: len(dataset.token_ids(row)) // 2].tolist()) for row in range(6)}
    assert set(questions.prompts) <= halves


def test_a_row_that_the_template_refuses_is_skipped_and_named_and_only_an_empty_set_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = make_target(tmp_path / "target")
    template_path = target / "chat_template.jinja"
    refusal = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"
    template_path.write_text(refusal + template_path.read_text())
    template = ChatTemplate.load(make_settings(tmp_path / "root", target))
    plain = [{"role": "user", "content": "w5"}, {"role": "assistant", "content": "w6"}]
    system = [{"role": "system", "content": "w7"}, *plain]
    path = tmp_path / "new.jsonl"
    one = EvaluationSet(name="new", path=str(path))
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in (system, plain, "nothing")))
    with caplog.at_level(logging.INFO):
        questions = held_out_questions(one, template, 9)
    assert len(questions.prompts) == 1
    assert "set=new row=0 id=" in caplog.text
    assert "no system turn" in caplog.text
    assert "set=new line=3" in caplog.text
    assert "rows=1 skipped=2" in caplog.text
    path.write_text(json.dumps({"messages": system}) + "\n")
    with pytest.raises(InvalidInput, match=r"'new': .*1 rows were skipped"):
        held_out_questions(one, template, 9)


def test_the_stage_judges_every_set_records_a_missed_gate_and_is_not_repeated(tmp_path: Path) -> None:
    path = tmp_path / "held_out.jsonl"
    rows = [
        {"conversations": [{"from": "human", "value": f"w{n} w{n + 1}"}, {"from": "gpt", "value": "w3"}]}
        for n in (5, 6)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sets = [
        {"name": "held_out", "path": str(path), "min_accept_length": 3.9},
        {"name": "open", "path": str(path)},
    ]
    context = make_world(tmp_path, num_rows=6, evaluation_sets=sets, min_accept_length=0.5)
    settings, training = context.settings, "e" * 24
    weights, vocabulary = read_target_weights(settings), some_vocabulary()
    config = draft_config(settings, read_target_config(settings))
    draft = initialize_draft_model(config, weights, d2t=vocabulary.d2t_V, t2d=vocabulary.t2d_W, seed=0)
    context.layout.training(training).mkdir(parents=True)
    result = TrainingResult(
        num_steps=1, num_samples=6, num_trained_tokens=9, final_loss=1.0, acceptance=(0.1,), seconds=1.0,
        num_bytes=0, crc32=0,
    )  # fmt: skip
    write_trained(context.layout.training(training), draft.state_dict(), result)
    context.write_record(TrainingRecord(training=training, num_steps=1, final_loss=1.0))
    run_export_candidate(context)

    report = run_evaluate(context)
    record = context.read_record(EvaluationRecord)
    assert [(one.name, one.num_rows, one.passed) for one in record.results] == [
        ("training", 4, True), ("held_out", 2, False), ("open", 2, True),
    ]  # fmt: skip
    assert (record.passed, report["passed"], report["is_reused"]) == (False, False, False)
    for one in record.results:
        assert one.is_identical_to_greedy
        assert one.simulated_accept_length == one.looped_accept_length
        assert one.untrained_accept_length <= 1.1
    assert run_evaluate(context)["is_reused"]
    gone = dataclasses.replace(
        settings.evaluation, evaluation_sets=(EvaluationSet(name="held_out", path=str(tmp_path / "gone")),)
    )
    spec = dataclasses.replace(context.spec, settings=dataclasses.replace(settings, evaluation=gone))
    with pytest.raises(InvalidInput, match=r"'held_out': .*gone can't be read"):
        run_evaluate(dataclasses.replace(context, spec=spec))
