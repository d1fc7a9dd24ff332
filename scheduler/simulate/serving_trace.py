"""Loads of a model service: requests with their times and lengths, from public traces or generated.

A request has an arrival, a prompt and an output length. The fleet sees of it the prompt's length when it arrives and
never its output length before the end: buckets are ranges of prompt lengths, each with its mean output.
"""

from __future__ import annotations

import ast
import json
import math
import random
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..autoscale.step_model import Bucket
from ..errors import TraceError
from .csv_rows import cells_of, fault, moment_s, named_rows, value_of, whole

EDGES = (64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 16384)
"""Upper ends of the prompt buckets; the last bucket is open."""
DAY_S, WINDOW_S = 86_400, 600
MOST_DAYS = 31
"""Of a load on a fleet."""
CV_RANGE = (0.5, 3.0)
"""ServeGen's windows name coefficients of variation in the hundreds; they are clamped to this."""
COPY_JITTER_S = 5.0
MOST_S = 1e9
"""Between the first and the last request of a file: with more, single steps of an engine are lost in the digits."""
MOST_TOKENS = 10_000_000
"""Of a prompt or an output; more than any model takes, and what the arrays of a trace hold."""
MOST_REQUESTS = 50_000_000
"""Of a trace: their times and lengths take 16 bytes each, and their making takes more."""


@dataclass(frozen=True, slots=True)
class ServingTrace:
    """Requests in order of arrival, from second 0."""

    name: str
    arrivals_s: array[float]
    prompts: array[int]
    outputs: array[int]
    duration_s: float
    earlier: tuple[tuple[float, float], ...] = field(default=())
    """(second of the trace's clock, requests per second) of earlier days: what production would remember."""

    def __len__(self) -> int:
        return len(self.arrivals_s)

    def refuse_long(self) -> None:
        """Raises TraceError where a fleet would be simulated, second by second, for more than `MOST_DAYS`."""
        if self.duration_s > MOST_DAYS * DAY_S:
            raise TraceError(
                f"{self.name}: its requests lie {self.duration_s / DAY_S:.4g} days apart, of at most {MOST_DAYS}; arrival_s is in"
                " seconds; take the first part with --hours"
            )

    def until(self, seconds: float) -> ServingTrace:
        """Its first part."""
        count = bisect_right(self.arrivals_s, seconds)
        return ServingTrace(
            self.name,
            self.arrivals_s[:count],
            self.prompts[:count],
            self.outputs[:count],
            min(seconds, self.duration_s),
            self.earlier,
        )


@dataclass(frozen=True, slots=True)
class Buckets:
    """The prompt ranges in which a trace has requests, with the means of each."""

    edges: tuple[int, ...]
    means: tuple[Bucket, ...]

    @classmethod
    def of(cls, trace: ServingTrace) -> Buckets:
        """From all requests of a trace."""
        sums = [[0, 0, 0] for _ in range(len(EDGES) + 1)]
        for prompt, output in zip(trace.prompts, trace.outputs, strict=True):
            row = sums[bisect_right(EDGES, prompt - 1)]
            row[0] += 1
            row[1] += prompt
            row[2] += output
        used = [i for i, row in enumerate(sums) if row[0]]
        means = tuple(Bucket(max(sums[i][1] / sums[i][0], 1), max(sums[i][2] / sums[i][0], 1)) for i in used)
        return cls(tuple(EDGES[i] for i in used[:-1]), means)

    def index(self, prompt: int) -> int:
        """The bucket of a prompt."""
        return bisect_right(self.edges, prompt - 1)


def _trace(name: str, requests: Iterable[tuple[float, int, int]], duration_s: float) -> ServingTrace:
    ordered = sorted(requests)
    if not ordered:
        raise TraceError(f"{name}: there is no request in it")
    return ServingTrace(
        name,
        array("d", (row[0] for row in ordered)),
        array("i", (max(row[1], 1) for row in ordered)),
        array("i", (max(row[2], 1) for row in ordered)),
        duration_s,
    )


