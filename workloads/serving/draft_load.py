"""From a draft model's folder to a `Draft`: read, check, and put beside the served model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from busbar.workloads.serving.architecture import Architecture, read_architecture
from busbar.workloads.serving.draft import Draft
from busbar.workloads.serving.errors import ModelCorrupt
from busbar.workloads.serving.kvcache import KvCache, KvShape
from busbar.workloads.serving.model import Decoder
from busbar.workloads.serving.probe import Trial, choose_backend, choose_in_place
from busbar.workloads.serving.runner import Runner
from busbar.workloads.serving.settings import EngineSettings
from busbar.workloads.serving.step_probe import choose_graphs
from busbar.workloads.serving.text import load_tokenizer
from busbar.workloads.serving.weights import Weights


@dataclass(frozen=True)
class DraftWeights:
    """A draft model in memory."""

    arch: Architecture
    weights: Weights


def read_draft(folder: Path, tokenizer: Tokenizer) -> Architecture:
    """The draft's architecture. Raises ModelError where it cannot be served, or `tokenizer`, the served model's, gives other
    tokens than the draft's."""
    arch, own = read_architecture(folder), load_tokenizer(folder)
    ours, served = own.get_vocab(), tokenizer.get_vocab()
    if len(ours) > arch.vocab_size:
        raise ModelCorrupt(
            f"{folder}: tokenizer.json has {len(ours)} tokens, the model's embedding only {arch.vocab_size}; they do not "
            "belong together"
        )
    if ours != served:
        differs = min(set(ours.items()) ^ set(served.items()), key=lambda pair: (pair[1], pair[0]))[1]
        raise ModelCorrupt(
            f"the draft model in {folder} has another vocabulary than the served model: {len(ours)} tokens instead of "
            f"{len(served)}, and token {differs} is {own.id_to_token(differs)!r} instead of "
            f"{tokenizer.id_to_token(differs)!r}. Give a draft with the served model's tokenizer, as a smaller model of the "
            "same family has, or leave --draft out"
        )
    return arch


def draft_shape(draft: Architecture, block_tokens: int, dtype: torch.dtype) -> KvShape:
    """Of its blocks, which are never kept in codes."""
    return KvShape.of(draft, block_tokens, dtype)


def make_draft(
    draft: DraftWeights,
    settings: EngineSettings,
    dtype: torch.dtype,
    blocks: int,
    positions: int,
    served: Architecture,
    clock: Callable[[], float],
) -> tuple[Draft, list[Trial]]:
    """The draft with `blocks` blocks of keys and values in `dtype`, for contexts of up to `positions` tokens.

    It attends in the fastest way also where the served model keeps a fixed order: its guesses change no answer.
    """
    arch, device = draft.arch, draft.weights.embedding.device
    positions = min(positions, arch.max_positions)
    shape = draft_shape(arch, settings.block_tokens, dtype)
    attention, trials = choose_backend(shape, arch.heads, device)
    in_place, tried = choose_in_place(shape, arch.heads, device, attention)
    runner = Runner(
        Decoder(arch, draft.weights, attention, positions, in_place), KvCache(shape, blocks, device)
    )
    trials += tried + choose_graphs(runner, settings.max_running)
    return Draft(runner, blocks, positions, served.vocab_size, clock, settings.prefix_cache), trials
