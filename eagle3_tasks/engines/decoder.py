"""Finding the decoder inside a model of transformers and catching its states.

Shapes: B sequences, T tokens, A auxiliary states (3), D hidden size of the target.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn

from eagle3_tasks.contracts.errors import InvalidInput


class Decoder:
    """The text decoder of a causal language model, wrapped or not, and its output layer.

    Attributes:
        module: the module whose forward pass gives the state after the final norm.
        layers: its decoder layers.
        head: the output layer.

    Raises:
        InvalidInput: the model is built in a way that this engine can't take apart.
    """

    def __init__(self, model: nn.Module, *, num_layers: int) -> None:
        self.module, self.layers = _find_layers(model, num_layers)
        head: nn.Module | None = cast("Any", model).get_output_embeddings()
        if head is None:
            raise InvalidInput(
                f"{type(model).__name__} has no output layer, so it is no causal language model. Choose "
                "another target."
            )
        self.head = head

    def forward(
        self, input_ids_BT: torch.Tensor, mask_BT: torch.Tensor, layer_ids: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the decoder without the output layer.

        Returns:
            the outputs of ``layer_ids`` [B, T, A, D], and the state after the final norm [B, T, D].
        """
        with self.caught_outputs(layer_ids) as caught:
            output = self.module(input_ids=input_ids_BT, attention_mask=mask_BT, use_cache=False)
        last_BTD = cast("torch.Tensor", output[0])
        aux_BTAD = torch.stack([caught[layer].to(last_BTD.device) for layer in layer_ids], dim=2)
        return aux_BTAD, last_BTD

    @contextlib.contextmanager
    def caught_last(self) -> Iterator[list[torch.Tensor]]:
        """Collect the states after the final norm [B, T, D], one of each pass, while the block runs."""
        caught: list[torch.Tensor] = []
        handle = self.module.register_forward_hook(lambda _module, _inputs, output: caught.append(output[0]))
        try:
            yield caught
        finally:
            handle.remove()

    @contextlib.contextmanager
    def caught_outputs(self, layer_ids: Sequence[int]) -> Iterator[dict[int, torch.Tensor]]:
        """Collect the outputs of decoder layers while the block runs."""
        caught: dict[int, torch.Tensor] = {}

        def catch(layer: int) -> Any:
            def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
                caught[layer] = output[0] if isinstance(output, tuple) else output

            return hook

        handles = [self.layers[layer].register_forward_hook(catch(layer)) for layer in layer_ids]
        try:
            yield caught
        finally:
            for handle in handles:
                handle.remove()


def _find_layers(model: nn.Module, num_layers: int) -> tuple[nn.Module, nn.ModuleList]:
    """Find the list of decoder layers: as long as the configuration says, beside the embedding.

    A vision tower may have a list of the same length; it has no embedding of tokens.
    """
    for owner in model.modules():
        children = list(owner.children())
        lists = [child for child in children if isinstance(child, nn.ModuleList) and len(child) == num_layers]
        if lists and any(isinstance(child, nn.Embedding) for child in children):
            return owner, lists[0]
    raise InvalidInput(
        f"{type(model).__name__}: no list of {num_layers} decoder layers beside a token embedding was found, "
        "so its hidden states can't be captured. Choose another target."
    )
