"""How often each token of a request has come, as arrays that grow by one entry at a time."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class TokenCounts:
    """Distinct tokens of a request: those of the prompt (for the repetition penalty) and the sampled ones."""

    def __init__(self, prompt: Iterable[int] = ()) -> None:
        known = sorted(set(prompt))
        self._size = len(known)
        self._ids = torch.zeros(max(64, 2 * self._size), dtype=torch.int64)
        self._sampled = torch.zeros(len(self._ids))
        self._ids[: self._size] = torch.tensor(known, dtype=torch.int64)
        self._place = {token: i for i, token in enumerate(known)}

    @property
    def ids(self) -> torch.Tensor:
        """[distinct] int64, each once."""
        return self._ids[: self._size]

    @property
    def sampled(self) -> torch.Tensor:
        """[distinct] float32: how often each was sampled; 0 for one that stands in the prompt only."""
        return self._sampled[: self._size]

    def add(self, token: int) -> None:
        """One more sampled token."""
        place = self._place.get(token)
        if place is None:
            place = self._place[token] = self._size
            if place == len(self._ids):
                self._ids = torch.cat((self._ids, torch.zeros_like(self._ids)))
                self._sampled = torch.cat((self._sampled, torch.zeros_like(self._sampled)))
            self._ids[place] = token
            self._size += 1
        self._sampled[place] += 1
