"""What every engine is: token ids in, hidden states out; prompts in, answers out.

Layers have one numbering here and in all settings and records: 0-based, and the OUTPUT
of that decoder layer is meant. An engine that counts otherwise converts in its own file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from eagle3_tasks.contracts.errors import InvalidSettings
from eagle3_tasks.storage.sample import CapturedSample


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetDescription:
    """The target's facts, read from its configuration without loading weights.

    ``text_config`` is the text model's part of ``config.json`` as it stands there, and
    ``max_positions`` 0 where it names none.
    """

    architecture: str
    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_positions: int
    text_config: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GeneratedAnswer:
    """What the target wrote. ``ids`` include the token that ended it when ``finish`` is ``stop``."""

    ids: tuple[int, ...]
    finish: Literal["stop", "length"]


class Engine(Protocol):
    """Runs the target model."""

    def describe(self) -> TargetDescription: ...

    def capture(self, batch: Sequence[Sequence[int]]) -> list[CapturedSample]:
        """Capture the hidden states of each sequence, in the order given.

        Raises:
            OutOfMemory: one sequence alone doesn't fit.
            EngineProblem: the engine failed.
        """
        ...

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        stop_ids: Sequence[int] = (),
        seed: int = 0,
    ) -> list[GeneratedAnswer]:
        """Answer each prompt, in the order given; greedy when ``temperature`` is 0.

        An answer ends at one of the target's own end ids or of ``stop_ids``.

        Raises:
            OutOfMemory: one prompt alone doesn't fit.
        """
        ...


def default_aux_layer_ids(num_layers: int) -> tuple[int, int, int]:
    """Choose the layers that EAGLE-3 and every engine take by default: 1, n//2 - 1, n - 4.

    Raises:
        InvalidSettings: the target is so shallow that these aren't three ascending layers.
    """
    layers = (1, num_layers // 2 - 1, num_layers - 4)
    if not layers[0] < layers[1] < layers[2]:
        raise InvalidSettings(
            f"the target has {num_layers} layers, too few for the default auxiliary layers 1, n//2 - 1, n - "
            f"4. Set aux_layer_ids to three of 0 to {num_layers - 1}."
        )
    return layers


def resolve_aux_layer_ids(chosen: Sequence[int] | None, num_layers: int) -> tuple[int, int, int]:
    """Give the three layers to capture: the chosen ones, or the default.

    Raises:
        InvalidSettings: a chosen layer does not exist.
    """
    if chosen is None:
        return default_aux_layer_ids(num_layers)
    if max(chosen) >= num_layers:
        raise InvalidSettings(
            f"aux_layer_ids names layer {max(chosen)}, but the target has {num_layers} layers, 0 to "
            f"{num_layers - 1}. Choose three of these, or leave the field empty."
        )
    first, second, third = chosen
    return first, second, third
