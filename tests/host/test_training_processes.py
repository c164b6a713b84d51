"""Real torchrun processes: interruption, death, and numbers that stop being finite."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

from eagle3_tasks.contracts.errors import DamagedData, TrainingProblem
from eagle3_tasks.contracts.jobs import Progress
from eagle3_tasks.contracts.run_records import TrainingRecord
from eagle3_tasks.data.dataset import Dataset
from eagle3_tasks.draft.config import draft_config
from eagle3_tasks.draft.initialize import initialize_draft_model
from eagle3_tasks.draft.target_config import read_target_config
from eagle3_tasks.draft.target_weights import read_target_weights
from eagle3_tasks.draft.trained import PLOT_FILE, TRAINED_FOLDER, read_trained
from eagle3_tasks.host.files import read_json
from eagle3_tasks.host.stage_context import StageContext
from eagle3_tasks.storage.capture import Capture
from eagle3_tasks.storage.sample import CapturedSample
from eagle3_tasks.training import worker
from eagle3_tasks.training.checkpoint import committed_steps
from eagle3_tasks.training.collective import STATUS_FAILED, STATUS_OK, RankGroup, StepExchange
from eagle3_tasks.training.history import read_history
from eagle3_tasks.training.loop import Training, run_training
from eagle3_tasks.training.plan import make_training_plan
from eagle3_tasks.training.spec import CHECKPOINTS_FOLDER, SPEC_FILE, TrainingSpec
from eagle3_tasks.training.stage import run_train
from eagle3_tasks.training.teacher import make_teacher
from eagle3_tasks.vocab.stage import run_map_vocab
from tests.host.training_world import CAPTURE, DATASET, make_world

WAIT_SECONDS = 90


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> StageContext:
    """A world whose training ran without an interruption."""
    context = make_world(tmp_path_factory.mktemp("world"), epochs=70, checkpoint_minutes=0.002)
    run_map_vocab(context)
    seen: list[Progress] = []
    context = dataclasses.replace(context, report_progress=seen.append)
    report = run_train(context)
    assert not report["is_reused"]
    assert seen[-1].stage == "train"
    assert {"loss", "learning_rate", "acceptance_0", "acceptance_2"} <= set(seen[-1].values)
    return context


def training_folder(context: StageContext) -> Path:
    return context.layout.training(context.read_record(TrainingRecord).training)


def without_training(context: StageContext, folder: Path) -> StageContext:
    """Copy a world's ROOT, but nothing that its training made."""
    shutil.copytree(context.layout.root, folder, ignore=shutil.ignore_patterns("training", "training.json"))
    host = dataclasses.replace(context.settings.host, root=str(folder))
    spec = dataclasses.replace(context.spec, settings=dataclasses.replace(context.settings, host=host))
    return StageContext(spec=spec, generation=1, report_progress=lambda _: None)


def workers() -> list[psutil.Process]:
    """The workers of the training that this process started."""
    found = psutil.Process().children(recursive=True)
    return [one for one in found if "eagle3_tasks.training.worker" in " ".join(one.cmdline())]


def kill_a_rank_after_a_checkpoint(context: StageContext, rank: int, killed_at: list[float]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        time.sleep(0.01)
        trainings = context.layout.root.glob("training/*")
        if not any(committed_steps(folder / CHECKPOINTS_FOLDER) for folder in trainings):
            continue
        for process in workers():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("RANK") == str(rank):
                    killed_at.append(time.monotonic())
                    process.kill()
                    return


def test_a_finished_training_is_found_again_without_starting_a_process(
    trained: StageContext, monkeypatch
) -> None:
    monkeypatch.setattr(
        "eagle3_tasks.training.stage.start_processes", lambda *_, **__: pytest.fail("started")
    )
    before = read_history(training_folder(trained))
    report = run_train(trained)
    assert report["is_reused"]
    assert report["num_steps"] == before[-1].step


def test_the_loss_falls_and_the_history_has_no_gap(trained: StageContext) -> None:
    history = read_history(training_folder(trained))
    steps = [entry.step for entry in history]
    assert steps == sorted(set(steps))
    assert steps[-1] == run_train(trained)["num_steps"]
    assert history[-1].loss < 0.9 * history[0].loss
    assert (training_folder(trained) / PLOT_FILE).read_bytes().startswith(b"\x89PNG")


def one_rank_training(trained: StageContext, folder: Path) -> Training:
    """The training of ``trained`` as one process would do it, on the shares of both ranks."""
    settings = trained.settings
    dataset, capture = Dataset(trained.layout.dataset(DATASET)), Capture(trained.layout.capture(CAPTURE))
    capture.load_index()
    plan = make_training_plan(
        range(dataset.num_samples), dataset.lengths().tolist(), epochs=settings.training.epochs,
        batch_tokens=settings.training.batch_tokens, num_ranks=2, seed=settings.training.seed,
    )  # fmt: skip
    merged = tuple(((*first, *second),) for first, second in plan.steps)
    tensors, _ = read_trained(training_folder(trained))
    weights = read_target_weights(settings)
    config = draft_config(settings, read_target_config(settings))
    model = initialize_draft_model(config, weights, d2t=tensors["d2t"], t2d=tensors["t2d"], seed=0)
    teacher = make_teacher(weights, model, torch.device("cpu"))
    return Training(
        settings=settings.training, plan=dataclasses.replace(plan, steps=merged), plan_digest="",
        dataset=dataset, capture=capture, model=model, teacher=teacher,
        group=RankGroup(rank=0, size=1), device=torch.device("cpu"), folder=folder, report=lambda _: None,
    )  # fmt: skip


def test_two_processes_train_the_weights_that_one_trains_on_both_shares(
    trained: StageContext, tmp_path: Path
) -> None:
    training = one_rank_training(trained, tmp_path)
    run_training(training, resume_step=0)
    tensors, _ = read_trained(training_folder(trained))
    for name, parameter in training.model.named_parameters():
        # Sums in another order, carried through all the steps.
        torch.testing.assert_close(parameter.detach(), tensors[name], rtol=0.02, atol=2e-3, msg=name)


def test_a_rank_killed_with_kill_9_ends_the_job_and_the_retry_gives_bitwise_the_same_weights(
    trained: StageContext, tmp_path: Path
) -> None:
    context = without_training(trained, tmp_path / "root")
    killed_at: list[float] = []
    killer = threading.Thread(
        target=kill_a_rank_after_a_checkpoint, args=(context, 1, killed_at), daemon=True
    )
    killer.start()
    with pytest.raises(TrainingProblem, match=r"rank 1 ended without a word after step \d+"):
        run_train(context)
    assert time.monotonic() - killed_at[0] < 20
    assert not workers()
    (folder,) = context.layout.root.glob("training/*")
    assert (
        0
        < committed_steps(folder / CHECKPOINTS_FOLDER)[-1]
        < read_trained(training_folder(trained))[1].num_steps
    )

    report = run_train(context)
    expected, expected_result = read_trained(training_folder(trained))
    found, result = read_trained(training_folder(context))
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    assert (result.final_loss, result.acceptance) == (expected_result.final_loss, expected_result.acceptance)
    assert report["num_steps"] == expected_result.num_steps
    assert read_history(training_folder(context)) == read_history(training_folder(trained))


def spec_at_the_end(folder: Path) -> TrainingSpec:
    """The spec of an attempt that finds the last checkpoint whole."""
    spec = read_json(TrainingSpec, folder / SPEC_FILE)
    assert spec is not None
    return dataclasses.replace(spec, resume_step=committed_steps(folder / CHECKPOINTS_FOLDER)[-1])


@pytest.fixture
def any_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep a worker's choice for its whole process out of this one."""
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda **_: None)


