"""The course of a training: sums over a window of steps, and the lines made of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eagle3_tasks.contracts import codec
from eagle3_tasks.host.files import append_line, read_lines, write_atomically
from eagle3_tasks.training.spec import HISTORY_FILE, HistoryEntry

_NUM_LINES = 100


def steps_per_line(num_steps: int) -> int:
    """Choose how many steps a line sums up: about a hundred lines, whatever the length."""
    return max(1, num_steps // _NUM_LINES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window:
    """Sums since the last line; plain numbers, so a checkpoint can hold them exactly."""

    num_steps: float
    loss: float
    gradient_norm: float
    correct: tuple[float, ...]
    trained: tuple[float, ...]

    def plus(self, other: Window) -> Window:
        return Window(
            num_steps=self.num_steps + other.num_steps,
            loss=self.loss + other.loss,
            gradient_norm=self.gradient_norm + other.gradient_norm,
            correct=tuple(a + b for a, b in zip(self.correct, other.correct, strict=True)),
            trained=tuple(a + b for a, b in zip(self.trained, other.trained, strict=True)),
        )

    def entry(self, step: int, learning_rate: float) -> HistoryEntry:
        return HistoryEntry(
            step=step,
            loss=self.loss / self.num_steps,
            acceptance=tuple(c / max(t, 1.0) for c, t in zip(self.correct, self.trained, strict=True)),
            learning_rate=learning_rate,
            gradient_norm=self.gradient_norm / self.num_steps,
            trained_tokens=int(self.trained[0]),
        )

    def numbers(self) -> tuple[float, ...]:
        return (self.num_steps, self.loss, self.gradient_norm, *self.correct, *self.trained)


def empty_window(ttt_steps: int) -> Window:
    zeros = (0.0,) * ttt_steps
    return Window(num_steps=0.0, loss=0.0, gradient_norm=0.0, correct=zeros, trained=zeros)


def window_from_numbers(numbers: tuple[float, ...]) -> Window:
    ttt_steps = (len(numbers) - 3) // 2
    return Window(
        num_steps=numbers[0],
        loss=numbers[1],
        gradient_norm=numbers[2],
        correct=numbers[3 : 3 + ttt_steps],
        trained=numbers[3 + ttt_steps :],
    )


def append_entry(training_folder: Path, entry: HistoryEntry) -> None:
    append_line(training_folder / HISTORY_FILE, entry)


def read_history(training_folder: Path) -> list[HistoryEntry]:
    """Read all whole lines."""
    path = training_folder / HISTORY_FILE
    if not path.exists():
        return []
    return [codec.from_plain(HistoryEntry, line, where=str(path)) for _, line in read_lines(path)]


def cut_history(training_folder: Path, step: int) -> None:
    """Drop the lines after ``step``: a resumed training writes them again."""
    kept = [entry for entry in read_history(training_folder) if entry.step <= step]
    content = "".join(codec.dumps(entry) + "\n" for entry in kept)
    write_atomically(training_folder / HISTORY_FILE, content.encode())
