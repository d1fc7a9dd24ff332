"""What one step of the engine adds to one request."""

from __future__ import annotations

from dataclasses import dataclass

from busbar.workloads.serving.prompt_logprobs import PromptLogprobs
from busbar.workloads.serving.sampling import TokenLogprob


@dataclass(frozen=True)
class Delta:
    """What one step adds to one request."""

    request_id: str
    tokens: tuple[int, ...] = ()
    index: int = 0
    """Completion tokens so far, these included."""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: str | None = None
    """None, stop, length or error. Whoever makes text of the tokens may find a stop string, and so an earlier end."""
    error: str | None = None
    leaving: bool = False
    """With `error`: the process shuts down, and the request is not to blame."""
    moved_to: str = ""
    """With `leaving`: the address of the replica that has the request's keys and values."""
    refused: bool = False
    """With `error`: the request is to blame, and would fail everywhere."""
    cached: int = 0
    """Prompt tokens that were in the prefix cache."""
    vector: tuple[float, ...] | None = None
    """Of a text that was to become one; not normalised."""
    prompt_logprobs: PromptLogprobs | None = None
    """With the first token, where they were asked for."""
