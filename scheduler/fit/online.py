"""What is learnt of a serving engine's speed while it runs: by our engine itself, and by the operator from the counters
of a model server that reports no more.

The model of a step is t = a + b·B + c·Σctx + d·C with B decoding sequences, Σctx thousands of tokens
of context and C prompt tokens; plain sums give tokens/s. A row may also be the mean of several steps: the model is linear, so
the mean content of steps takes their mean time.

What is known is kept by cell: steps of about the same B, Σctx and C (powers of two, four and two). A cell is the sums of
which least squares consist, and forgets by its own steps alone (`CELL_STEPS`). So an hour of single requests does not
take away what a batch of sixteen costs. The fit weighs every cell that has seen `FIT_STEPS` alike, and errors as parts
of the cell's mean time: where the true times are no plane, it is as good for large steps as for the most frequent ones.

A machine gets slower or faster as a whole (other work on it, a power limit), and cells that are not visited meanwhile would be
left behind. The pace is what steps take beside the mean of their own cell, averaged over `PACE_STEPS`. Cells keep times
divided by the pace of their moment, and the model is multiplied by the pace of now. Where a change lasts, the pace takes n of
n + `PACE_STEPS` parts of it while cells of n steps in all are visited, and these take the rest: both average, each at its speed.

No work takes negative time, but noise can make a fitted coefficient negative where steps hardly differ in it: the fit is the
best one without negative coefficients.

A row of n steps weighs n² / `ROW_STEPS`². Its error is that of its ends, where a step has begun and is not counted: the same
number of seconds however many steps there are, and so 1/n of it in their mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations
from math import ceil, sqrt

FEATURES = 4
ROW_STEPS = 30
"""A row of so many steps weighs as much as one step that was measured by itself."""
TRUSTED_STEPS = 64
"""Steps the model must have seen before anything is decided by it."""
CELL_STEPS = 5000
"""Steps of its own over which a cell averages: the noise of a step is a tenth of it or more, and changes of the whole machine
are the pace's."""
PACE_STEPS = 200
"""Steps over which the pace averages, a few seconds of decoding: shorter, it would follow noise. A step's own noise of a tenth
is less than 1 % of the pace then."""
ERROR_STEPS = 1000
"""Steps over which the error that is told averages."""
FIT_STEPS = 64
"""Steps from which on a cell weighs no more in the fit: their mean errs by a few percent, less than a plane does."""
LEAST_CELL_STEPS = 8
"""Steps of a cell before it says anything about the pace."""
MOST_RATIO = 2.0
"""A step that takes more than so many times its cell's mean, or less than that part of it, is an accident; the pace takes it
for so much."""
REFIT_STEPS = 32
"""Steps between two fits, which take some hundred times as long as adding a step to its cell."""
MOST_CELLS = 256
"""Kept, about 0.8 KiB each. An engine with 256 places and a cache of a million tokens visits fewer than a hundred."""
PROMPT_UNIT = 32
"""Prompt tokens of the smallest cells: smaller pieces take the same time."""
RIDGE = 1e-9
"""Added to the normalised diagonal, so that features which steps never told apart share what they explain together."""

_PAIRS = [(i, j) for i in range(FEATURES + 1) for j in range(i, FEATURES + 1)]
_SECONDS = _PAIRS.index((0, FEATURES))
_CellKey = tuple[int, int, int]


@dataclass(slots=True)
class _Cell:
    """Weighted sums of the products of (1, B, Σctx, C, seconds), in the order of `_PAIRS`; the first is the weight."""

    sums: list[float] = field(default_factory=lambda: [0.0] * len(_PAIRS))

    @property
    def weight(self) -> float:
        return self.sums[0]

    def take(self, row: Sequence[float], weight: float) -> None:
        kept = max(0.0, CELL_STEPS - weight) / max(self.weight, CELL_STEPS - weight, 1e-9)
        self.sums = [
            kept * old + weight * row[i] * row[j] for old, (i, j) in zip(self.sums, _PAIRS, strict=True)
        ]

    def expected_s(self, row: Sequence[float], theta: Sequence[float]) -> float:
        """Of a step: the cell's mean, and what the step has more or less than that by the model."""
        weight = self.weight
        return (self.sums[_SECONDS] / weight) + sum(
            t * (v - s / weight) for t, v, s in zip(theta, row, self.sums[:FEATURES], strict=False)
        )


