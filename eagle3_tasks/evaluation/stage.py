"""The stage ``evaluate``: accept length of the candidate, simulated and by real decoding."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from eagle3_tasks.contracts import codec
from eagle3_tasks.contracts.digests import digest_of
from eagle3_tasks.contracts.errors import InvalidInput
from eagle3_tasks.contracts.jobs import Progress
from eagle3_tasks.contracts.run_records import (
    EvaluationRecord,
    EvaluationResult,
    PlanRecord,
    TrainingRecord,
)
from eagle3_tasks.contracts.settings import Settings
from eagle3_tasks.data.dataset import Dataset
from eagle3_tasks.data.template import ChatTemplate
from eagle3_tasks.draft.export import load_export
from eagle3_tasks.draft.export_stage import CANDIDATE_FOLDER
from eagle3_tasks.draft.initialize import random_draft_model
from eagle3_tasks.draft.model import DraftModel
from eagle3_tasks.draft.target_weights import read_target_weights
from eagle3_tasks.engines.decoder import Decoder
from eagle3_tasks.engines.huggingface import DTYPES, HuggingFaceEngine, loader_of
from eagle3_tasks.engines.interface import Engine
from eagle3_tasks.evaluation.measure import (
    DecodedSet,
    accept_length,
    acceptance_by_step,
    check_agreement,
    decode_set,
)
from eagle3_tasks.evaluation.question_sets import QuestionSet, held_out_questions, training_questions
from eagle3_tasks.evaluation.simulated import simulate_rounds
from eagle3_tasks.evaluation.speculative import LoopTarget
from eagle3_tasks.host.files import make_private_folder, read_json, write_json
from eagle3_tasks.host.stage_context import StageContext

logger = logging.getLogger(__name__)

EVALUATION_VERSION = 2
EVALUATIONS_FOLDER = "evaluations"
_ANSWERS_AT_ONCE = 8
_NARROW_HIDDEN_SIZE = 512


def run_evaluate(context: StageContext) -> dict[str, Any]:
    """Measure the candidate on every set and record whether it may be published.

    A gate that fails is recorded, not raised: publishing refuses. What is raised says that
    the measurement itself can't be right.

    Raises:
        EngineProblem: speculative output is not the target's own, or simulated and real
            accept length are more than 2 % apart.
    """
    plan = context.read_record(PlanRecord)
    training = context.read_record(TrainingRecord)
    training_folder = context.layout.training(training.training)
    path = training_folder / EVALUATIONS_FOLDER / f"{_evaluation_digest(context.settings)}.json"
    record = read_json(EvaluationRecord, path)
    is_reused = record is not None
    if record is None:
        with _threads_for(plan.hidden_size):
            results = _evaluate(context, plan, training_folder / CANDIDATE_FOLDER)
        record = EvaluationRecord(
            training=training.training, results=tuple(results), passed=all(one.passed for one in results)
        )
        make_private_folder(path.parent)
        write_json(path, record)
    for one in record.results:
        _log_result(one)
    context.write_record(record)
    return {
        "training": training.training,
        "is_reused": is_reused,
        "passed": record.passed,
        "results": [codec.to_plain(one) for one in record.results],
    }


@contextlib.contextmanager
def _threads_for(hidden_size: int) -> Iterator[None]:
    """Keep a narrow target on one thread while the block runs.

    Decoding one token at a time, its products are too small to share: where other
    processes use the cores, the threads wait for each other many times longer than they compute.
    """
    before = torch.get_num_threads()
    if hidden_size <= _NARROW_HIDDEN_SIZE:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _evaluation_digest(settings: Settings) -> str:
    """Name an evaluation by its settings and its questions; the training's folder holds it."""
    contents: list[str] = []
    for one in settings.evaluation.evaluation_sets:
        try:
            contents.append(hashlib.sha256(Path(one.path).read_bytes()).hexdigest())
        except OSError as error:
            raise InvalidInput(
                f"evaluation set {one.name!r}: {one.path} can't be read ({error.strerror}). Correct its path."
            ) from error
    return digest_of([EVALUATION_VERSION, settings.evaluation, contents, settings.host.device])


def _evaluate(context: StageContext, plan: PlanRecord, candidate: Path) -> list[EvaluationResult]:
    settings = context.settings
    draft = load_export(candidate)
    template = ChatTemplate.load(settings)
    dataset = Dataset(context.layout.dataset(plan.dataset))
    sets = [
        training_questions(dataset, settings.evaluation),
        *(
            held_out_questions(one, template, settings.evaluation.evaluation_rows)
            for one in settings.evaluation.evaluation_sets
        ),
    ]
    progress = _RowProgress(context, total=2 * sum(len(one.prompts) for one in sets))
    decoded = _decode_all(settings, plan, draft, sets, end_ids=template.end_of_turn_ids, progress=progress)
    return _simulate_all(settings, draft, sets, decoded, progress)


class _RowProgress:
    """Counts questions, once decoded and once simulated."""

    def __init__(self, context: StageContext, total: int) -> None:
        self._context = context
        self._total = total
        self._begun = time.monotonic()
        self._done = 0

    def add(self, count: int) -> None:
        self._done += count
        seconds = time.monotonic() - self._begun
        rate = self._done / seconds if seconds > 0 else None
        self._context.report_progress(
            Progress(
                stage="evaluate",
                done=self._done,
                total=self._total,
                unit="questions",
                seconds=seconds,
                rate_per_second=rate,
                eta_seconds=(self._total - self._done) / rate if rate else None,
            )
        )


