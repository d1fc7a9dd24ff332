"""Turns a step's logits into tokens and log-probabilities, the whole batch at once, without sorting it.

What a request asks for changes a handful of logits (penalties, biases, tokens that may not come): all of
the batch's changes are one sparse write, undone at the end. Rows under a grammar are written anew, all at once, and
chosen from apart from the others. Greedy rows take the largest. The others invert the cumulative distribution at the
request's own random number (`sampling.Randomness`), so a seed gives the same tokens alone, in a crowd, and after a
preemption.

A nucleus needs the likeliest tokens in order, not all of them. `folding` finds a few candidates, and only those are
sorted; a row whose nucleus is wider is looked at again, down to a bound that is lowered until it holds enough. Sums over
a row are float32; whatever decides a draw is float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf, log
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from busbar.workloads.serving.folding import (
    NEGLIGIBLE,
    at_once,
    candidates,
    largest_of,
    maximum_of,
    peaks_of,
    weight_sums,
    weights_of,
    weights_of_rows,
)
from busbar.workloads.serving.sampling import Randomness, SamplingParams, TokenLogprob
from busbar.workloads.serving.token_counts import TokenCounts

if TYPE_CHECKING:
    from busbar.workloads.serving.grammar import Allowed

CANDIDATES = 64
LOWER = 1.0
"""Nats by which the bound of a wide nucleus is lowered at a time."""
SORTED = 32
"""Rows that a GPU sorts at once: their float64 numbers take some 60 bytes a token."""
CELL = 128
"""Neighbouring tokens summed together to find where a cumulative sum passes a point."""


@dataclass(frozen=True)
class Draw:
    """One row to sample."""

    params: SamplingParams
    randomness: Randomness
    index: int
    """How many tokens this request has sampled before."""
    counts: TokenCounts | None = None
    """The request's tokens; used by the penalties only."""
    forbidden: frozenset[int] = frozenset()
    """Tokens that may not come yet: end tokens before min_tokens, and those that would complete a bad word."""
    allowed: Allowed | None = None
    """What the grammar lets come next; None: anything."""

    @property
    def is_limited(self) -> bool:
        """Whether some tokens may not come."""
        return bool(self.forbidden) or self.params.constraint is not None or self.allowed is not None

    @property
    def top_k(self) -> int:
        """How many of the likeliest tokens may come at most; 0: any number."""
        constraint, k = self.params.constraint, self.params.top_k
        if k and self.allowed is not None:
            return min(k, self.allowed.count)
        return min(k, len(constraint.allowed)) if k and constraint and constraint.allowed else k


@dataclass(frozen=True)
class Sampled:
    token: int
    logprob: TokenLogprob | None
    """Where it was asked for: under the unmodified distribution."""


@torch.inference_mode()
def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> list[Sampled]:
    """One token per row of `logits` [n, vocabulary] float32, which are left as they were."""
    told = [i for i, d in enumerate(draws) if d.params.logprobs is not None]
    masked = [i for i, d in enumerate(draws) if d.allowed is not None]
    free = [i for i, d in enumerate(draws) if d.allowed is None]
    # On a GPU the likeliest token is found without them.
    ordered = any(not draws[i].params.greedy for i in free)
    peaks = peaks_of(logits) if told or ordered or (free and not at_once(logits.device)) else logits
    likeliest = _likeliest(logits, peaks, told, draws) if told else {}
    edit = _Edit(logits, draws)
    if peaks is not logits:
        for row in edit.rows:
            peaks[row] = peaks_of(logits[row : row + 1])[0]
    if not masked:
        chosen = _choose(logits, peaks, draws)
    else:
        rows = _masked(_rows(logits, masked), [draws[i] for i in masked])
        chosen = torch.empty(len(draws), dtype=torch.int64, device=logits.device)
        chosen[masked] = _choose(rows, peaks_of(rows), [draws[i] for i in masked])
        if free:
            chosen[free] = _choose(_rows(logits, free), _rows(peaks, free), [draws[i] for i in free])
    edit.undo()
    tokens: list[int] = chosen.tolist()
    if not told:
        return [Sampled(token, None) for token in tokens]
    picked = logits.gather(1, chosen[:, None])[:, 0].tolist()
    found = [Sampled(token, None) for token in tokens]
    for i in told:
        total, top = likeliest[i]
        pairs = tuple((token, value - total) for token, value in top)
        found[i] = Sampled(tokens[i], TokenLogprob(tokens[i], picked[i] - total, pairs))
    return found


