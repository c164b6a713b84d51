"""One process of the training: ``python -m eagle3_tasks.training.worker SPEC_FILE``, under torchrun."""

from __future__ import annotations

import logging
import os
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from eagle3_tasks.contracts import codec
from eagle3_tasks.contracts.digests import digest_of
from eagle3_tasks.contracts.errors import (
    DamagedData,
    InvalidInput,
    OutOfMemory,
    PipelineError,
    TrainingProblem,
)
from eagle3_tasks.contracts.jobs import Progress
from eagle3_tasks.contracts.paths import RootLayout
from eagle3_tasks.data.dataset import Dataset
from eagle3_tasks.draft.config import draft_config
from eagle3_tasks.draft.initialize import initialize_draft_model
from eagle3_tasks.draft.target_config import read_target_config
from eagle3_tasks.draft.target_weights import read_target_weights
from eagle3_tasks.draft.trained import TrainingResult, write_trained
from eagle3_tasks.host.files import make_private_folder, read_json, write_json
from eagle3_tasks.storage.capture import Capture
from eagle3_tasks.training.collective import RankGroup
from eagle3_tasks.training.loop import Training, run_training
from eagle3_tasks.training.plan import TrainingPlan, make_training_plan
from eagle3_tasks.training.processes import call_on_termination, die_with_parent
from eagle3_tasks.training.spec import ERRORS_FOLDER, PROGRESS_FILE, TrainingSpec
from eagle3_tasks.training.teacher import make_teacher
from eagle3_tasks.vocab.mapping import read_vocabulary

logger = logging.getLogger(__name__)

_START_TIMEOUT = timedelta(minutes=30)


def main() -> int:
    """Train as one rank; an error is left in the training's folder for the stage to report."""
    os.umask(0o077)
    die_with_parent()
    spec_path = Path(sys.argv[1])
    rank = int(os.environ["RANK"])
    logging.basicConfig(
        stream=sys.stdout, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", force=True
    )
    call_on_termination(
        lambda: _leave_error(
            spec_path.parent, rank, TrainingProblem(f"rank {rank} was stopped, since another one ended.")
        )
    )
    try:
        spec = read_json(TrainingSpec, spec_path)
        if spec is None:
            raise InvalidInput(f"{spec_path} is missing. Start the training with the verb train.")
        device = _join(spec.settings.host.device)
        group = RankGroup(rank=rank, size=dist.get_world_size())
        train(spec, group, device, spec_path.parent)
    except Exception as error:
        known = translate(error, rank)
        logger.error("rank failed rank=%d error=%s", rank, known, exc_info=error)
        _leave_error(spec_path.parent, rank, known)
        # Not through the interpreter's end: waiting for the process group would hang here.
        sys.stdout.flush()
        os._exit(known.exit_code)
    dist.destroy_process_group()
    return 0


