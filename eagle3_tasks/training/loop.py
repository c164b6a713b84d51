"""The training loop that every rank runs.

Each step: read this rank's samples, unroll, backward, one exchange, one AdamW update. All
ranks take the same number of steps and hold the same weights, moments and schedule.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from eagle3_tasks.contracts.errors import DamagedData, TrainingProblem
from eagle3_tasks.contracts.jobs import Progress
from eagle3_tasks.contracts.settings import TrainingSettings
from eagle3_tasks.data.dataset import Dataset
from eagle3_tasks.draft.model import DraftModel
from eagle3_tasks.storage.capture import Capture
from eagle3_tasks.training.batch import collate, read_sample, to_device
from eagle3_tasks.training.checkpoint import (
    CheckpointManifest,
    RankFile,
    commit_checkpoint,
    rank_file_name,
    read_checkpoint,
    share_tensors,
    write_rank_file,
)
from eagle3_tasks.training.collective import (
    STATUS_FAILED,
    STATUS_NOT_FINITE,
    STATUS_OK,
    RankGroup,
    StepExchange,
)
from eagle3_tasks.training.history import (
    Window,
    append_entry,
    cut_history,
    empty_window,
    steps_per_line,
    window_from_numbers,
)
from eagle3_tasks.training.loss import compute_sums
from eagle3_tasks.training.optimizer import (
    clip_gradients,
    learning_rate_at,
    make_optimizer,
    restore_tensors,
    state_tensors,
)
from eagle3_tasks.training.plan import TrainingPlan
from eagle3_tasks.training.spec import CHECKPOINTS_FOLDER, HistoryEntry
from eagle3_tasks.training.teacher import Teacher

logger = logging.getLogger(__name__)

_PROGRESS_SECONDS = 1.0
_LOG_SECONDS = 10.0


@dataclasses.dataclass(kw_only=True)
class Training:
    """What one rank holds while it trains.

    ``report`` takes rank 0's progress.
    """

    settings: TrainingSettings
    plan: TrainingPlan
    plan_digest: str
    dataset: Dataset
    capture: Capture
    model: DraftModel
    teacher: Teacher
    group: RankGroup
    device: torch.device
    folder: Path
    report: Callable[[Progress], None]
    clock: Callable[[], float] = time.monotonic


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingOutcome:
    """The last history line, and the seconds of all attempts."""

    last: HistoryEntry
    seconds: float


def run_training(training: Training, resume_step: int) -> TrainingOutcome:
    """Train from checkpoint ``resume_step`` (0: fresh) to the plan's end, and checkpoint there.

    Of a checkpoint at the end nothing is left to train: its result is given once more, since
    an attempt can die between that checkpoint and the result's file.

    Raises:
        TrainingProblem: some rank failed, or the gradient is not finite; on every rank.
        DamagedData: a checkpoint or sample can't be used.
    """
    settings, plan, group = training.settings, training.plan, training.group
    optimizer = make_optimizer(training.model, settings)
    window, last, seconds_before = _resume(training, optimizer, resume_step)
    exchange = StepExchange(list(training.model.parameters()), group, num_figures=2 + 2 * settings.ttt_steps)
    is_writer = group.rank == 0
    line_steps = steps_per_line(plan.num_steps)
    begun = saved = reported = logged = training.clock()
    for step in range(resume_step, plan.num_steps):
        learning_rate = learning_rate_at(step, plan.num_steps, settings)
        wants_checkpoint = is_writer and training.clock() - saved >= settings.checkpoint_minutes * 60
        this_step, is_due = _take_step(
            training,
            optimizer,
            exchange,
            step,
            learning_rate=learning_rate,
            wants_checkpoint=wants_checkpoint,
        )
        window = window.plus(this_step)
        done = step + 1
        if done % line_steps == 0 or done == plan.num_steps:
            last = window.entry(done, learning_rate)
            window = empty_window(settings.ttt_steps)
            if is_writer:
                append_entry(training.folder, last)
        now = training.clock()
        if is_writer and (now - reported >= _PROGRESS_SECONDS or done == plan.num_steps):
            reported = now
            shown = last or window.entry(done, learning_rate)
            progress = _progress(shown, done, plan.num_steps, done - resume_step, now - begun)
            training.report(progress)
            if now - logged >= _LOG_SECONDS or done == plan.num_steps:
                logged = now
                _log(progress)
        if is_due or done == plan.num_steps:
            _save(training, optimizer, done, window=window, last=last, seconds=seconds_before + now - begun)
            saved = training.clock()
    if last is None:
        raise DamagedData(
            f"checkpoint of step {resume_step} of {plan.num_steps} holds no result. Remove it, then retry."
        )
    return TrainingOutcome(last=last, seconds=seconds_before + training.clock() - begun)


def _take_step(
    training: Training,
    optimizer: torch.optim.AdamW,
    exchange: StepExchange,
    step: int,
    *,
    learning_rate: float,
    wants_checkpoint: bool,
) -> tuple[Window, bool]:
    """Do one update; give its figures, and whether a checkpoint is due."""
    group, ttt_steps = training.group, training.settings.ttt_steps
    exchange.clear()
    figures = torch.zeros(exchange.num_figures, device=training.device)
    status, failure = STATUS_OK, None
    try:
        rows = training.plan.steps[step][group.rank]
        if rows:
            figures = _backward(training, rows)
            status = STATUS_OK if math.isfinite(float(figures[0])) else STATUS_NOT_FINITE
    except Exception as error:  # noqa: BLE001 - told to all ranks below, then raised again
        status, failure = STATUS_FAILED, error
    try:
        summed, is_due = exchange.exchange(step + 1, figures, status, wants_checkpoint=wants_checkpoint)
    except TrainingProblem:
        if failure is not None:
            raise failure from None
        raise
    loss_sum, num_valid = summed[0].item(), max(summed[1].item(), 1.0)
    # Every rank divides by the same count of all ranks: the number of processes and the
    # padding change nothing.
    exchange.gradients.div_(num_valid)
    norm = clip_gradients(exchange.gradients, training.settings.clip_norm)
    if not math.isfinite(norm):
        raise TrainingProblem(
            f"the gradient's norm is {norm} in step {step + 1}, summed over {group.size} ranks. "
            "Lower learning_rate, or look at the samples of this step."
        )
    for parameters in optimizer.param_groups:
        parameters["lr"] = learning_rate
    optimizer.step()
    window = Window(
        num_steps=1.0,
        loss=loss_sum / num_valid,
        gradient_norm=norm,
        correct=tuple(summed[2 : 2 + ttt_steps].tolist()),
        trained=tuple(summed[2 + ttt_steps :].tolist()),
    )
    return window, is_due


def _backward(training: Training, rows: tuple[int, ...]) -> Tensor:
    """Add this rank's gradients; give its sums: loss, valid positions, correct, trained."""
    samples = [read_sample(training.dataset, training.capture, row) for row in rows]
    batch = to_device(collate(samples), training.device)
    mixed = (
        torch.autocast("cuda", dtype=torch.bfloat16)
        if training.device.type == "cuda"
        else contextlib.nullcontext()
    )
    with mixed:
        sums = compute_sums(training.model, training.teacher, batch, training.settings.ttt_steps)
    sums.loss.backward()
    return torch.cat(
        (sums.loss.detach()[None], sums.num_valid[None], sums.num_correct_K, sums.num_trained_K)
    ).to(torch.float32)