@dataclass
class OnlineStepModel:
    """Coefficients in seconds: per step, per sequence, per 1000 tokens of context, per prompt token."""

    theta: list[float] = field(default_factory=lambda: [0.0] * FEATURES)
    """None of them is negative."""
    steps: int = 0
    squared_error: float = 0.0
    settled: float = 0.0
    """Weights of the rows that the error is of."""
    pace: float = 1.0
    _cells: dict[_CellKey, _Cell] = field(default_factory=dict)
    """That which was visited last stands last."""
    _fitted_at: int = 0

    def learn(
        self,
        decoding: float,
        context_tokens: float,
        prompt_tokens: float,
        seconds: float,
        weight: float = 1.0,
    ) -> None:
        error = seconds - self.predict(decoding, context_tokens, prompt_tokens)
        x = (1.0, decoding, context_tokens / 1000.0, prompt_tokens)
        cell = self._visited(decoding, context_tokens, prompt_tokens)
        if cell.weight >= LEAST_CELL_STEPS:
            self._follow(cell.expected_s(x, [t / self.pace for t in self.theta]), seconds, weight)
        cell.take((*x, seconds / self.pace), weight)
        self.steps += 1
        if self.steps - self._fitted_at >= min(REFIT_STEPS, 1 + self.steps // 8):
            self._fit()
        if self.steps > 2 * FEATURES:  # the first errors are those of knowing nothing
            self.settled += weight
            part = max(weight / self.settled, min(1.0, weight / ERROR_STEPS))
            self.squared_error += part * (error * error - self.squared_error)

    def predict(self, decoding: float, context_tokens: float, prompt_tokens: float) -> float:
        x = (1.0, decoding, context_tokens / 1000.0, prompt_tokens)
        return sum(t * v for t, v in zip(self.theta, x, strict=True))

    @property
    def rms_error_s(self) -> float:
        return sqrt(self.squared_error)

    def _visited(self, decoding: float, context_tokens: float, prompt_tokens: float) -> _Cell:
        key = (
            int(decoding).bit_length(),
            int(context_tokens).bit_length() // 2,
            ceil(prompt_tokens / PROMPT_UNIT).bit_length(),
        )
        cell = self._cells.pop(key, None) or _Cell()
        self._cells[key] = cell
        if len(self._cells) > MOST_CELLS:
            del self._cells[next(iter(self._cells))]
        return cell

    def _follow(self, expected_s: float, seconds: float, weight: float) -> None:
        """Moves the pace by a step that should have taken so long at a pace of one."""
        if expected_s > 0:
            ratio = min(max(seconds / (self.pace * expected_s), 1 / MOST_RATIO), MOST_RATIO)
            self.pace *= 1 + min(1.0, weight / PACE_STEPS) * (ratio - 1)

    def _fit(self) -> None:
        self._fitted_at = self.steps
        total = [0.0] * len(_PAIRS)
        for cell in self._cells.values():
            weight, seconds = cell.weight, cell.sums[_SECONDS]
            if seconds > 0:
                scale = min(weight, FIT_STEPS) * weight / (seconds * seconds)
                total = [t + scale * s for t, s in zip(total, cell.sums, strict=True)]
        self.theta = [self.pace * each for each in _nonnegative(total)]


def _nonnegative(sums: Sequence[float]) -> list[float]:
    """The coefficients >= 0 with the least squared error by these sums; all subsets of them are tried as zeros."""
    table = dict(zip(_PAIRS, sums, strict=True))
    scale = [sqrt(table[i, i]) or 1.0 for i in range(FEATURES)]
    gram = [
        [table[min(i, j), max(i, j)] / (scale[i] * scale[j]) + RIDGE * (i == j) for j in range(FEATURES)]
        for i in range(FEATURES)
    ]
    right = [table[i, FEATURES] / scale[i] for i in range(FEATURES)]
    best, most = [0.0] * FEATURES, 0.0
    for used in chain.from_iterable(combinations(range(FEATURES), n) for n in range(FEATURES, 0, -1)):
        found = _solved([[gram[i][j] for j in used] for i in used], [right[i] for i in used])
        if found is None or min(found) < 0:
            continue
        explained = sum(v * right[i] for i, v in zip(used, found, strict=True))
        if explained > most:
            best, most = [0.0] * FEATURES, explained
            for i, value in zip(used, found, strict=True):
                best[i] = value / scale[i]
        if len(used) == FEATURES:
            break  # no subset fits better
    return best


def _solved(rows: list[list[float]], right: list[float]) -> list[float] | None:
    """x of a small linear system, by elimination with pivots; None where it is singular."""
    size = len(right)
    table = [[*row, value] for row, value in zip(rows, right, strict=True)]
    for i in range(size):
        pivot = max(range(i, size), key=lambda k: abs(table[k][i]))
        if abs(table[pivot][i]) < 1e-300:
            return None
        table[i], table[pivot] = table[pivot], table[i]
        for k in range(size):
            if k != i:
                factor = table[k][i] / table[i][i]
                table[k] = [a - factor * b for a, b in zip(table[k], table[i], strict=True)]
    return [row[size] / row[i] for i, row in enumerate(table)]


@dataclass(frozen=True, slots=True)
class StepSums:
    """What steps were made of, and what they took, in all. Never changed, so any thread may read it whole."""

    steps: float = 0
    sequences: float = 0
    context_tokens: float = 0
    prompt_tokens: float = 0
    seconds: float = 0.0

    def plus(self, other: StepSums) -> StepSums:
        return StepSums(
            self.steps + other.steps,
            self.sequences + other.sequences,
            self.context_tokens + other.context_tokens,
            self.prompt_tokens + other.prompt_tokens,
            self.seconds + other.seconds,
        )


@dataclass
class Speed:
    """Sums over the steps since the start."""

    model: OnlineStepModel = field(default_factory=OnlineStepModel)
    prefill: StepSums = StepSums()
    """Of the steps with more prompt tokens than decoded ones."""
    decode: StepSums = StepSums()
    """Of all others."""
    decode_tokens: float = 0
    decode_s: float = 0.0
    prefill_tokens: float = 0
    prefill_s: float = 0.0
    for_prompts_s: float = 0.0
    """Of all steps, also those that decode besides: what their prompt tokens took, by the model."""
    for_decoding_s: float = 0.0

    def record(
        self,
        decoding: float,
        context_tokens: float,
        prompt_tokens: float,
        seconds: float,
        wrong: int = 0,
        steps: float = 1,
        beside_s: float = 0.0,
    ) -> None:
        """One step, or the totals of several. Where prompt tokens are more than those decoded, it counts as prefill;
        `wrong` of those decoded were guesses that gave no token. `beside_s` went to decoding besides, and is not what the
        model explains."""
        each = (decoding / steps, context_tokens / steps, prompt_tokens / steps, seconds / steps)
        self.model.learn(*each, weight=(steps / ROW_STEPS) ** 2 if steps > 1 else 1.0)
        prompts_s = seconds * self._prompt_part(decoding, prompt_tokens, seconds)
        self.for_prompts_s += prompts_s
        self.for_decoding_s += seconds - prompts_s + beside_s
        row = StepSums(steps, decoding, context_tokens, prompt_tokens, seconds)
        if prompt_tokens > decoding:
            self.prefill = self.prefill.plus(row)
            self.prefill_tokens += prompt_tokens + decoding - wrong
            self.prefill_s += seconds
        elif decoding:
            self.decode = self.decode.plus(row)
            self.decode_tokens += decoding - wrong + prompt_tokens
            self.decode_s += seconds + beside_s

    def _prompt_part(self, decoding: float, prompt_tokens: float, seconds: float) -> float:
        """Of the seconds of a step: of its tokens while nothing better is known."""
        if not prompt_tokens or not decoding or seconds <= 0:
            return float(bool(prompt_tokens))
        each = self.prompt_token_s if self.model.steps >= TRUSTED_STEPS else None
        if each is None:
            return prompt_tokens / (prompt_tokens + decoding)
        return min(1.0, prompt_tokens * each / seconds)

    @property
    def prompt_token_s(self) -> float | None:
        """What a further prompt token costs, None before anything was measured."""
        each = self.model.theta[3]
        if self.model.steps >= TRUSTED_STEPS and each > 0:
            return each
        return self.prefill_s / self.prefill_tokens if self.prefill_s else None

    def report(self) -> dict[str, object]:
        """The part of /status that the performance table reads; null where nothing was measured."""
        a, b, c, d = self.model.theta
        return {
            "prefillTokensPerSecond": self.prefill_tokens / self.prefill_s if self.prefill_s else None,
            "decodeTokensPerSecond": self.decode_tokens / self.decode_s if self.decode_s else None,
            "stepModel": {
                "secondsPerStep": a,
                "secondsPerSequence": b,
                "secondsPerThousandContextTokens": c,
                "secondsPerPromptToken": d,
                "rmsErrorSeconds": self.model.rms_error_s,
                "steps": self.model.steps,
            }
            if self.model.steps >= 2 * FEATURES
            else None,
        }