def requests_csv(path: Path, scale: float = 1.0, seed: int = 0) -> ServingTrace:
    """Azure's columns (TIMESTAMP, ContextTokens, GeneratedTokens), or arrival_s, prompt_tokens, output_tokens.

    With `scale`, each request stands for so many, each up to `COPY_JITTER_S` away from it: minutes keep their
    pattern, and single requests do not arrive as a block."""
    found = [_request(path, line, row) for line, row in named_rows(path)]
    if not found:
        raise TraceError(f"{path}: there is no request in it")
    if len(found) * scale > MOST_REQUESTS:
        raise TraceError(
            f"{path}: {len(found)} requests, {scale:g} times, are more than {MOST_REQUESTS}; scale by less"
        )
    first = min(row[0] for row in found)
    moved = [(at - first, prompt, output) for at, prompt, output in found]
    duration_s = max(row[0] for row in moved) + 1
    if duration_s > MOST_S:
        raise TraceError(
            f"{path}: its requests lie {duration_s:.4g} s apart, of at most {MOST_S:g}; arrival_s is in seconds; correct the"
            " times"
        )
    return _trace(path.stem, _scaled(moved, scale, duration_s, random.Random(seed)), duration_s)


def _request(path: Path, line: int, row: Mapping[str, str]) -> tuple[float, int, int]:
    """Time, prompt and output tokens."""
    try:
        if "TIMESTAMP" in row:
            request = moment_s(row, "TIMESTAMP"), whole(row, "ContextTokens"), whole(row, "GeneratedTokens")
        else:
            request = value_of(row, "arrival_s"), whole(row, "prompt_tokens"), whole(row, "output_tokens")
    except (KeyError, OverflowError, ValueError) as error:
        raise TraceError(
            f"{path}:{line}: this line is no request ({fault(error)}); the columns are arrival_s, prompt_tokens,"
            " output_tokens, or Azure's TIMESTAMP, ContextTokens, GeneratedTokens"
        ) from error
    if not all(0 <= tokens <= MOST_TOKENS for tokens in request[1:]):
        raise TraceError(f"{path}:{line}: a length is not between 0 and {MOST_TOKENS} tokens")
    return request


def _scaled(
    requests: Sequence[tuple[float, int, int]], scale: float, duration_s: float, rng: random.Random
) -> list[tuple[float, int, int]]:
    if scale == 1:
        return list(requests)
    made: list[tuple[float, int, int]] = []
    for at, prompt, output in requests:
        copies = int(scale) + (rng.random() < scale - int(scale))
        for _ in range(copies):
            moved = at + rng.uniform(-COPY_JITTER_S, COPY_JITTER_S)
            made.append((min(max(moved, 0.0), duration_s), prompt, output))
    return made


def steps(
    rates: Sequence[float], each_s: float, lengths: Sequence[tuple[int, int]], seed: int = 0
) -> ServingTrace:
    """Poisson arrivals at one rate after the other, with lengths drawn from a list."""
    rng, requests = random.Random(seed), []
    for number, rate in enumerate(rates):
        at = 0.0
        while rate > 0 and (at := at + rng.expovariate(rate)) < each_s:
            requests.append((number * each_s + at, *rng.choice(lengths)))
    return _trace("steps", requests, each_s * len(rates))


