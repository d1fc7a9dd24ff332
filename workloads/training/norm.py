"""The global gradient norm and the factor that clips by it: of whole gradients in one process, of slices over several.

In one process the norm is that of torch's own function over the model's parameters in their order.

Over several ranks each has the summed gradients of its slices only. The norm is then taken of runs of 1024 elements of
each parameter, in fp32, and of those norms in the order of the parameters: every run lies within a rank's slice, so the
number of ranks changes no bit. Rank 0's value counts for all, so that all clip, or skip, alike.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from busbar.workloads.training.groups import GRAIN, FlatGroup, members

if TYPE_CHECKING:
    from busbar.workloads.training.ranks import Ranks


class Norm(Protocol):
    def total(self, left_out: Collection[str] = ()) -> torch.Tensor:
        """The norm of all gradients of the step, which are those of the groups that it did not leave out."""


class ParameterNorm:
    """Of the parameters' gradients, by torch."""

    def __init__(self, groups: Sequence[FlatGroup]) -> None:
        ordered = sorted(members(groups), key=lambda each: each[1].index)
        self._parameters = [(flat.group.name, member.parameter) for flat, member in ordered]

    def total(self, left_out: Collection[str] = ()) -> torch.Tensor:
        found = [gradient(parameter) for group, parameter in self._parameters if group not in left_out]
        return torch.nn.utils.get_total_norm(found)


class RowNorm:
    """Of the ranks' slices."""

    def __init__(self, groups: Sequence[FlatGroup], ranks: Ranks) -> None:
        self._groups, self._ranks = groups, ranks

    def total(self, left_out: Collection[str] = ()) -> torch.Tensor:
        own = torch.cat([_row_norms(flat.own_gradients) for flat in self._groups])
        every = torch.empty(self._ranks.size * own.numel(), dtype=own.dtype, device=own.device)
        self._ranks.all_gather(every, own)
        rows = self._in_order(every.view(self._ranks.size, -1), left_out)
        total: torch.Tensor = torch.linalg.vector_norm(torch.cat(rows))
        self._ranks.from_first(total)
        return total

    def _in_order(self, table: torch.Tensor, left_out: Collection[str]) -> list[torch.Tensor]:
        """The row norms of each parameter, in the order of the parameters; `table` has a row per rank."""
        found: dict[int, torch.Tensor] = {}
        start = 0
        for flat in self._groups:
            rows = flat.length // GRAIN
            whole = table[:, start : start + rows].reshape(-1)
            for member in () if flat.group.name in left_out else flat.group.members:
                first = member.start // GRAIN
                found[member.index] = whole[first : first - (-member.parameter.numel() // GRAIN)]
            start += rows
        return [found[index] for index in sorted(found)] or [table.new_zeros(1)]


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