def _resume(
    training: Training, optimizer: torch.optim.AdamW, resume_step: int
) -> tuple[Window, HistoryEntry | None, float]:
    """Give the open window, the newest full line and the seconds so far; the state is restored in place."""
    if training.group.rank == 0:
        cut_history(training.folder, resume_step)
    if resume_step == 0:
        return empty_window(training.settings.ttt_steps), None, 0.0
    manifest, tensors = read_checkpoint(training.folder / CHECKPOINTS_FOLDER, resume_step)
    try:
        restore_tensors(training.model, optimizer, tensors, resume_step)
        torch.set_rng_state(tensors[f"rng.{training.group.rank}"])
    except KeyError as error:
        raise DamagedData(f"checkpoint of step {resume_step}: tensor {error} is missing.") from error
    logger.info(
        "training resumed rank=%d step=%d of=%d", training.group.rank, resume_step, training.plan.num_steps
    )
    return window_from_numbers(manifest.window), manifest.last, manifest.seconds


def _save(
    training: Training,
    optimizer: torch.optim.AdamW,
    step: int,
    *,
    window: Window,
    last: HistoryEntry | None,
    seconds: float,
) -> None:
    """Write this rank's share; when all have, rank 0 makes the checkpoint valid."""
    begun = training.clock()
    group = training.group
    tensors = state_tensors(training.model, optimizer)
    share = {name: tensors[name] for name in share_tensors(tensors, group.size)[group.rank]}
    share[f"rng.{group.rank}"] = torch.get_rng_state()
    checkpoints = training.folder / CHECKPOINTS_FOLDER
    own = write_rank_file(checkpoints, step, group.rank, share)
    files = group.gather(own, training.device)
    if group.rank == 0:
        manifest = CheckpointManifest(
            step=step,
            plan_digest=training.plan_digest,
            files=tuple(
                RankFile(name=rank_file_name(rank), num_bytes=num_bytes, crc32=crc32)
                for rank, (num_bytes, crc32) in enumerate(files)
            ),
            window=window.numbers(),
            last=last,
            seconds=seconds,
        )
        commit_checkpoint(checkpoints, manifest)
        logger.info(
            "checkpoint committed step=%d bytes=%d seconds=%.2f",
            step, sum(file.num_bytes for file in manifest.files), training.clock() - begun,
        )  # fmt: skip


def _progress(entry: HistoryEntry, done: int, total: int, steps_here: int, seconds: float) -> Progress:
    rate = steps_here / seconds if seconds > 0 else None
    acceptance = {f"acceptance_{step}": round(share, 4) for step, share in enumerate(entry.acceptance)}
    return Progress(
        stage="train",
        done=done,
        total=total,
        unit="steps",
        seconds=seconds,
        rate_per_second=rate,
        eta_seconds=(total - done) / rate if rate else None,
        values={"loss": round(entry.loss, 5), "learning_rate": entry.learning_rate, **acceptance},
    )


def _log(progress: Progress) -> None:
    values = " ".join(f"{name}={value:.4g}" for name, value in progress.values.items())
    logger.info(
        "training step=%d of=%d %s steps_per_second=%.2f eta_seconds=%.0f",
        progress.done, progress.total, values, progress.rate_per_second or 0.0, progress.eta_seconds or 0.0,
    )  # fmt: skip
