"""The sizes of a service's requests: how many come in each class of prompts, and how long prompts and outputs are there.

The gateway counts what was answered by classes of prompt and output. A prompt's class decides where a request may go,
so the classes here are those of prompts, each with its mean lengths. Older answers count less, by `FADES_S`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from busbar.kube.contracts.demand import PROMPT_EDGES, SizeCount
from busbar.scheduler.autoscale.step_model import Bucket

FADES_S = 600.0
LEAST_SHARE = 0.001
"""Classes with fewer of the requests are left out: they decide nothing, and one long prompt needs no replica."""
BUCKETS = len(PROMPT_EDGES) + 1


@dataclass
class Sizes:
    """Sums that fade: requests, prompt tokens and output tokens by class."""

    _rows: list[list[float]] = field(default_factory=lambda: [[0.0, 0.0, 0.0] for _ in range(BUCKETS)])
    _at_s: float | None = None

    def learn(self, counted: Iterable[SizeCount], now_s: float) -> None:
        """What was answered since the last call."""
        fade = 1.0 if self._at_s is None else math.exp(-max(0.0, now_s - self._at_s) / FADES_S)
        self._at_s = now_s
        self._rows = [[value * fade for value in row] for row in self._rows]
        for size in counted:
            row = self._rows[size.prompt]
            row[0] += size.count
            row[1] += size.prompt_tokens
            row[2] += size.output_tokens

    @property
    def known(self) -> bool:
        return sum(row[0] for row in self._rows) > 0

    @property
    def shares(self) -> tuple[float, ...]:
        """Of all requests; classes that hardly have any count as empty."""
        total = sum(row[0] for row in self._rows)
        found = [row[0] if row[0] >= LEAST_SHARE * total else 0.0 for row in self._rows]
        return tuple(count / sum(found) for count in found) if total > 0 else (0.0,) * BUCKETS

    @property
    def means(self) -> tuple[Bucket, ...]:
        """Mean lengths; of a class without requests, the class's end and the mean output of all."""
        total = max(sum(row[0] for row in self._rows), 1e-9)
        output = sum(row[2] for row in self._rows) / total
        ends = (*PROMPT_EDGES, 2 * PROMPT_EDGES[-1])
        return tuple(
            Bucket(max(row[1] / row[0], 1), max(row[2] / row[0], 1))
            if row[0] > 0
            else Bucket(end, max(output, 1))
            for row, end in zip(self._rows, ends, strict=True)
        )