@pytest.mark.usefixtures("any_algorithm")
def test_a_training_killed_between_its_last_checkpoint_and_its_result_is_finished_by_the_retry(
    trained: StageContext, tmp_path: Path
) -> None:
    folder = shutil.copytree(training_folder(trained), tmp_path / "training")
    shutil.rmtree(folder / TRAINED_FOLDER)
    worker.train(spec_at_the_end(folder), RankGroup(rank=0, size=1), torch.device("cpu"), folder)
    expected, expected_result = read_trained(training_folder(trained))
    found, result = read_trained(folder)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert dataclasses.replace(result, seconds=0.0) == dataclasses.replace(expected_result, seconds=0.0)
    assert read_history(folder) == read_history(training_folder(trained))


@pytest.mark.usefixtures("any_algorithm")
def test_a_capture_that_grew_while_processes_started_ends_the_attempt_not_the_agreement(
    trained: StageContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = training_folder(trained)
    monkeypatch.setattr(worker, "usable_rows", lambda dataset, _: list(range(dataset.num_samples - 1)))
    with pytest.raises(DamagedData, match=r"now holds 23 of the dataset's 24 samples .*Retry"):
        worker.train(spec_at_the_end(folder), RankGroup(rank=1, size=2), torch.device("cpu"), folder)


def test_numbers_that_are_not_finite_stop_the_training_and_name_rank_and_step(
    trained: StageContext, tmp_path: Path
) -> None:
    training = one_rank_training(trained, tmp_path)
    good = training.capture.read
    spoilt = training.dataset.sample(training.plan.steps[3][0][0])

    def read(sample: str) -> CapturedSample:
        captured = good(sample)
        if sample == spoilt:
            aux_hidden = captured.aux_hidden.clone()
            aux_hidden[0] = float("nan")
            captured = dataclasses.replace(captured, aux_hidden=aux_hidden)
        return captured

    training.capture.read = read
    first_step = 1 + next(
        step
        for step, ((*rows,),) in enumerate(training.plan.steps)
        if spoilt in map(training.dataset.sample, rows)
    )
    with pytest.raises(TrainingProblem, match=rf"rank 0 failed in step {first_step}: its loss is not finite"):
        run_training(training, resume_step=0)


def test_every_rank_learns_of_another_ranks_failure() -> None:
    class OtherRankFails(RankGroup):
        def sum(self, values: torch.Tensor) -> None:
            values[-2] += STATUS_FAILED

    parameter = torch.nn.Parameter(torch.ones(3))
    exchange = StepExchange([parameter], OtherRankFails(rank=0, size=2), num_figures=1)
    with pytest.raises(TrainingProblem, match="rank 1 failed in step 7: it raised an error"):
        exchange.exchange(7, torch.zeros(1), STATUS_OK, wants_checkpoint=False)


def test_processes_die_with_the_command_that_started_them() -> None:
    code = (
        "import subprocess, sys; from eagle3_tasks.training.processes import die_with_parent; "
        "child = subprocess.Popen(['sleep', '1000'], preexec_fn=die_with_parent); "
        "print(child.pid, flush=True); sys.stdin.read()"
    )
    command = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child = psutil.Process(int(command.stdout.readline()))
    command.kill()
    command.wait()
    gone, alive = psutil.wait_procs([child], timeout=10)
    assert gone
    assert not alive
    command.stdin.close()
    command.stdout.close()
