"""The largest values of a step's logits, found without sorting rows.

A row is laid out as `FOLD` layers. The largest value of each column, its peak, costs one pass, and the `n` largest values
of the row lie in the `n` columns with the largest peaks.
"""

from __future__ import annotations

import torch

FOLD = 32
SMALL = 8192
"""Vocabularies up to this size are not folded: sorting them is cheap."""
LEAST = -86.0
"""A smaller exponent is taken as this one. Its exponential leaves float32's normal numbers, for which processors take up
to 40 times as long."""
NEGLIGIBLE = 1e-37
"""Weights up to this one, a little above that of `LEAST`, may be counted as none."""


def at_once(device: torch.device) -> bool:
    """Whether rows are best handled all at once: on a GPU, where calls cost more than memory."""
    return device.type == "cuda"


def peaks_of(logits: torch.Tensor) -> torch.Tensor:
    """[n, columns]: the largest logit of each column of the folded row; a small row itself."""
    width = logits.shape[1]
    if width <= SMALL:
        return logits
    columns = width // FOLD
    return logits[:, : FOLD * columns].view(-1, FOLD, columns).amax(1)


def maximum_of(logits: torch.Tensor, peaks: torch.Tensor) -> torch.Tensor:
    largest = peaks.amax(-1)
    if peaks.shape[1] * FOLD < logits.shape[1]:
        largest = torch.maximum(largest, logits[:, peaks.shape[1] * FOLD :].amax(-1))
    return largest


def largest_of(logits: torch.Tensor, peaks: torch.Tensor) -> torch.Tensor:
    """The first of the largest logits of each row, as argmax."""
    if peaks.shape[1] == logits.shape[1] or logits.shape[0] == 1 or at_once(logits.device):
        return logits.argmax(-1)
    columns = peaks.shape[1]
    ids = (peaks == peaks.amax(-1, keepdim=True)).long().argmax(-1)[:, None] + columns * torch.arange(
        FOLD, device=logits.device
    )
    ids = _with_tail(ids, logits.shape[1], columns)
    best = logits.gather(1, ids)
    return torch.where(best == best.amax(-1, keepdim=True), ids, logits.shape[1]).amin(-1)


def _with_tail(ids: torch.Tensor, width: int, columns: int) -> torch.Tensor:
    """Adds the tokens that no column holds to every row of token ids."""
    if FOLD * columns == width:
        return ids
    rest = torch.arange(FOLD * columns, width, device=ids.device)
    return torch.cat((ids, rest.expand(ids.shape[0], -1)), -1)


def candidates(
    logits: torch.Tensor, peaks: torch.Tensor, rows: list[int], count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest logits of each of the rows, largest first, and their tokens."""
    width, columns = logits.shape[1], peaks.shape[1]
    if columns == width:
        best = logits[rows].topk(min(count, width))
        return best.values, best.indices
    at = peaks[rows].topk(min(count, columns), sorted=False).indices
    ids = (at[:, :, None] + columns * torch.arange(FOLD, device=logits.device)).flatten(1)
    ids = _with_tail(ids, width, columns)
    offsets = torch.tensor(rows, device=logits.device)[:, None] * width
    best = logits.view(-1).take(ids + offsets).topk(min(count, ids.shape[1]))
    return best.values, ids.gather(1, best.indices)


def weights_of(
    row: torch.Tensor, largest: torch.Tensor, temperature: float, scratch: torch.Tensor
) -> torch.Tensor:
    """exp((logit - largest) / temperature), in `scratch`: one row at a time stays in a processor's cache.
    None is 0: those of `LEAST` and less are alike, and too small to change a sum."""
    torch.sub(row, largest, out=scratch)
    if temperature != 1.0:
        scratch.mul_(1.0 / temperature)
    return scratch.clamp_(min=LEAST).exp_()


def weight_sums(
    logits: torch.Tensor, largest: torch.Tensor, rows: list[int], temperatures: list[float]
) -> torch.Tensor:
    """[rows] float32: of the weights of each of these rows, of which there is at least one."""
    if at_once(logits.device):
        return weights_of_rows(logits, largest, rows, temperatures).sum(-1)
    scratch = torch.empty_like(logits[0])
    pairs = zip(rows, temperatures, strict=True)
    return torch.stack([weights_of(logits[i], largest[i], t, scratch).sum() for i, t in pairs])


def weights_of_rows(
    logits: torch.Tensor, largest: torch.Tensor, rows: list[int], temperatures: list[float]
) -> torch.Tensor:
    """[rows, vocabulary]: as `weights_of`, of these rows at once."""
    at = torch.tensor(rows, device=logits.device)
    inverse = torch.tensor([1.0 / t for t in temperatures], dtype=logits.dtype, device=logits.device)
    found = logits.index_select(0, at).sub_(largest.index_select(0, at)[:, None])
    return found.mul_(inverse[:, None]).clamp_(min=LEAST).exp_()
