"""The course of a training as a picture: loss, and acceptance at each step of the unrolling."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from eagle3_tasks.host.files import write_atomically
from eagle3_tasks.training.spec import HistoryEntry


def plot_history(path: Path, entries: Sequence[HistoryEntry]) -> None:
    """Draw ``entries`` into the PNG ``path``, atomically."""
    from matplotlib.figure import Figure

    steps = [entry.step for entry in entries]
    figure = Figure(figsize=(10, 4), layout="constrained")
    loss_axes, acceptance_axes = figure.subplots(1, 2)
    loss_axes.plot(steps, [entry.loss for entry in entries], color="tab:blue")
    loss_axes.set(title="loss", xlabel="step", yscale="log")
    for index, shares in enumerate(zip(*(entry.acceptance for entry in entries), strict=True)):
        acceptance_axes.plot(steps, shares, label=f"TTT step {index}")
    acceptance_axes.set(title="acceptance in training", xlabel="step", ylim=(0, 1))
    acceptance_axes.legend(loc="lower right")
    for axes in (loss_axes, acceptance_axes):
        axes.grid(alpha=0.3)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=100)
    write_atomically(path, picture.getvalue())