def train(spec: TrainingSpec, group: RankGroup, device: torch.device, folder: Path) -> None:
    """Load what ``spec`` names, train, and leave the result; on one of ``group``'s ranks.

    Raises:
        DamagedData: the capture has changed since the training was started.
    """
    torch.use_deterministic_algorithms(mode=True)
    layout = RootLayout(Path(spec.settings.host.root))
    dataset = Dataset(layout.dataset(spec.dataset))
    capture = Capture(layout.capture(spec.capture))
    capture.load_index()
    plan = plan_of(spec, dataset, capture)
    rows = usable_rows(dataset, capture)
    plan_digest = digest_of(plan.steps)
    if plan_digest != spec.plan_digest:
        # Another extraction may commit to the same capture while processes start: ranks that
        # see different samples would take different steps and wait for each other.
        raise DamagedData(
            f"rank {group.rank}: capture {spec.capture} now holds {len(rows)} of the dataset's "
            f"{dataset.num_samples} samples and gives plan {plan_digest}, not {spec.plan_digest} as when the "
            "training was started: it has changed since. Retry."
        )
    vocabulary = read_vocabulary(layout.vocabulary(spec.vocabulary))
    weights = read_target_weights(spec.settings)
    model = initialize_draft_model(
        draft_config(spec.settings, read_target_config(spec.settings)),
        weights,
        d2t=vocabulary.d2t_V,
        t2d=vocabulary.t2d_W,
        seed=spec.settings.training.seed,
    ).to(device)
    torch.manual_seed(spec.settings.training.seed + group.rank)
    training = Training(
        settings=spec.settings.training,
        plan=plan,
        plan_digest=spec.plan_digest,
        dataset=dataset,
        capture=capture,
        model=model,
        teacher=make_teacher(weights, model, device),
        group=group,
        device=device,
        folder=folder,
        report=lambda progress: _write_progress(folder / PROGRESS_FILE, progress),
    )
    if group.rank == 0:
        logger.info(
            "training begins ranks=%d samples=%d steps=%d parameters=%d threads=%d device=%s",
            group.size, len(rows), plan.num_steps, sum(one.numel() for one in model.parameters()),
            torch.get_num_threads(), device,
        )  # fmt: skip
    outcome = run_training(training, spec.resume_step)
    if group.rank == 0:
        write_trained(
            folder,
            model.state_dict(),
            TrainingResult(
                num_steps=plan.num_steps,
                num_samples=len(rows),
                num_trained_tokens=sum(int(dataset.loss_mask(row).sum()) for row in rows),
                final_loss=outcome.last.loss,
                acceptance=outcome.last.acceptance,
                seconds=outcome.seconds,
                num_bytes=0,
                crc32=0,
            ),
        )


def usable_rows(dataset: Dataset, capture: Capture) -> list[int]:
    """List the dataset's rows whose hidden states are committed: all but the quarantined."""
    return [row for row in range(dataset.num_samples) if capture.has(dataset.sample(row))]


def plan_of(spec: TrainingSpec, dataset: Dataset, capture: Capture) -> TrainingPlan:
    """Make the training's plan: equal on every rank and in every attempt.

    Raises:
        InvalidInput: no sample of the dataset is in the capture.
    """
    rows = usable_rows(dataset, capture)
    if not rows:
        raise InvalidInput(
            f"none of the {dataset.num_samples} samples of dataset {spec.dataset} is in capture "
            f"{spec.capture}. Run extract first."
        )
    settings = spec.settings.training
    return make_training_plan(
        rows,
        np.asarray(dataset.lengths())[rows].tolist(),
        epochs=settings.epochs,
        batch_tokens=settings.batch_tokens,
        num_ranks=spec.num_ranks,
        seed=settings.seed,
    )


def translate(error: Exception, rank: int) -> PipelineError:
    """Give a foreign error its place in the tree, with the rank."""
    if isinstance(error, PipelineError):
        return error
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return OutOfMemory(f"rank {rank}: {error}. Lower batch_tokens or ttt_steps.")
    return TrainingProblem(
        f"rank {rank}: {type(error).__name__}: {error}. Training continues from the last checkpoint."
    )


def _leave_error(folder: Path, rank: int, error: PipelineError) -> None:
    write_json(make_private_folder(folder / ERRORS_FOLDER) / f"rank-{rank}.json", error.record())


def _join(kind: str) -> torch.device:
    """Join the process group; give this rank's device."""
    if kind == "cpu":
        dist.init_process_group("gloo", timeout=_START_TIMEOUT)
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=_START_TIMEOUT, device_id=device)
    return device


def _write_progress(path: Path, progress: Progress) -> None:
    # Renamed, so that no reader sees a part; not synced: it is worth nothing after a crash.
    temporary = path.with_suffix(".tmp")
    temporary.write_text(codec.dumps(progress), encoding="utf-8")
    temporary.replace(path)


if __name__ == "__main__":
    sys.exit(main())
