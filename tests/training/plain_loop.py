"""The reference: a plain PyTorch training loop. It imports nothing of Busbar."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM


def plain_rate(settings: dict[str, Any], step: int, steps: int) -> float:
    """Linear warm-up, then linear or cosine decay to zero."""
    peak, warmup = settings["learningRate"], settings.get("warmupSteps", 0)
    if step < warmup:
        return float(peak * (step + 1) / warmup)
    done = (step - warmup) / max(1, steps - warmup)
    match settings.get("schedule", "linear"):
        case "linear":
            return float(peak * (1 - done))
        case "cosine":
            return float(peak * (0.5 * (1 + math.cos(math.pi * done))))
    return float(peak)


def rounded(master: torch.Tensor) -> torch.Tensor:
    """The nearest bfloat16; ties are rounded away from zero."""
    down = (master.view(torch.int32) & ~0xFFFF).view(torch.float32)
    up = ((master.view(torch.int32) & ~0xFFFF) + 0x10000).view(torch.float32)
    return torch.where((master - down).abs() < (up - master).abs(), down, up).bfloat16()


def train_plainly(
    config: dict[str, Any],
    vocab_size: int,
    batches: Sequence[torch.Tensor],
    micro_batch: int,
    settings: dict[str, Any],
    *,
    seed: int = 0,
    fused: bool | None = None,
    dtype: torch.dtype = torch.float32,
    spoil: Callable[[int, torch.nn.Module], None] = lambda step, model: None,
    labels: Sequence[torch.Tensor] | None = None,
    leaves: int | None = None,
    begin: Callable[[int, int], None] = lambda step, index: None,
    updated: Callable[[torch.optim.Optimizer], None] = lambda optimizer: None,
    frozen: Callable[[str], bool] = lambda name: False,
    wide: bool = False,
    scales: Callable[[int], Sequence[float]] | None = None,
    positions: Sequence[torch.Tensor] | None = None,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and final weights of `torch.optim.AdamW` (on fp32 master copies when `dtype` is narrower).

    `spoil` may change the gradients of a step before they are used. A step whose gradient norm is not finite is
    skipped. With `labels` the loss of a step is the mean over its labels that are not -100. With `leaves` the
    micro-batches are cut into as many runs, whose gradients are added up as a balanced binary tree, and the norm is that
    of the norms of runs of 1024 elements. `begin` is called before each micro-batch, and `updated` after each update. Parameters
    whose name is `frozen` are not trained. With `wide` the gradients of micro-batches are added up in float32. `scales` tells
    for each block of the model how many times it counts in a step, 0 being that it is left out. With `positions` transformers
    keeps the documents of a sequence apart, each of which begins at position 0.
    """
    given = {"vocab_size": vocab_size, "bos_token_id": 0, "eos_token_id": 0, **config}
    torch.manual_seed(seed)
    make: Any = AutoModelForCausalLM.from_config
    model: torch.nn.Module = make(AutoConfig.for_model(given.pop("model_type"), **given), dtype=dtype)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen(name))
    if scales is not None:
        begin = _begin_with(_scaled_blocks(model), scales, begin)
    return train_model_plainly(
        model,
        batches,
        micro_batch,
        settings,
        fused,
        dtype,
        spoil,
        labels,
        leaves,
        begin,
        updated,
        wide,
        positions,
    )


def _begin_with(
    now: list[float], scales: Callable[[int], Sequence[float]], begin: Callable[[int, int], None]
) -> Callable[[int, int], None]:
    def run(step: int, index: int) -> None:
        now[:] = scales(step)
        begin(step, index)

    return run


