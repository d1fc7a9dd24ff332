"""What the operator learns of an engine from vLLM's counters, against an engine whose steps are known.

    python benchmarks/vllm_counters.py [--seeds 4] [--seconds 150] [--out FILE]

The engine is simulated step by step, with the seconds of a vLLM 0.32.0 on a CPU and 5 % of noise: prompts are processed whole, up
to 2,048 tokens in a step, and counted when they are done, as vLLM counts them. `ModelServer` reads its counters every two
seconds under four mixed loads of `--seconds` each; then the time per token that the learnt step model predicts at three loads
is held against the simulated one (bar: within 15 % for each seed). The same with the true steps says what the formula alone
errs by. Virtual time: the result depends on the seeds only.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import statistics
import time
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.progress import show

from busbar.kube.types.engines import VLLM
from busbar.operator.pods.model_server import Exposition, ModelServer
from busbar.scheduler.autoscale.step_model import Bucket, StepModel, token_s

BAR = 0.15
STEP = (0.012, 0.0008, 0.0016, 0.0004)
"""Seconds of a step, of each sequence, of a thousand tokens of context, of a prompt token."""
NOISE = 0.05
BUDGET = 2048
CACHE = 65536
READ_EVERY_S = 2.0
LEARNT_FROM = ((1.0, 20, 200, 64), (3.0, 20, 400, 64), (5.0, 100, 600, 48), (2.0, 500, 1500, 32))
"""Requests a second, least and most prompt tokens, output tokens: those of `vllm_behind_gateway.py`."""
HELD_AGAINST = ((2.0, 128, 64), (4.0, 128, 64), (2.0, 512, 32))
HELD_S = 600.0


@dataclass
class Sequence:
    """One request in the engine."""

    prompt: int
    output: int
    left: int
    context: int = 0
    tokens: int = 0
    first_s: float = 0.0
    last_s: float = 0.0


@dataclass
class Engine:
    """Steps, and the counters after each of them."""

    rng: random.Random
    now_s: float = 0.0
    running: list[Sequence] = field(default_factory=list)
    coming: list[tuple[float, int, int]] = field(default_factory=list)
    steps: int = 0
    generated: int = 0
    computed: int = 0
    gaps: int = 0
    gaps_s: float = 0.0
    token_times: list[float] = field(default_factory=list)
    """Mean seconds per token after the first, of each request that has ended."""
    log: list[tuple[float, Exposition]] = field(default_factory=list)

    def load(self, rate: float, least: int, most: int, output: int, seconds: float) -> tuple[float, float]:
        """Poisson requests for some time: the mean of their times per token, and the rate that it was."""
        at, end, before = self.now_s, self.now_s + seconds, len(self.token_times)
        while (at := at + self.rng.expovariate(rate)) < end:
            self.coming.append((at, self.rng.randint(least, most), output))
        count = len(self.coming)
        while self.now_s < end:
            self._step(end)
        return statistics.fmean(self.token_times[before:]), count / seconds

    def _step(self, end_s: float) -> None:
        while self.coming and self.coming[0][0] <= self.now_s:
            _, prompt, output = self.coming.pop(0)
            self.running.append(Sequence(prompt, output, prompt))
        if not self.running:
            self.now_s = min(end_s, self.coming[0][0]) if self.coming else end_s
            self._note()
            return
        decoding, room = [s for s in self.running if not s.left], BUDGET
        chunks: list[tuple[Sequence, int]] = []
        for one in self.running:
            if one.left and room > 0:
                chunks.append((one, min(one.left, room)))
                room -= chunks[-1][1]
        self.now_s += self._seconds(decoding, sum(tokens for _, tokens in chunks))
        self.steps += 1
        for one in decoding:
            self.gaps += 1
            self.gaps_s += self.now_s - one.last_s
            self._token(one)
        for one, tokens in chunks:
            one.left, one.context = one.left - tokens, one.context + tokens
            if not one.left:
                self.computed += one.prompt
                one.first_s = self.now_s
                self._token(one)
        self.running = [one for one in self.running if one.left or one.tokens < one.output]
        self._note()

    def _seconds(self, decoding: list[Sequence], prompt_tokens: int) -> float:
        context = sum(one.context for one in decoding)
        content = (1.0, len(decoding), context / 1000, prompt_tokens)
        taken = sum(each * amount for each, amount in zip(STEP, content, strict=True))
        return taken * math.exp(self.rng.gauss(0, NOISE))

    def _token(self, one: Sequence) -> None:
        one.tokens, one.context, one.last_s = one.tokens + 1, one.context + 1, self.now_s
        self.generated += 1
        if one.tokens == one.output:
            self.token_times.append((one.last_s - one.first_s) / (one.output - 1))

    def _note(self) -> None:
        used = sum(one.context for one in self.running) / CACHE
        found = Exposition(
            engines=1, running=len(self.running), waiting=0, cache_used=min(1.0, used), cache_tokens=CACHE,
            block_tokens=16, sleep_level=0, ended=len(self.token_times), steps=self.steps, decode_steps=self.steps,
            generated=self.generated, computed=self.computed, gaps=self.gaps, gaps_s=self.gaps_s,
        )  # fmt: skip
        self.log.append((self.now_s, found))


def readings(engine: Engine) -> Iterator[tuple[float, Exposition]]:
    """What the operator sees of it: the counters after the last step before each reading."""
    times = [at for at, _ in engine.log]
    at = times[0]
    while at < times[-1]:
        yield at, engine.log[bisect_right(times, at) - 1][1]
        at += READ_EVERY_S


def run(seed: int, seconds: float) -> dict[str, Any]:
    engine, reader = Engine(random.Random(seed)), ModelServer(VLLM, "uid-m")
    for of in LEARNT_FROM:
        engine.load(*of, seconds)
    for at, found in readings(engine):
        reader.saw(found, at)
    learnt = reader.speed.model.theta
    rows = []
    for rate, prompt, output in HELD_AGAINST:
        engine.load(rate, prompt, prompt, output, 30.0)  # what was left of the load before
        seen, real = engine.load(rate, prompt, prompt, output, HELD_S)
        errors = [token_s(_model(step), Bucket(prompt, output), real) / seen - 1 for step in (learnt, STEP)]
        rows.append(
            {
                "requestsPerSecond": rate, "promptTokens": prompt, "outputTokens": output,
                "milliseconds": round(1000 * seen, 2), "errorOfLearnt": round(errors[0], 3),
                "errorOfTrueSteps": round(errors[1], 3), "bar": "met" if abs(errors[0]) <= BAR else "missed",
            }
        )  # fmt: skip
    return {
        "seed": seed,
        "intervals": reader.speed.model.steps,
        "learnt": [round(v, 6) for v in learnt],
        "rows": rows,
    }


def _model(step: tuple[float, ...] | list[float]) -> StepModel:
    a, b, c, d = step
    return StepModel("cpu", a, b, c / 1000, max(d, 1e-9), 0.0, CACHE)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=150.0, help="of each load (default 150)")
    parser.add_argument("--out", type=Path, help="also write the result there, as JSON")
    given, begun = parser.parse_args(), time.process_time()
    found = []
    for seed in range(given.seeds):
        found.append(run(seed, given.seconds))
        show("seeds", seed + 1, given.seeds)
    result = {
        "command": f"python benchmarks/vllm_counters.py --seeds {given.seeds} --seconds {given.seconds:g}",
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {"python": platform.python_version()},
        "machine": f"{platform.machine()}; virtual time",
        "cpuSeconds": round(time.process_time() - begun, 1),
        "worst": [max((one["rows"][i]["errorOfLearnt"] for one in found), key=abs) for i in range(len(HELD_AGAINST))],
        "runs": found,
    }  # fmt: skip
    text = json.dumps(result, indent=1)
    if given.out is not None:
        given.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
