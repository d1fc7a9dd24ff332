"""An engine without its thread, for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from busbar.workloads.serving.answer_text import AnswerText
from busbar.workloads.serving.core import EngineCore
from busbar.workloads.serving.delta import Delta
from busbar.workloads.serving.loader import Loaded, load
from busbar.workloads.serving.sampling import SamplingParams
from busbar.workloads.serving.settings import EngineSettings


def load_engine(folder: Path, clock: Callable[[], float] = lambda: 0.0, **changes: Any) -> Loaded:
    settings: dict[str, Any] = {"block_tokens": 16, "threads": 1} | changes
    return load(EngineSettings(folder, **settings), "tiny", clock)


@dataclass(frozen=True)
class Said(Delta):
    """A delta with its text, and `finish` as the text says."""

    text: str = ""


class Reader:
    """Takes a request's deltas as the server does: it ends the request at a stop string."""

    def __init__(self, core: EngineCore, params: SamplingParams, had: Sequence[int] = ()) -> None:
        """`had`: tokens that came before."""
        self.said: list[Said] = []
        self._core = core
        self._text = AnswerText(core.vocabulary, core.special, core.rules.ends(params), params)
        self._text.add(had)

    def take(self, delta: Delta) -> None:
        if self._text.has_stopped:
            return
        text, finish = self._text.take(delta) if delta.error is None else ("", delta.finish)
        self.said.append(Said(**{**vars(delta), "finish": finish}, text=text))
        self._core.read(delta.request_id, delta.index, finish)


def generate(
    loaded: Loaded, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]
) -> list[list[Said]]:
    """Runs all prompts together to their ends; every request's deltas."""
    core = loaded.core
    every = params if isinstance(params, list) else [params] * len(prompts)
    readers = [Reader(core, asked) for asked in every]
    for index, (prompt, asked) in enumerate(zip(prompts, every, strict=True)):
        core.submit(str(index), prompt, asked, 0.0, confirms=True)
    while not core.idle:
        for delta in core.step():
            readers[int(delta.request_id)].take(delta)
    return [reader.said for reader in readers]


def tokens_of(deltas: Sequence[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.tokens]


def text_of(deltas: Sequence[Said]) -> str:
    return "".join(delta.text for delta in deltas)


def greedy_params(max_tokens: int, **changes: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **changes)