def _scaled_blocks(model: Any) -> list[float]:
    """Have the blocks count so many times as the list says that is returned; 0: a block is not computed."""
    found = model.transformer.h if hasattr(model, "transformer") else model.model.layers
    now = [1.0] * len(found)

    def scaled(number: int, forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if now[number] == 0:
                return hidden
            return torch.lerp(hidden, forward(hidden, *args, **kwargs), now[number])

        return run

    for number, block in enumerate(found):
        block.forward = scaled(number, block.forward)
    return now


def train_model_plainly(
    model: torch.nn.Module,
    batches: Sequence[torch.Tensor],
    micro_batch: int,
    settings: dict[str, Any],
    fused: bool | None,
    dtype: torch.dtype,
    spoil: Callable[[int, torch.nn.Module], None] = lambda step, model: None,
    labels: Sequence[torch.Tensor] | None = None,
    leaves: int | None = None,
    begin: Callable[[int, int], None] = lambda step, index: None,
    updated: Callable[[torch.optim.Optimizer], None] = lambda optimizer: None,
    wide: bool = False,
    positions: Sequence[torch.Tensor] | None = None,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same for a model that exists; parameters without `requires_grad` are not trained."""
    model.train()
    narrow = [parameter for parameter in model.parameters() if parameter.requires_grad]
    masters = narrow
    if dtype != torch.float32:
        masters = [torch.nn.Parameter(p.detach().float()) for p in narrow]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in masters if p.ndim >= 2], "weight_decay": settings.get("weightDecay", 0.1)},
            {"params": [p for p in masters if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=settings["learningRate"],
        betas=tuple(settings.get("betas", (0.9, 0.95))),
        eps=settings.get("eps", 1e-8),
        fused=fused,
    )
    wide = wide and dtype != torch.float32
    for parameter in narrow if wide else ():
        parameter.grad_dtype = torch.float32  # also of the parts that a tied tensor has in one micro-batch
    summed = masters if wide else narrow  # that have the gradients of a step
    losses = []
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = plain_rate(settings, step, len(batches))
        for parameter in [*narrow, *masters]:
            parameter.grad = None
        total = torch.zeros(())
        parts = torch.split(batch, micro_batch)
        wanted = parts if labels is None else torch.split(labels[step], micro_batch)
        counts = [int((own[:, 1:] != -100).sum()) for own in wanted]
        sums: list[list[torch.Tensor | None]] = []
        for index, (part, own, count) in enumerate(zip(parts, wanted, counts, strict=True)):
            if leaves is not None and index and index % (len(parts) // leaves) == 0:
                sums.append(_taken(summed))
            begin(step, index)
            if count == 0:
                continue
            given: dict[str, Any] = {"input_ids": part, "labels": own}
            if positions is not None:
                given |= {
                    "position_ids": torch.split(positions[step], micro_batch)[index],
                    "use_cache": False,
                }
            loss = model(**given).loss
            loss = loss / len(parts) if labels is None else loss * (count / sum(counts))
            if loss.requires_grad:
                loss.backward()
            total += loss.detach()
            if wide:
                _add_wide(narrow, masters)
        losses.append(float(total))
        if leaves is not None:
            for parameter, gradient in zip(summed, _tree([*sums, _taken(summed)]), strict=True):
                parameter.grad = gradient
        spoil(step, model)
        gradients = [p.grad for p in summed if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients) if leaves is None else _norm_of_runs(gradients)
        if not torch.isfinite(norm):
            continue
        if settings.get("gradientClip") is not None:
            torch.nn.utils.clip_grads_with_norm_(summed, settings["gradientClip"], norm)
        for master, parameter in zip(masters, narrow, strict=True):
            if master is not parameter and not wide and parameter.grad is not None:
                master.grad = parameter.grad.float()
        optimizer.step()
        updated(optimizer)
        with torch.no_grad():
            for master, parameter in zip(masters, narrow, strict=True):
                if master is not parameter:
                    parameter.copy_(rounded(master))
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


def _add_wide(narrow: Sequence[torch.nn.Parameter], masters: Sequence[torch.nn.Parameter]) -> None:
    """Add the gradients of a micro-batch to the sums in float32."""
    for parameter, master in zip(narrow, masters, strict=True):
        if parameter.grad is not None:
            own = parameter.grad
            master.grad = own if master.grad is None else master.grad + own
            parameter.grad = None


def _taken(parameters: Sequence[torch.nn.Parameter]) -> list[torch.Tensor | None]:
    """The gradients so far; the parameters have none afterwards."""
    taken = [p.grad for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    return taken


def _tree(sums: Sequence[list[torch.Tensor | None]]) -> list[torch.Tensor | None]:
    if len(sums) == 1:
        return sums[0]
    half = len(sums) // 2
    return [_sum(left, right) for left, right in zip(_tree(sums[:half]), _tree(sums[half:]), strict=True)]


def _sum(left: torch.Tensor | None, right: torch.Tensor | None) -> torch.Tensor | None:
    if left is None or right is None:
        only = right if left is None else left
        return None if only is None else only + torch.zeros_like(only)
    return left + right


def _norm_of_runs(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    norms = []
    for gradient in gradients:
        flat = gradient.flatten().float()
        whole = torch.nn.functional.pad(flat, (0, -flat.numel() % 1024))
        norms.append(torch.linalg.vector_norm(whole.view(-1, 1024), dim=1))
    total: torch.Tensor = torch.linalg.vector_norm(torch.cat(norms))
    return total
