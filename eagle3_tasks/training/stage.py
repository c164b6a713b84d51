"""The stage ``train``: start or continue the training, pass its progress on, record the result."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from eagle3_tasks.contracts import codec
from eagle3_tasks.contracts.digests import digest_of
from eagle3_tasks.contracts.errors import (
    ErrorRecord,
    GpuProblem,
    PipelineError,
    RequestRefused,
    TrainingProblem,
    error_from_record,
)
from eagle3_tasks.contracts.jobs import Progress
from eagle3_tasks.contracts.run_records import PlanRecord, TrainingRecord, VocabularyRecord
from eagle3_tasks.data.dataset import Dataset
from eagle3_tasks.draft.trained import PLOT_FILE, TrainingResult, read_result
from eagle3_tasks.host.files import file_lock, make_private_folder, read_json, write_json
from eagle3_tasks.host.stage_context import StageContext
from eagle3_tasks.storage.capture import Capture
from eagle3_tasks.training.checkpoint import newest_whole_checkpoint
from eagle3_tasks.training.history import read_history
from eagle3_tasks.training.plot import plot_history
from eagle3_tasks.training.processes import start_processes
from eagle3_tasks.training.spec import (
    CHECKPOINTS_FOLDER,
    ERRORS_FOLDER,
    PROGRESS_FILE,
    SPEC_FILE,
    TRAINING_VERSION,
    TrainingSpec,
)
from eagle3_tasks.training.worker import plan_of, usable_rows

logger = logging.getLogger(__name__)

LOCK_FILE = "lock"
_POLL_SECONDS = 0.5
_TERMINATE_SECONDS = 10.0


def run_train(context: StageContext) -> dict[str, Any]:
    """Train the draft model in ``ROOT/training/DIGEST/``, or find that it is trained.

    A killed training continues at its newest whole checkpoint and ends with the weights
    that it would have had without the interruption.

    Raises:
        TrainingProblem: a rank failed or died; the message names it and the step.
    """
    settings = context.settings
    plan_record = context.read_record(PlanRecord)
    vocabulary = context.read_record(VocabularyRecord)
    dataset = Dataset(context.layout.dataset(plan_record.dataset))
    capture = Capture(context.layout.capture(plan_record.capture))
    capture.load_index()
    digest = training_digest(context, plan_record, vocabulary, dataset, capture)
    folder = make_private_folder(context.layout.training(digest))
    _tell_if_busy(folder / LOCK_FILE, digest)
    with file_lock(folder / LOCK_FILE) as lock:
        if lock is not None:
            # torchrun holds it too: a second training of the same name waits for both.
            os.set_inheritable(lock, True)
        result = read_result(folder)
        is_reused = result is not None
        if result is None:
            spec = TrainingSpec(
                training=digest,
                dataset=plan_record.dataset,
                capture=plan_record.capture,
                vocabulary=vocabulary.vocabulary,
                num_ranks=settings.host.training_processes,
                resume_step=0,
                plan_digest="",
                settings=settings,
            )
            result = _train(context, spec, dataset, capture, folder)
        if not (folder / PLOT_FILE).exists():
            plot_history(folder / PLOT_FILE, read_history(folder))
    logger.info(
        "training ready digest=%s steps=%d loss=%.4f acceptance=%s seconds=%.1f reused=%s",
        digest, result.num_steps, result.final_loss,
        "/".join(f"{share:.3f}" for share in result.acceptance), result.seconds, is_reused,
    )  # fmt: skip
    context.write_record(
        TrainingRecord(training=digest, num_steps=result.num_steps, final_loss=result.final_loss)
    )
    return {
        "training": digest,
        "is_reused": is_reused,
        "num_steps": result.num_steps,
        "num_samples": result.num_samples,
        "final_loss": result.final_loss,
        "acceptance": list(result.acceptance),
        "seconds": result.seconds,
    }


def training_digest(
    context: StageContext,
    plan: PlanRecord,
    vocabulary: VocabularyRecord,
    dataset: Dataset,
    capture: Capture,
) -> str:
    """Name a training by all that determines its weights.

    The samples are part of it: when one that was quarantined has been captured since, it
    is another training, not the continuation of the old one.
    """
    names = hashlib.sha256()
    for row in usable_rows(dataset, capture):
        names.update(dataset.sample(row).encode())
    settings = codec.to_plain(context.settings)
    # How often a checkpoint is written changes no weight.
    del settings["training"]["checkpoint_minutes"]
    return digest_of(
        [
            TRAINING_VERSION, plan.dataset, plan.capture, vocabulary.vocabulary, names.hexdigest(),
            settings["draft"], settings["training"], settings["host"]["training_processes"],
            settings["host"]["device"],
        ]
    )  # fmt: skip


def _tell_if_busy(lock_path: Path, digest: str) -> None:
    with file_lock(lock_path, is_blocking=False) as lock:
        if lock is None:
            logger.info("another job trains this already, waiting for it training=%s", digest)


def _train(
    context: StageContext, spec: TrainingSpec, dataset: Dataset, capture: Capture, folder: Path
) -> TrainingResult:
    plan_digest = digest_of(plan_of(spec, dataset, capture).steps)
    resume_step = newest_whole_checkpoint(folder / CHECKPOINTS_FOLDER, plan_digest)
    spec = dataclasses.replace(spec, resume_step=resume_step, plan_digest=plan_digest)
    shutil.rmtree(folder / ERRORS_FOLDER, ignore_errors=True)
    (folder / PROGRESS_FILE).unlink(missing_ok=True)
    write_json(folder / SPEC_FILE, spec)
    _check_cards(spec)
    logger.info(
        "training starts digest=%s ranks=%d resume_step=%d dataset=%s capture=%s",
        spec.training, spec.num_ranks, resume_step, spec.dataset, spec.capture,
    )  # fmt: skip
    process = start_processes(
        folder / SPEC_FILE, num_ranks=spec.num_ranks, uses_cpu=spec.settings.host.device == "cpu"
    )
    try:
        exit_code = _watch(context, process, folder / PROGRESS_FILE)
    finally:
        _stop(process)
    result = read_result(folder)
    if exit_code != 0 or result is None:
        raise _failure(folder, spec, exit_code)
    return result


def _watch(context: StageContext, process: subprocess.Popen[bytes], progress_path: Path) -> int:
    """Pass rank 0's progress on until torchrun ends; give its exit code."""
    while True:
        try:
            return process.wait(timeout=_POLL_SECONDS)
        except subprocess.TimeoutExpired:
            progress = read_json(Progress, progress_path)
            if progress is not None:
                context.report_progress(progress)


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=_TERMINATE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _failure(folder: Path, spec: TrainingSpec, exit_code: int) -> PipelineError:
    """Choose the error that explains the others: ranks that only heard of it come last."""
    records: dict[int, ErrorRecord] = {}
    for rank in range(spec.num_ranks):
        try:
            record = read_json(ErrorRecord, folder / ERRORS_FOLDER / f"rank-{rank}.json")
        except RequestRefused:
            continue
        if record is not None:
            records[rank] = record
    for record in records.values():
        if record.code != "TRAINING_PROBLEM":
            return error_from_record(record)
    silent = [rank for rank in range(spec.num_ranks) if rank not in records]
    step = _last_step(folder)
    if not silent:
        return error_from_record(records[min(records)])
    heard = " ".join(record.message for record in records.values())
    return TrainingProblem(
        f"rank {', '.join(map(str, silent))} ended without a word after step {step} (torchrun's exit code "
        f"{exit_code}): killed, or out of memory. {heard} Retry: training continues from its last checkpoint."
    )


def _last_step(folder: Path) -> int:
    progress = read_json(Progress, folder / PROGRESS_FILE)
    return 0 if progress is None else progress.done


def _check_cards(spec: TrainingSpec) -> None:
    if spec.settings.host.device == "cpu":
        return
    import torch

    # Counting makes no context on any card.
    num_cards = torch.cuda.device_count()
    if num_cards < spec.num_ranks:
        raise GpuProblem(
            f"{num_cards} cards are visible, {spec.num_ranks} training processes need one each. "
            "Lower training_processes or free cards."
        )
