"""What `busbar bench` asks of an OpenAI endpoint: requests with their times, lengths and texts; pure, the same for one seed.

A load is either open, where requests come at their times whatever the endpoint does (a rate, or a file), or closed, where so many
are under way and the next one comes when one has ended.
"""

from __future__ import annotations

import csv
import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from busbar.cli.errors import UsageProblem

_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem hand part "
    "place case week company system program question work number night point home water room mother area money story fact "
    "month lot right study book eye job word business issue side kind head house service friend father power hour game line "
    "end member law car city name team minute idea body back parent face others level office door health person art war "
    "history party result change morning reason research girl guy moment air teacher force education"
)
WORDS = _TEXT.split()
PROBES = (32, 160)
"""Words of the two requests that tell how many tokens a word has, and a request besides its words."""
MOST_TOKENS = 10_000_000
"""Of a prompt or an answer; more than any model takes, and a prompt is made in memory."""


@dataclass(frozen=True)
class Lengths:
    """Tokens: evenly between two numbers."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """`256`, or `128-1024`, up to MOST_TOKENS. Raises ValueError."""
        low, _, high = text.partition("-")
        found = cls(int(low), int(high or low))
        if not 1 <= found.least <= found.most <= MOST_TOKENS:
            raise ValueError(text)
        return found

    def draw(self, random: Random) -> int:
        return random.randint(self.least, self.most)


@dataclass(frozen=True, slots=True)
class Request:
    """One request; `at_s` is since the load's begin, and 0 in a closed load."""

    number: int
    at_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Load:
    """What one row of the result was measured with."""

    name: str
    requests: Sequence[Request]
    concurrency: int | None = None
    """None: an open load."""

    @property
    def most_output_tokens(self) -> int:
        return max((one.output_tokens for one in self.requests), default=0)


def open_load(rate: float, count: int, prompts: Lengths, outputs: Lengths, seed: int) -> Load:
    """Poisson arrivals of so many requests a second."""
    random, at_s, requests = Random(seed), 0.0, []
    for number in range(count):
        requests.append(Request(number, at_s, prompts.draw(random), outputs.draw(random)))
        at_s += random.expovariate(rate)
    return Load(f"{rate:g} req/s", requests)


def closed_load(concurrency: int, count: int, prompts: Lengths, outputs: Lengths, seed: int) -> Load:
    """So many requests under way at any time."""
    random = Random(seed)
    requests = [Request(number, 0.0, prompts.draw(random), outputs.draw(random)) for number in range(count)]
    return Load(f"{concurrency} at once", requests, concurrency)


def load_of_file(path: Path, count: int | None, speed: float) -> Load:
    """Requests of a CSV with arrival_s, prompt_tokens and output_tokens, so many times as fast. Raises UsageProblem."""
    rows: list[tuple[float, int, int]] = []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            table = csv.DictReader(file)
            rows += (_read(path, table.line_num, row) for row in table)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageProblem(f"{path} cannot be read as CSV: {error}") from error
    if not rows:
        raise UsageProblem(f"{path} has no request in it")
    rows.sort()
    first = rows[0][0]
    requests = [
        Request(number, (at_s - first) / speed, prompt, output)
        for number, (at_s, prompt, output) in enumerate(rows[:count])
    ]
    return Load(path.name if speed == 1 else f"{path.name} x {speed:g}", requests)


def _read(path: Path, line: int, row: dict[str, str]) -> tuple[float, int, int]:
    try:
        found = float(row["arrival_s"]), int(row["prompt_tokens"]), int(row["output_tokens"])
    except (KeyError, TypeError, ValueError) as error:
        raise UsageProblem(
            f"{path}:{line} is no request: the columns are arrival_s, prompt_tokens, output_tokens"
        ) from error
    if not math.isfinite(found[0]) or min(found[1:]) < 1 or max(found[1:]) > MOST_TOKENS:
        raise UsageProblem(
            f"{path}:{line}: a time that is no number, or a length not between 1 and {MOST_TOKENS}"
        )
    return found


@dataclass(frozen=True)
class Texts:
    """Prompts of about so many tokens: words drawn by chance, of which the first may be the same in all requests."""

    tokens_per_word: float = 1.0
    besides: float = 0.0
    """Tokens of a request without words: the chat template."""
    shared_tokens: int = 0
    seed: int = 0

    @classmethod
    def measured(cls, prompt_tokens: Sequence[int], shared_tokens: int, seed: int) -> Texts:
        """From the prompt tokens that requests of `PROBES` words had."""
        slope = (prompt_tokens[1] - prompt_tokens[0]) / (PROBES[1] - PROBES[0])
        if slope <= 0:
            return cls(shared_tokens=shared_tokens, seed=seed)
        return cls(slope, max(0.0, prompt_tokens[0] - slope * PROBES[0]), shared_tokens, seed)

    def of(self, request: Request) -> str:
        """The words of a request; two of one load are different behind what they share."""
        count = max(1, round((request.prompt_tokens - self.besides) / self.tokens_per_word))
        shared = min(round(self.shared_tokens / self.tokens_per_word), count - 1)
        return " ".join(
            [
                *words(shared, Random(f"{self.seed} shared")),
                *words(count - shared, Random(f"{self.seed} {request.number}")),
            ]
        )


def words(count: int, random: Random) -> Iterator[str]:
    """So many words by chance."""
    return (random.choice(WORDS) for _ in range(max(0, count)))


def percentile(values: Sequence[float] | array[float], percent: float) -> float | None:
    """The nearest rank; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]
