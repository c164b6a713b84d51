"""The proof, at each start, that what will be captured is what training takes it for.

Three statements about a loaded model are tried on two short sequences; a model for
which one is false is refused before any hour is spent on it.

Shapes: B sequences, T tokens, A auxiliary states (3), D hidden size, V target vocabulary.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from eagle3_tasks.contracts.errors import EngineProblem, InvalidInput
from eagle3_tasks.engines.decoder import Decoder

logger = logging.getLogger(__name__)

_LONG, _SHORT = 12, 7
# Of the largest logit. The same product of the same numbers is computed twice, in the same shape.
_LOGITS_TOLERANCE = 1e-3
# Small logits hardly show a soft cap, so the output layer's result is enlarged in passing: any
# function of logits that is not the identity then stands out. A power of two changes no bits.
_ENLARGEMENT = 1024.0
# Another shape of the batch may sum in another order; relative L2 distance.
_PADDING_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}


@torch.no_grad()
def check_model(model: nn.Module, decoder: Decoder, *, layer_ids: Sequence[int], vocab_size: int) -> None:
    """Prove that the captured states are the right ones.

    Raises:
        InvalidInput: logits are not last_hidden @ head.weight.T (scaled, soft-capped or with
            a bias), so no teacher can be made of the stored states.
        EngineProblem: layers are numbered otherwise than expected, or padding leaks.
    """
    device = next(decoder.module.parameters()).device
    # Spread over the vocabulary, so that no special token rules the result.
    long_T = torch.arange(1, _LONG + 1, device=device) * max(1, vocab_size // (_LONG + 2)) % vocab_size
    ids_BT = torch.stack([long_T, long_T.flip(0)])
    mask_BT = torch.ones_like(ids_BT)
    mask_BT[1, _SHORT:] = 0
    model_any: Any = model
    with (
        decoder.caught_outputs(layer_ids) as caught,
        decoder.caught_last() as caught_last,
        _enlarged_logits(decoder.head),
    ):
        output = model_any(
            input_ids=ids_BT, attention_mask=mask_BT, output_hidden_states=True, use_cache=False
        )
    # The state and the logits of one pass: a second one may round otherwise.
    _check_logits(decoder.head, caught_last[-1], output.logits)
    _check_layers(caught, output.hidden_states, layer_ids, num_layers=len(decoder.layers))
    aux_BTAD, last_BTD = decoder.forward(ids_BT, mask_BT, layer_ids)
    alone_BTAD, alone_BTD = decoder.forward(ids_BT[1:, :_SHORT], mask_BT[1:, :_SHORT], layer_ids)
    _check_padding(aux_BTAD[1, :_SHORT], alone_BTAD[0])
    _check_padding(last_BTD[1, :_SHORT], alone_BTD[0])
    logger.info("canary passed layers=%s positions=%d", list(layer_ids), ids_BT.numel())


@contextlib.contextmanager
def _enlarged_logits(head: nn.Module) -> Generator[None]:
    def enlarge(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output * _ENLARGEMENT

    handle = head.register_forward_hook(enlarge)
    try:
        yield
    finally:
        handle.remove()


def _check_logits(head: nn.Module, last_BTD: torch.Tensor, logits_BTV: torch.Tensor) -> None:
    """Compare with the head's weight alone: nothing else of it reaches training or an engine."""
    bias: Any = getattr(head, "bias", None)
    if isinstance(bias, torch.Tensor) and bool(bias.any()):
        raise InvalidInput(
            f"the target's output layer adds a bias to its logits (up to {float(bias.abs().max()):.3g}), "
            "which neither the draft model nor its training has. Choose another target."
        )
    weight_VD = getattr(head, "weight", None)
    if not isinstance(weight_VD, torch.Tensor):
        raise InvalidInput(
            f"the target's output layer {type(head).__name__} has no weight to make a teacher of. Choose "
            "another target."
        )
    ours_BTV = functional.linear(last_BTD.to(weight_VD), weight_VD).float() * _ENLARGEMENT
    difference = float((ours_BTV - logits_BTV.float().to(ours_BTV.device)).abs().max())
    largest = float(ours_BTV.abs().max())
    if not difference <= _LOGITS_TOLERANCE * largest:
        raise InvalidInput(
            f"the target's logits differ by {100 * difference / largest:.3g} % from its output layer's "
            "weight times the last hidden state: it scales or soft-caps them, which the draft model's "
            "training does not. Choose another target."
        )


def _check_layers(
    caught: dict[int, torch.Tensor], hidden_states: Any, layer_ids: Sequence[int], *, num_layers: int
) -> None:
    if hidden_states is None:
        logger.warning("layer numbering unproven: the model gives no hidden_states to compare with")
        return
    for layer in layer_ids:
        # The last entry of transformers' tuple is after the final norm, so it has no equal.
        if layer == num_layers - 1:
            continue
        theirs = hidden_states[layer + 1]
        if not torch.equal(caught[layer].to(theirs.device), theirs):
            raise EngineProblem(
                f"the output of decoder layer {layer} is not transformers' hidden_states[{layer + 1}]: this "
                "model numbers its layers otherwise. Report the architecture."
            )


def _check_padding(padded: torch.Tensor, alone: torch.Tensor) -> None:
    tolerance = _PADDING_TOLERANCE.get(alone.dtype, _PADDING_TOLERANCE[torch.bfloat16])
    distance = float((padded.float() - alone.float()).norm() / alone.float().norm())
    if not distance <= tolerance:
        raise EngineProblem(
            f"padding a batch changes a sequence's hidden states by {distance:.2g} (relative; at most "
            f"{tolerance:g} is rounding): the model's attention does not heed the mask. Report the "
            "architecture."
        )