def servegen(folder: Path, day: int, peak_rps: float, seed: int = 0) -> ServingTrace:
    """One day of a ServeGen category; its busiest ten minutes have `peak_rps`. The first day is 1.

    Arrivals: a Gamma renewal process per client and ten-minute window, with the window's rate and coefficient of
    variation (clamped to `CV_RANGE`). Lengths: the client's histogram of that time of the same day; the clients
    without histograms (the public files have them for four) use those of the clients that have, in turn. The rates of
    the days before are in `earlier`."""
    clients = [_client(path) for path in sorted(folder.glob("*-trace.csv"))]
    tables = [_lengths(path) for path in sorted(folder.glob("*-dataset.json"))]
    names = [path.name.removesuffix("-dataset.json") for path in sorted(folder.glob("*-dataset.json"))]
    if not clients or not tables:
        raise TraceError(f"{folder}: needs ServeGen's *-trace.csv and at least one *-dataset.json")
    begin = (day - 1) * DAY_S
    windows = [begin + i * WINDOW_S for i in range(DAY_S // WINDOW_S)]
    total = {at: sum(client[1].get(at, (0.0, 1.0))[0] for client in clients) for at in windows}
    if day < 1 or not any(total.values()):
        last = max(max(client[1]) for client in clients) // DAY_S + 1
        raise TraceError(f"{folder}: day {day} is not in it; it has days 1 to {last}")
    scale = peak_rps / max(total.values())
    rng, requests = random.Random(seed), []
    without = 0
    for name, rates in clients:
        if name in names:
            table = tables[names.index(name)]
        else:
            table, without = tables[without % len(tables)], without + 1
        for at in windows:
            rate, cv = rates.get(at, (0.0, 1.0))
            requests += _window(rng, at - begin, rate * scale, cv, table, at)
    found = _trace(f"{folder.name} day {day}", requests, DAY_S)
    before = sorted({at for client in clients for at in client[1] if begin - 7 * DAY_S <= at < begin})
    earlier = tuple(
        (float(at - begin), scale * sum(client[1].get(at, (0.0, 1.0))[0] for client in clients))
        for at in before
    )
    return ServingTrace(found.name, found.arrivals_s, found.prompts, found.outputs, DAY_S, earlier)


def _client(path: Path) -> tuple[str, dict[int, tuple[float, float]]]:
    """Name, and window start -> (requests per second, coefficient of variation)."""
    rates: dict[int, tuple[float, float]] = {}
    for line, row in cells_of(path):
        try:
            rate, cv = float(row[1]), float(row[2] or 1)
            rates[int(float(row[0]))] = (rate if rate > 0 else 0.0, cv if math.isfinite(cv) else 1.0)
        except (IndexError, OverflowError, ValueError) as error:
            raise TraceError(f"{path}:{line}: not a window of ServeGen: {error}") from error
        if math.isinf(rate):
            raise TraceError(f"{path}:{line}: not a window of ServeGen: its rate is not finite")
    return path.name.removesuffix("-trace.csv"), rates


_Table = dict[int, tuple[tuple[list[int], list[float]], tuple[list[int], list[float]]]]
"""Start -> prompt and output lengths with cumulative weights."""


def _lengths(path: Path) -> _Table:
    table: _Table = {}
    try:
        for start, row in json.loads(path.read_text(encoding="utf-8-sig")).items():
            prompts = ast.literal_eval(str(row["input_tokens"]))
            outputs = ast.literal_eval(str(row["output_tokens"]))
            if prompts and outputs:
                table[int(float(start))] = (_cumulative(prompts), _cumulative(outputs))
    except (AttributeError, KeyError, RecursionError, SyntaxError, TypeError, ValueError) as error:
        raise TraceError(f"{path} has no lengths of ServeGen: {fault(error)}") from error
    if not table:
        raise TraceError(f"{path}: there are no lengths in it")
    return table


def _cumulative(histogram: dict[int, float]) -> tuple[list[int], list[float]]:
    lengths = sorted(int(float(length)) for length in histogram)
    by_length = {int(float(length)): float(weight) for length, weight in histogram.items()}
    total, sums = 0.0, []
    for length in lengths:
        total += by_length[length]
        sums.append(total)
    return lengths, sums


def _window(
    rng: random.Random, start_s: float, rate: float, cv: float, table: _Table, at: int
) -> list[tuple[float, int, int]]:
    if rate <= 0:
        return []
    cv = min(max(cv, CV_RANGE[0]), CV_RANGE[1])
    shape = 1 / (cv * cv)
    known = max((start for start in table if start <= at), default=min(table))
    (prompts, prompt_sums), (outputs, output_sums) = table[known]
    # The first gap is cut at a random place: a window is no start of a burst.
    now = -rng.random() * rng.gammavariate(shape, 1 / (shape * rate))
    moments: list[float] = []
    while (now := now + rng.gammavariate(shape, 1 / (shape * rate))) < WINDOW_S:
        if now >= 0:
            moments.append(start_s + now)
    drawn = rng.choices(prompts, cum_weights=prompt_sums, k=len(moments))
    written = rng.choices(outputs, cum_weights=output_sums, k=len(moments))
    return list(zip(moments, drawn, written, strict=True))


def rates_by_minute(trace: ServingTrace, buckets: Buckets) -> list[list[float]]:
    """Requests per second by bucket, for every whole minute."""
    minutes = [[0.0] * len(buckets.means) for _ in range(max(math.ceil(trace.duration_s / 60), 1))]
    for at, prompt in zip(trace.arrivals_s, trace.prompts, strict=True):
        minutes[min(int(at // 60), len(minutes) - 1)][buckets.index(prompt)] += 1 / 60
    if len(minutes) > 1 and trace.duration_s % 60 > 0:
        minutes.pop()
    return minutes
