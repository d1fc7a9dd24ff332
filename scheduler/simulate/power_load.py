"""Requests for the row of servers: replayed, generated from published rates, or synthetic. Deterministic by seed."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import TraceError
from .csv_rows import cells_of
from .serving_trace import requests_csv

Floats = NDArray[np.float64]

PEAK_RATE_PER_S = 1.5
"""Requests per second and serving server at the peak: a row of 40 serving servers then peaks at 79 % of a feed of
40 x 6.5 kW, as POLCA publishes for its row (arXiv 2308.12908)."""
STRETCH_S = 1200.0
"""Azure: the busiest stretch of this length is replayed again and again."""
LEAST_STRETCH_S = 60.0
"""Azure: of a shorter trace nobody knows what a minute of it looks like."""
JITTER_S = 3.0
"""Azure: copies of a request are spread over this time before and after it, so bursts stay bursts."""
WINDOW_S = 600.0
"""ServeGen gives rates and their burstiness for windows of this length."""
DAY_S = 86_400.0
AZURE_FILE = Path("azure_llm_2023/AzureLLMInferenceTrace_conv.csv")
SERVEGEN_FOLDER = Path("servegen/m-small")


@dataclass(frozen=True)
class Requests:
    """Arrays of one element per request, by arrival."""

    at_s: Floats
    prompt: Floats
    """Tokens."""
    output: Floats
    """Tokens."""
    high: NDArray[np.bool_]
    """High priority."""


def load_maker(text: str, data: Path | None) -> Callable[[int, float, int], Requests]:
    """From `synthetic`, `azure` or `servegen:DAY` a function (serving servers, seconds, seed) → requests.

    Raises:
        TraceError: the name is not one of these, or the files are not in `data`.
    """
    if text == "synthetic":
        return synthetic
    day = re.fullmatch(r"servegen:(\d+)", text)
    if text != "azure" and not day:
        raise TraceError(f"--load: {text!r} is not azure, servegen:DAY or synthetic")
    if data is None:
        raise TraceError(f"--load {text} needs --data: the folder that holds {AZURE_FILE.parts[0]}/")
    trace = _azure(data / AZURE_FILE)
    if day is None:
        return lambda servers, seconds, seed: replayed(trace, servers, seconds, seed)
    windows = _servegen(data / SERVEGEN_FOLDER, int(day[1]))
    return lambda servers, seconds, seed: generated(windows, trace, servers, seconds, seed)


def synthetic(servers: int, seconds: float, seed: int) -> Requests:
    """Poisson arrivals at the peak rate in slow waves, with log-normal lengths like those of a chat service."""
    random = np.random.default_rng(seed)
    most = PEAK_RATE_PER_S * servers
    count = random.poisson(most * seconds)
    at_s = np.sort(random.uniform(0, seconds, count))
    kept = random.uniform(size=count) < 0.85 + 0.15 * np.sin(2 * math.pi * at_s / 600)
    at_s = at_s[kept]
    prompt = np.clip(random.lognormal(6.6, 0.95, len(at_s)), 8, 8000)
    output = np.clip(random.lognormal(5.1, 0.7, len(at_s)), 4, 1000)
    return _by_class(random, at_s, prompt, output)


def _by_class(random: np.random.Generator, at_s: Floats, prompt: Floats, output: Floats) -> Requests:
    order = np.argsort(at_s, kind="stable")
    return Requests(at_s[order], prompt[order], output[order], random.uniform(size=len(order)) < 0.5)


def _azure(path: Path) -> Floats:
    """Columns: seconds since the first, prompt, output."""
    if not path.is_file():
        raise TraceError(f"--data: there is no {path}")
    trace = requests_csv(path)
    found = np.column_stack((trace.arrivals_s, trace.prompts, trace.outputs)).astype(np.float64)
    if found[-1, 0] < LEAST_STRETCH_S:
        raise TraceError(
            f"{path}: its requests lie within {found[-1, 0]:g} s; a load needs those of {LEAST_STRETCH_S:.0f} s or more"
        )
    return found


def replayed(trace: Floats, servers: int, seconds: float, seed: int) -> Requests:
    """The busiest stretch of a trace at the peak rate: every request is copied a Poisson number of times."""
    random = np.random.default_rng(seed)
    stretch_s = min(STRETCH_S, float(trace[-1, 0]))
    ends = np.searchsorted(trace[:, 0], trace[:, 0] + stretch_s)
    first = int(np.argmax(ends - np.arange(len(trace))))
    stretch = trace[first : ends[first]]
    copies = PEAK_RATE_PER_S * servers * stretch_s / len(stretch)
    parts = []
    for k in range(math.ceil(seconds / stretch_s)):
        rows = np.repeat(stretch, random.poisson(copies, len(stretch)), axis=0)
        rows[:, 0] += k * stretch_s - stretch[0, 0] + random.uniform(-JITTER_S, JITTER_S, len(rows))
        parts.append(rows)
    every = np.concatenate(parts)
    every = every[(every[:, 0] >= 0) & (every[:, 0] < seconds)]
    return _by_class(random, every[:, 0], every[:, 1], every[:, 2])


@dataclass(frozen=True, slots=True)
class _Window:
    rate_per_s: float
    weibull: bool
    shape: float


def _servegen(folder: Path, day: int) -> list[list[_Window]]:
    """Of each client the windows of one day, the first being day 1."""
    files = sorted(folder.glob("*-trace.csv"))
    if not files:
        raise TraceError(f"--data: there are no *-trace.csv in {folder}")
    clients = [_windows(path, day) for path in files]
    if not any(window.rate_per_s > 0 for client in clients for window in client):
        raise TraceError(f"--load: nobody sends anything on day {day} of {folder}; name another day")
    return clients


def _windows(path: Path, day: int) -> list[_Window]:
    """Of one client."""
    begin = (day - 1) * DAY_S
    found: dict[float, _Window] = {}
    for line, row in cells_of(path):
        try:
            at_s, rate, shape = float(row[0]), float(row[1]), float(row[4]) if row[3] else 1.0
        except (IndexError, ValueError) as error:
            raise TraceError(f"{path}:{line}: not a window of a ServeGen client: {error}") from error
        if begin <= at_s < begin + DAY_S:
            if not (math.isfinite(rate) and math.isfinite(shape)):
                raise TraceError(f"{path}:{line}: the rate or the shape is no finite number")
            found[at_s] = _Window(rate, row[3] == "Weibull", shape)
    moments = [begin + k * WINDOW_S for k in range(int(DAY_S / WINDOW_S))]
    if sorted(found) != moments:
        raise TraceError(
            f"--load: {path.name} has no complete day {day}: it has {len(found)} windows of it, and {len(moments)} begin"
            f" every {WINDOW_S:.0f} s"
        )
    return [found[at_s] for at_s in moments]


def generated(
    clients: list[list[_Window]], trace: Floats, servers: int, seconds: float, seed: int
) -> Requests:
    """ServeGen's rates and burstiness around the day's peak, with the lengths of the Azure trace.

    Rates are scaled so that the busiest window has the peak rate; the shape of the gaps between requests is kept.
    The lengths are Azure's because only four of the twelve clients publish theirs, the largest not among them.
    """
    random = np.random.default_rng(seed)
    total = np.array([[window.rate_per_s for window in client] for client in clients]).sum(axis=0)
    count = min(math.ceil(seconds / WINDOW_S), len(total))
    peak = int(np.argmax(total))
    first = min(max(peak - count // 2, 0), len(total) - count)
    scale = PEAK_RATE_PER_S * servers / total[peak]
    at_s = np.concatenate(
        [
            (k * WINDOW_S) + _arrivals(random, client[first + k], scale)
            for client in clients
            for k in range(count)
        ]
    )
    at_s = at_s[at_s < seconds]
    rows = random.integers(0, len(trace), len(at_s))
    return _by_class(random, at_s, trace[rows, 1], trace[rows, 2])


def _arrivals(random: np.random.Generator, window: _Window, scale: float) -> Floats:
    rate = window.rate_per_s * scale
    if rate <= 0:
        return np.empty(0)
    shape = (
        max(window.shape, 0.1) if window.shape > 0 else 1.0
    )  # below 0.1 a window is one burst and a long silence
    count = int(rate * WINDOW_S * 1.5 + 50)
    if window.weibull:
        gaps = random.weibull(shape, count) / (rate * math.gamma(1 + 1 / shape))
    else:
        gaps = random.gamma(shape, 1 / (rate * shape), count)
    at_s: Floats = np.cumsum(gaps) - gaps[0] * random.uniform()
    return at_s[at_s < WINDOW_S]