# -- the sparse changes ---------------------------------------------------------------------------


class _Edit:
    """Everything that a batch's requests change: flat positions, and what stood there before."""

    def __init__(self, logits: torch.Tensor, draws: Sequence[Draw]) -> None:
        self.rows = [i for i, d in enumerate(draws) if d.params.edits_logits or d.forbidden]
        self._flat = logits.view(-1)
        self._width = logits.shape[1]
        self._undo: list[tuple[torch.Tensor | slice, torch.Tensor]] = []
        self._penalise([(i, draws[i]) for i in self.rows if draws[i].params.penalises and draws[i].counts])
        self._bias([(i, draws[i]) for i in self.rows if draws[i].params.logit_bias])
        self._allow([(i, draws[i]) for i in self.rows])
        self._forbid([(i, draws[i]) for i in self.rows])

    def undo(self) -> None:
        for where, before in reversed(self._undo):
            self._flat[where] = before

    def _write(self, where: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> None:
        self._undo.append((where, before))
        self._flat[where] = after

    def _penalise(self, rows: list[tuple[int, Draw]]) -> None:
        if not rows:
            return
        device = self._flat.device
        counts = [draw.counts for _, draw in rows if draw.counts is not None]
        lengths = torch.tensor([len(c.ids) for c in counts])
        factor, presence, frequency = (
            torch.tensor(values).repeat_interleave(lengths).to(device)
            for values in zip(
                *((p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in _params(rows)),
                strict=True,
            )
        )
        where = torch.cat([c.ids + i * self._width for (i, _), c in zip(rows, counts, strict=True)]).to(
            device
        )
        sampled = torch.cat([c.sampled for c in counts]).to(device)
        before = self._flat[where]
        after = torch.where(before > 0, before / factor, before * factor)
        self._write(where, before, after - frequency * sampled - presence * (sampled > 0))

    def _bias(self, rows: list[tuple[int, Draw]]) -> None:
        if not rows:
            return
        arrays = [_bias_arrays(p.logit_bias) for p in _params(rows)]
        where = torch.cat([ids + i * self._width for (i, _), (ids, _) in zip(rows, arrays, strict=True)])
        where, added = where.to(self._flat.device), torch.cat([values for _, values in arrays])
        before = self._flat[where]
        self._write(where, before, before + added.to(self._flat.device))

    def _allow(self, rows: list[tuple[int, Draw]]) -> None:
        """Leaves of each row only the tokens that its request allows."""
        for i, draw in rows:
            constraint = draw.params.constraint
            if constraint is None or constraint.allowed is None:
                continue
            row = self._flat[i * self._width : (i + 1) * self._width]
            self._undo.append((slice(i * self._width, (i + 1) * self._width), row.clone()))
            ids = constraint.ids.to(row.device)
            kept = row[ids]
            row.fill_(-inf)
            row[ids] = kept

    def _forbid(self, rows: list[tuple[int, Draw]]) -> None:
        places = [torch.tensor(list(draw.forbidden)) + i * self._width for i, draw in rows if draw.forbidden]
        for i, draw in rows:
            constraint = draw.params.constraint
            if constraint is not None and constraint.allowed is None and constraint.banned:
                places.append(constraint.ids + i * self._width)
        if not places:
            return
        where = torch.cat(places).to(self._flat.device)
        before = self._flat[where]
        self._write(where, before, torch.full_like(before, -inf))


def _params(rows: list[tuple[int, Draw]]) -> list[SamplingParams]:
    return [draw.params for _, draw in rows]


@lru_cache(maxsize=512)
def _bias_arrays(bias: tuple[tuple[int, float], ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, ascending, and what is added to their logits."""
    pairs = sorted(bias)
    return torch.tensor([token for token, _ in pairs]), torch.tensor([value for _, value in pairs])


# -- masks -----------------------------------------------------------------------------------------


def _rows(values: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """These rows, which ascend; all of them without a copy."""
    if len(rows) == values.shape[0]:
        return values
    return values.index_select(0, torch.tensor(rows, device=values.device))


def _masked(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """The rows anew, without what their grammars do not let come."""
    bits = torch.stack([draw.allowed.bits for draw in draws if draw.allowed is not None]).to(logits.device)
    limits = _limits(logits.device).index_select(0, bits.view(-1).int()).view(len(draws), -1)
    return torch.minimum(logits, limits[:, : logits.shape[1]])


@lru_cache(maxsize=8)
def _limits(device: torch.device) -> torch.Tensor:
    """[256, 8]: the limits of the eight logits of a byte of a mask. The smaller of two numbers costs a processor a tenth
    of a choice by a condition."""
    places = torch.arange(256)[:, None] >> torch.arange(8) & 1
    return torch.where(places == 1, inf, -inf).to(device)


# -- choosing -------------------------------------------------------------------------------------


def _choose(logits: torch.Tensor, peaks: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    chosen = largest_of(logits, peaks)
    hot = [i for i, d in enumerate(draws) if not d.params.greedy]
    ordered = [i for i in hot if draws[i].params.needs_order]
    plain = [i for i in hot if not draws[i].params.needs_order]
    if plain:
        chosen[plain] = _in_token_order(logits, peaks, plain, draws)
    if ordered:
        chosen[ordered] = _in_order_of_likelihood(logits, peaks, ordered, draws)
    return chosen


def _in_token_order(
    logits: torch.Tensor, peaks: torch.Tensor, rows: list[int], draws: Sequence[Draw]
) -> torch.Tensor:
    """Draws from whole rows: cells of neighbours first, then inside the cell."""
    largest = maximum_of(logits, peaks)
    if at_once(logits.device):
        return _in_token_order_at_once(logits, largest, rows, draws)
    tokens, scratch = [], torch.empty_like(logits[0])
    for row in rows:
        weights = weights_of(logits[row], largest[row], draws[row].params.temperature, scratch)
        limited = draws[row].is_limited
        if limited:
            torch.threshold_(weights, NEGLIGIBLE, 0.0)
        main = len(weights) // CELL * CELL
        sums = torch.cat((weights[:main].view(-1, CELL).sum(-1), weights[main:].sum()[None])).double()
        heap = sums.cumsum(0)
        point = draws[row].randomness.uniform(draws[row].index) * heap[-1]
        cell = _pass(heap, point, limited)
        first = int(cell) * CELL
        inside = weights[first : first + CELL].double().cumsum(0)
        if not len(inside):  # the empty cell behind the last, by rounding
            tokens.append(torch.tensor(len(weights) - 1, device=logits.device))
            continue
        tokens.append(first + _pass(inside, point - (heap[cell] - sums[cell]), limited))
    return torch.stack(tokens)


def _in_token_order_at_once(
    logits: torch.Tensor, largest: torch.Tensor, rows: list[int], draws: Sequence[Draw]
) -> torch.Tensor:
    """As `_in_token_order`. The last cell, which may be empty there, is filled up with nothing here."""
    own = [draws[row] for row in rows]
    weights = weights_of_rows(logits, largest, rows, [draw.params.temperature for draw in own])
    limited = torch.tensor([draw.is_limited for draw in own], device=logits.device)[:, None]
    points = torch.tensor([draw.randomness.uniform(draw.index) for draw in own], dtype=torch.float64)
    weights = weights.masked_fill_(limited & (weights <= NEGLIGIBLE), 0.0)
    width = weights.shape[1]
    cells = F.pad(weights, (0, -width % CELL)).view(len(rows), -1, CELL)
    sums = cells.sum(-1).double()
    heap = sums.cumsum(-1)
    point = points.to(logits.device)[:, None] * heap[:, -1:]
    cell = _pass_rows(heap, point, limited)
    inside = cells.gather(1, cell[:, :, None].expand(-1, 1, CELL))[:, 0].double().cumsum(-1)
    point = point - (heap.gather(1, cell) - sums.gather(1, cell))
    return (cell * CELL + _pass_rows(inside, point, limited))[:, 0].clamp_(max=width - 1)


def _pass_rows(heap: torch.Tensor, point: torch.Tensor, limited: torch.Tensor) -> torch.Tensor:
    """[rows, 1]: `_pass` of each row."""
    asked = torch.where(limited, point.clamp(min=0), point)
    last = torch.where(limited, (heap < heap[:, -1:]).sum(-1, keepdim=True), heap.shape[1] - 1)
    return torch.minimum(torch.searchsorted(heap, asked, right=True), last)


def _pass(heap: torch.Tensor, point: torch.Tensor, limited: bool) -> torch.Tensor:
    """Where a cumulative sum passes a point.

    The sums are rounded, so a point can lie before the first or behind the last. In a `limited` row, where some tokens
    may not come, it is then moved to the next that may.
    """
    if not limited:
        return torch.searchsorted(heap, point, right=True).clamp(max=len(heap) - 1)
    return torch.searchsorted(heap, point.clamp(min=0), right=True).clamp(max=(heap < heap[-1]).sum())


def _in_order_of_likelihood(
    logits: torch.Tensor, peaks: torch.Tensor, rows: list[int], draws: Sequence[Draw]
) -> torch.Tensor:
    """Draws from top-k, top-p and min-p sets, with as many candidates as each row needs."""
    params = [draws[i].params for i in rows]
    device, width = logits.device, logits.shape[1]
    largest = maximum_of(logits, peaks)

    def column(values: list[float], dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)[:, None]

    wishes = _Wishes(
        temperature=column([p.temperature for p in params]),
        top_k=column([draws[i].top_k or width for i in rows], torch.int64),
        top_p=column([p.top_p if p.top_p < 1 else inf for p in params]),
        floor=column([p.temperature * log(p.min_p) if p.min_p else -inf for p in params]),
        total=_totals(logits, largest, rows, params),
        point=column([draws[i].randomness.uniform(draws[i].index) for i in rows]),
    )
    values, ids = candidates(logits, peaks, rows, CANDIDATES)
    picked, enough = _draw(values.double(), wishes, ids.shape[1] == width)
    tokens = ids.gather(1, picked)[:, 0]
    wide: list[int] = (~enough[:, 0]).nonzero()[:, 0].tolist()
    if at_once(device):
        for first in range(0, len(wide), SORTED):
            part = wide[first : first + SORTED]
            tokens[part] = _draw_sorted(logits, [rows[i] for i in part], wishes.of(part))
        return tokens
    for i in wide:
        tokens[i] = _draw_wider(logits[rows[i]], float(values[i, -1]), largest[rows[i]], wishes.of([i]))
    return tokens


def _totals(
    logits: torch.Tensor, largest: torch.Tensor, rows: list[int], params: list[SamplingParams]
) -> torch.Tensor:
    """[rows, 1] float64 sums of weights; infinite with a top-k, whose set is all that counts."""
    totals = torch.full((len(rows), 1), inf, dtype=torch.float64, device=logits.device)
    open_ended = [n for n, p in enumerate(params) if not p.top_k]
    if open_ended:
        temperatures = [params[n].temperature for n in open_ended]
        sums = weight_sums(logits, largest, [rows[n] for n in open_ended], temperatures)
        totals[open_ended, 0] = sums.double()
    return totals


def _draw_sorted(logits: torch.Tensor, rows: list[int], wishes: _Wishes) -> torch.Tensor:
    """As `_draw`, from all tokens of these rows: a GPU sorts rows faster than it is asked whether a bound is enough."""
    values, order = _rows(logits, rows).sort(descending=True, stable=True)
    picked, _ = _draw(values.double(), wishes, True)
    return order.gather(1, picked)[:, 0]


def _draw_wider(row: torch.Tensor, reached: float, largest: torch.Tensor, wish: _Wishes) -> torch.Tensor:
    """As `_draw`, from all tokens down to a logit that is lowered until they are enough."""
    step = float(wish.temperature) * LOWER
    least = reached
    while True:
        least -= step
        ids = (row >= least).nonzero()[:, 0]
        everything = len(ids) == len(row) or least < float(largest) - 100 * step
        if everything:
            ids = torch.arange(len(row), device=row.device)
        elif not _may_be_enough(row[ids], wish):
            continue
        values, order = row[ids].sort(descending=True, stable=True)
        picked, enough = _draw(values[None].double(), wish, everything)
        if bool(enough):
            return ids[order[picked[0, 0]]]


def _may_be_enough(values: torch.Tensor, wish: _Wishes) -> bool:
    """Without sorting: saves the sort where it would be in vain."""
    if bool(wish.total.isinf()):
        return len(values) >= int(wish.top_k)
    if not bool(wish.top_p.isinf()):
        weights = torch.exp((values - values.max()) / wish.temperature[0, 0].float())
        return bool(weights.double().sum() >= (wish.top_p * wish.total)[0, 0])
    return True


@dataclass(frozen=True)
class _Wishes:
    """Columns [n, 1], one entry per row."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    floor: torch.Tensor
    """A logit may be so much below the largest (min-p)."""
    total: torch.Tensor
    """Sum of the row's weights, the largest being 1; infinite where top-k makes it unneeded."""
    point: torch.Tensor

    def of(self, rows: list[int]) -> _Wishes:
        return _Wishes(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))


def _draw(values: torch.Tensor, wish: _Wishes, everything: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(place among the sorted `values` [n, k], whether k of them were enough), each [n, 1]."""
    k = values.shape[1]
    rank = torch.arange(k, device=values.device)
    weights = torch.exp((values - values[:, :1]) / wish.temperature).masked_fill(rank >= wish.top_k, 0.0)
    heap = weights.cumsum(-1)
    total = torch.where(wish.total.isinf() | everything, heap[:, -1:], wish.total)
    limit = torch.where(wish.top_p.isinf(), inf, wish.top_p * total)
    low = values - values[:, :1] < wish.floor
    kept = weights.masked_fill(((heap - weights >= limit) | low) & (rank > 0), 0.0)
    heap_kept = kept.cumsum(-1)
    index = torch.searchsorted(heap_kept, wish.point * heap_kept[:, -1:], right=True)
    last = (kept > 0).sum(-1, keepdim=True) - 1
    enough = torch.where(
        wish.total.isinf(),  # until all of the top k are here, their sum is not known
        wish.top_k <= k,
        (heap[:, -1:] >= limit) | low[:, -1:],
    )
    return torch.minimum(index, last.clamp(min=0)), enough | everything


def _likeliest(
    logits: torch.Tensor, peaks: torch.Tensor, rows: list[int], draws: Sequence[Draw]
) -> dict[int, tuple[float, list[tuple[int, float]]]]:
    """Of each row: the logarithm of its sum of exponentials, and its likeliest tokens with their logits."""
    wanted = [draws[i].params.logprobs or 0 for i in rows]
    most = min(max(wanted), logits.shape[1])
    largest = maximum_of(logits, peaks)
    sums = weight_sums(logits, largest, rows, [1.0] * len(rows))
    totals: list[float] = (sums.double().log() + largest[rows].double()).tolist()
    values, tokens = (t.tolist() for t in candidates(logits, peaks, rows, most)) if most else ([], [])
    return {
        row: (total, list(zip(tokens[i][:n], values[i][:n], strict=True)) if n else [])
        for i, (row, total, n) in enumerate(zip(rows, totals, wanted, strict=True))
    }
