"""The one exchange of a step: gradients, sums, and how every rank fares.

All of it lies in one flat float32 tensor, so a step costs one all_reduce, and no rank can
learn of another's failure later than at the end of the same step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from eagle3_tasks.contracts.errors import TrainingProblem

STATUS_OK = 0.0
STATUS_NOT_FINITE = 1.0
STATUS_FAILED = 2.0
_STATUS_WORDS = {
    STATUS_NOT_FINITE: "its loss is not finite. Lower learning_rate or look at its samples",
    STATUS_FAILED: "it raised an error, which its own log line names. Retry: training continues",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankGroup:
    """Who this process is among the processes of the training."""

    rank: int
    size: int

    def sum(self, values: Tensor) -> None:
        """Add up ``values`` over all ranks, in place; every rank gets the same bits."""
        if self.size > 1:
            dist.all_reduce(values)

    def gather(self, values: Sequence[int], device: torch.device) -> list[list[int]]:
        """Give the whole numbers of every rank to all, in order of rank."""
        table = torch.zeros(self.size, len(values), dtype=torch.int64, device=device)
        table[self.rank] = torch.tensor(values, dtype=torch.int64)
        self.sum(table)
        return table.tolist()


class StepExchange:
    """A flat buffer whose front is all gradients and whose tail is figures of the step.

    The parameters' ``grad`` are views of it: the backward pass fills it in place.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: RankGroup, num_figures: int) -> None:
        self._group = group
        self._num_gradients = sum(one.numel() for one in parameters)
        self.num_figures = num_figures
        # Figures, one status a rank, and rank 0's wish for a checkpoint.
        tail = num_figures + group.size + 1
        self._flat = torch.zeros(self._num_gradients + tail, device=parameters[0].device)
        start = 0
        for parameter in parameters:
            stop = start + parameter.numel()
            parameter.grad = self._flat[start:stop].view_as(parameter)
            start = stop

    @property
    def gradients(self) -> Tensor:
        """All gradients, flat."""
        return self._flat[: self._num_gradients]

    def clear(self) -> None:
        """Forget the step before."""
        self._flat.zero_()

    def exchange(
        self, step: int, figures: Tensor, status: float, *, wants_checkpoint: bool
    ) -> tuple[Tensor, bool]:
        """Add up gradients and figures over all ranks.

        A rank that failed takes part all the same, with its status, so none waits for it.

        Returns:
            the summed figures on the CPU, and whether a checkpoint is due now.

        Raises:
            TrainingProblem: on every rank, if any rank failed; it names rank and step.
        """
        tail = self._flat[self._num_gradients :]
        tail[: self.num_figures] = figures
        if status != STATUS_OK:
            self._flat.zero_()
        statuses = tail[self.num_figures : self.num_figures + self._group.size]
        statuses[self._group.rank] = status
        tail[-1] = float(wants_checkpoint)
        self._group.sum(self._flat)
        summed = tail.cpu()
        for rank in range(self._group.size):
            code = summed[self.num_figures + rank].item()
            if code != STATUS_OK:
                raise TrainingProblem(
                    f"rank {rank} failed in step {step}: {_STATUS_WORDS.get(code, 'unknown')}."
                )
        return summed[: self.num_figures], bool(summed[-1].item())
