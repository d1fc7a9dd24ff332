"""An engine without its thread, for tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from busbar.workloads.serving.delta import Delta
from busbar.workloads.serving.loader import Loaded, load
from busbar.workloads.serving.sampling import SamplingParams
from busbar.workloads.serving.settings import EngineSettings


def load_engine(folder: Path, clock: Callable[[], float] = lambda: 0.0, **changes: Any) -> Loaded:
    settings: dict[str, Any] = {"block_tokens": 16, "threads": 1} | changes
    return load(EngineSettings(folder, **settings), "tiny", clock)


def generate(
    loaded: Loaded, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]
) -> list[list[Delta]]:
    """Runs all prompts together to their ends; every request's deltas."""
    core = loaded.core
    every = params if isinstance(params, list) else [params] * len(prompts)
    for index, (prompt, asked) in enumerate(zip(prompts, every, strict=True)):
        core.submit(str(index), prompt, asked, 0.0)
    found: list[list[Delta]] = [[] for _ in prompts]
    while not core.idle:
        for delta in core.step():
            found[int(delta.request_id)].append(delta)
    return found


def tokens_of(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.tokens]


def text_of(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def greedy_params(max_tokens: int, **changes: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **changes)
