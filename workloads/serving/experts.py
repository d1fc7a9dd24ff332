"""The second half of a layer: a dense MLP, or experts of which each token uses a few.

A router gives every token a weight for each expert, and the token's `per_token` best are computed. The pairs of token and
expert are sorted by expert, so that each expert is one product over all its tokens, and only experts that somebody chose
are read. The router's product and its softmax are in float32 in every dtype, and what experts give is added in float32, a
token's best expert first, whatever else is in the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from busbar.workloads.serving.architecture import Routing
from busbar.workloads.serving.linear import Linear, Move

GROUPED_WIDTH = 8
"""torch's grouped product wants rows of whole 16 bytes."""


@dataclass(frozen=True)
class DenseMlp:
    """x [rows, hidden] → [rows, hidden]: SiLU(gate) times up, and down."""

    gate_up: Linear
    """Gate first."""
    down: Linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(gated(self.gate_up(x)))

    @property
    def bytes(self) -> int:
        return self.gate_up.bytes + self.down.bytes

    def moved(self, move: Move) -> DenseMlp:
        return DenseMlp(self.gate_up.moved(move), self.down.moved(move))


class Experts(Protocol):
    """The experts of a layer."""

    bytes: int

    def __call__(self, x: torch.Tensor, counts: torch.Tensor, least_rows: int) -> torch.Tensor:
        """x [pairs, hidden], those of the first expert first, `counts` [experts] of each → [pairs, hidden].

        `least_rows`: of a product, where the library's rows depend on each other below that number.
        """
        ...

    def moved(self, move: Move) -> Experts: ...


class EachExpert:
    """One after the other: matrices that are packed or in codes, and CPUs."""

    def __init__(self, experts: Sequence[DenseMlp]) -> None:
        self._experts = tuple(experts)
        self.bytes = sum(expert.bytes for expert in experts)

    def __call__(self, x: torch.Tensor, counts: torch.Tensor, least_rows: int) -> torch.Tensor:
        out = torch.empty_like(x)
        first = 0
        for expert, count in zip(self._experts, counts.tolist(), strict=True):
            if not count:
                continue
            out[first : first + count] = rows_of(expert, x[first : first + count], least_rows)
            first += count
        return out

    def moved(self, move: Move) -> EachExpert:
        return EachExpert([expert.moved(move) for expert in self._experts])


class StackedExperts:
    """All at once, on a GPU: no number of rows goes to the host. Plain matrices [experts, out, in]."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        self._gate_up, self._down = gate_up, down
        self.bytes = sum(each.numel() * each.element_size() for each in (gate_up, down))

    def __call__(self, x: torch.Tensor, counts: torch.Tensor, least_rows: int) -> torch.Tensor:
        ends = counts.cumsum(0, dtype=torch.int32)
        hidden = gated(F.grouped_mm(x, self._gate_up.transpose(1, 2), offs=ends))
        return F.grouped_mm(hidden, self._down.transpose(1, 2), offs=ends)

    def moved(self, move: Move) -> StackedExperts:
        return StackedExperts(move(self._gate_up), move(self._down))


@dataclass(frozen=True)
class ExpertMlp:
    """A router and its experts."""

    routing: Routing
    router: torch.Tensor
    """[experts, hidden]."""
    experts: Experts

    def __call__(self, x: torch.Tensor, least_rows: int = 1) -> torch.Tensor:
        """x [rows, hidden] → [rows, hidden]; for `least_rows` see `Experts`."""
        weights, chosen = self.choose(x)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=self.routing.experts)
        found = self.experts(x[order // self.routing.per_token], counts, least_rows)
        unsorted = torch.empty_like(found)
        unsorted[order] = found
        each = unsorted.view(*chosen.shape, -1).float()
        return each.mul_(weights[..., None]).sum(1).to(x.dtype)

    def choose(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(weights, experts) [rows, per_token], the best first; weights in float32."""
        scores = F.linear(x.float(), self.router.float()).softmax(-1)
        weights, chosen = scores.topk(self.routing.per_token, -1)
        if self.routing.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights, chosen

    @property
    def bytes(self) -> int:
        return self.experts.bytes + self.router.numel() * self.router.element_size()

    def moved(self, move: Move) -> ExpertMlp:
        return ExpertMlp(self.routing, move(self.router), self.experts.moved(move))


Mlp = DenseMlp | ExpertMlp


def rows_of(expert: DenseMlp, rows: torch.Tensor, least_rows: int) -> torch.Tensor:
    """What an expert gives for rows; for `least_rows` see `Experts`."""
    count = len(rows)
    if count >= least_rows:
        return expert(rows)
    return expert(F.pad(rows, (0, 0, 0, least_rows - count)))[:count]


def gated(gate_up: torch.Tensor) -> torch.Tensor:
    """SiLU of the first half of each row times the second."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def can_stack(device: torch.device, dtype: torch.dtype, widths: Iterable[int]) -> bool:
    """Whether torch's grouped product takes plain matrices with so many inputs there."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    whole = all(width % GROUPED_WIDTH == 0 for width in widths)
    return whole and torch.cuda.get_device_capability(device) >= (8, 0)