def _decode_all(
    settings: Settings,
    plan: PlanRecord,
    draft: DraftModel,
    sets: Sequence[QuestionSet],
    *,
    end_ids: Sequence[int],
    progress: _RowProgress,
) -> list[DecodedSet]:
    """Decode every set with a target of this function's own, gone from memory when it returns."""
    target = _load_loop_target(settings, plan)
    placed = draft.to(target.device)
    return [
        decode_set(
            target,
            placed,
            one,
            draft_steps=settings.evaluation.draft_steps,
            max_new_tokens=settings.evaluation.evaluation_max_tokens,
            end_ids=frozenset(end_ids),
            report=lambda _: progress.add(1),
        )
        for one in sets
    ]


def _simulate_all(
    settings: Settings,
    draft: DraftModel,
    sets: Sequence[QuestionSet],
    decoded: Sequence[DecodedSet],
    progress: _RowProgress,
) -> list[EvaluationResult]:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    engine = HuggingFaceEngine.load(settings)
    embedding_WD = read_target_weights(settings).embedding_WD
    # Where decoding left it: on the card, if there is one.
    weight = draft.fc.weight
    untrained = random_draft_model(draft.config, d2t=draft.d2t.cpu(), t2d=draft.t2d.cpu(), seed=0).to(
        weight.device, weight.dtype
    )
    steps = settings.evaluation.draft_steps
    results: list[EvaluationResult] = []
    for one, loop in zip(sets, decoded, strict=True):
        trained_rounds: list[tuple[int, ...]] = []
        untrained_rounds: list[tuple[int, ...]] = []
        for prompt, answer, aux_hidden_TAD in _captured(engine, one, loop, progress):
            for model, rounds in ((draft, trained_rounds), (untrained, untrained_rounds)):
                rounds.append(
                    simulate_rounds(
                        model,
                        embedding_WD=embedding_WD,
                        prompt_ids=prompt,
                        answer_ids=answer,
                        aux_hidden_TAD=aux_hidden_TAD,
                        draft_steps=steps,
                    )
                )
        check_agreement(one.name, sum(map(len, trained_rounds)), loop.num_rounds)
        looped = accept_length(loop.accepted, loop.answers)
        results.append(
            EvaluationResult(
                name=one.name,
                num_rows=len(one.prompts),
                num_rounds=loop.num_rounds,
                untrained_accept_length=accept_length(untrained_rounds, loop.answers),
                simulated_accept_length=accept_length(trained_rounds, loop.answers),
                looped_accept_length=looped,
                acceptance=acceptance_by_step(loop.accepted, steps),
                is_identical_to_greedy=loop.num_ties == 0,
                min_accept_length=one.min_accept_length,
                passed=one.min_accept_length is None or looped >= one.min_accept_length,
            )
        )
    return results


def _captured(
    engine: Engine, questions: QuestionSet, loop: DecodedSet, progress: _RowProgress
) -> list[tuple[tuple[int, ...], tuple[int, ...], Tensor]]:
    """Capture prompt and answer together, some at a time."""
    pairs = list(zip(questions.prompts, loop.answers, strict=True))
    found: list[tuple[tuple[int, ...], tuple[int, ...], Tensor]] = []
    for start in range(0, len(pairs), _ANSWERS_AT_ONCE):
        part = pairs[start : start + _ANSWERS_AT_ONCE]
        samples = engine.capture([[*prompt, *answer] for prompt, answer in part])
        found += [(*pair, sample.aux_hidden) for pair, sample in zip(part, samples, strict=True)]
        progress.add(len(part))
    return found


def _load_loop_target(settings: Settings, plan: PlanRecord) -> LoopTarget:
    """Load the target as transformers serves it, apart from the engine that captured."""
    target = settings.target
    arguments: dict[str, Any] = {
        "revision": target.target_revision or None,
        "trust_remote_code": target.trust_remote_code,
    }
    config: Any = AutoConfig.from_pretrained(target.target_model, **arguments)
    if settings.host.device == "cuda":
        arguments["device_map"] = "auto" if settings.host.extraction_gpus > 1 else {"": 0}
    model: Any = loader_of(config).from_pretrained(
        target.target_model, dtype=DTYPES[target.capture_dtype], use_safetensors=True, **arguments
    )
    model.eval()
    return LoopTarget(
        model=model,
        decoder=Decoder(model, num_layers=plan.num_layers),
        aux_layer_ids=plan.aux_layer_ids,
    )


def _log_result(one: EvaluationResult) -> None:
    demanded = "none" if one.min_accept_length is None else f"{one.min_accept_length:.2f}"
    logger.info(
        "accept length set=%s questions=%d rounds=%d untrained=%.3f simulated=%.3f looped=%.3f acceptance=%s "
        "identical=%s demanded=%s passed=%s",
        one.name, one.num_rows, one.num_rounds, one.untrained_accept_length, one.simulated_accept_length,
        one.looped_accept_length, "/".join(f"{share:.3f}" for share in one.acceptance),
        one.is_identical_to_greedy, demanded, one.passed,
    )  # fmt: skip
