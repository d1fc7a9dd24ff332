"""The global gradient norm and the factor that clips by it: of whole gradients in one process, of slices over several.

In one process the norm is that of torch's own function over the model's parameters in their order.

Over several ranks each has the summed gradients of its slices only. The norm is then taken of runs of 1024 elements of
each parameter, in fp32, and of those norms in the order of the parameters: every run lies within a rank's slice, so the
number of ranks changes no bit. Rank 0's value counts for all, so that all clip, or skip, alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from busbar.workloads.training.groups import GRAIN, FlatGroup, members

if TYPE_CHECKING:
    from busbar.workloads.training.ranks import Ranks


class Norm(Protocol):
    def total(self) -> torch.Tensor:
        """The norm of all gradients of the step."""


class ParameterNorm:
    """Of the parameters' gradients, by torch."""

    def __init__(self, groups: Sequence[FlatGroup]) -> None:
        ordered = sorted((member for _, member in members(groups)), key=lambda member: member.index)
        self._parameters = [member.parameter for member in ordered]

    def total(self) -> torch.Tensor:
        return torch.nn.utils.get_total_norm([gradient(parameter) for parameter in self._parameters])


class RowNorm:
    """Of the ranks' slices."""

    def __init__(self, groups: Sequence[FlatGroup], ranks: Ranks) -> None:
        self._groups, self._ranks = groups, ranks

    def total(self) -> torch.Tensor:
        own = torch.cat([_row_norms(flat.own_gradients) for flat in self._groups])
        every = torch.empty(self._ranks.size * own.numel(), dtype=own.dtype, device=own.device)
        self._ranks.all_gather(every, own)
        rows = self._in_order(every.view(self._ranks.size, -1))
        total: torch.Tensor = torch.linalg.vector_norm(torch.cat(rows))
        self._ranks.from_first(total)
        return total

    def _in_order(self, table: torch.Tensor) -> list[torch.Tensor]:
        """The row norms of each parameter, in the order of the parameters; `table` has a row per rank."""
        found: dict[int, torch.Tensor] = {}
        start = 0
        for flat in self._groups:
            rows = flat.length // GRAIN
            whole = table[:, start : start + rows].reshape(-1)
            for member in flat.group.members:
                first = member.start // GRAIN
                found[member.index] = whole[first : first - (-member.parameter.numel() // GRAIN)]
            start += rows
        return [found[index] for index in sorted(found)]


def clip_factor(limit: float, total: torch.Tensor) -> torch.Tensor:
    """What gradients of the norm `total` are multiplied by for a norm of `limit` at most.

    Source: torch.nn.utils.clip_grads_with_norm_
    """
    return torch.clamp(limit / (total + 1e-6), max=1.0)


def _row_norms(flat: torch.Tensor) -> torch.Tensor:
    norms: torch.Tensor = torch.linalg.vector_norm(flat.view(-1, GRAIN), dim=1, dtype=torch.float32)
    return norms


def gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    found = parameter.grad
    assert found is not None
    return found
