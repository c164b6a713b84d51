"""The exported folder's README.md: how the draft model was made, and how good it is."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from eagle3_tasks.contracts.run_records import EvaluationRecord, PlanRecord
from eagle3_tasks.contracts.settings import Settings
from eagle3_tasks.draft.trained import PLOT_FILE, TrainingResult


def model_card(
    settings: Settings, plan: PlanRecord, result: TrainingResult, evaluation: EvaluationRecord | None
) -> str:
    """Write the card; accept lengths are there once ``evaluation`` is known."""
    target = settings.target
    # A folder's name says which model it is; the rest of its path says only where it lay.
    name = PurePath(target.target_model).name if target.target_model.startswith("/") else target.target_model
    revision = f" at revision {target.target_revision}" if target.target_revision else ""
    training = settings.training
    answers = (
        "written anew by the target" if settings.data.answers == "regenerate" else "those of the dataset"
    )
    rows = [
        (
            "Samples, tokens",
            f"{result.num_samples:,} of {plan.num_samples:,} samples, {plan.num_tokens:,} tokens",
        ),
        ("Answers", answers),
        ("Auxiliary layers (0-based, outputs)", ", ".join(map(str, plan.aux_layer_ids))),
        ("Hidden states", plan.capture_dtype),
        ("Draft vocabulary", f"{settings.draft.draft_vocab_size:,} of {plan.target_vocab_size:,}"),
        ("Steps, epochs", f"{result.num_steps:,} steps in {training.epochs} epochs"),
        ("Processes, tokens a process", f"{settings.host.training_processes}, {training.batch_tokens:,}"),
        ("Learning rate", f"{training.learning_rate:g}, cosine, {training.warmup_percent:g} % warm-up"),
        ("Training-time test", f"{training.ttt_steps} steps"),
        ("Final loss", f"{result.final_loss:.4f}"),
        ("Acceptance in training, by step", " / ".join(f"{share:.3f}" for share in result.acceptance)),
        ("Training seconds", f"{result.seconds:,.0f}"),
    ]
    lines = [
        "---", "library_name: transformers", "tags: [eagle3, speculative-decoding]", "---", "",
        f"# EAGLE-3 draft model for {name}", "",
        f"Proposes tokens for {name}{revision}, which accepts or rejects them: its output stays its own.",
        "It holds no embedding; engines take the target's.", "",
        "| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows), "",
        f"![Loss and acceptance in training]({PLOT_FILE})", "",
    ]  # fmt: skip
    return "\n".join([*lines, *_accept_lengths(settings, evaluation), ""])


def _accept_lengths(settings: Settings, evaluation: EvaluationRecord | None) -> list[str]:
    if evaluation is None:
        return ["Not evaluated yet."]
    lines = [
        f"Accept length with {settings.evaluation.draft_steps} draft steps in a chain, greedy.",
        "The set `training` holds questions that it was trained on; the others were held out.", "",
        "| questions | untrained | simulated | looped | demanded |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for one in evaluation.results:
        demanded: Any = "-" if one.min_accept_length is None else f"{one.min_accept_length:.2f}"
        lines.append(
            f"| {one.name} ({one.num_rows}) | {one.untrained_accept_length:.2f} "
            f"| {one.simulated_accept_length:.2f} | {one.looped_accept_length:.2f} | {demanded} |"
        )
    return lines
