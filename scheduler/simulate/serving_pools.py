"""The pools of a capacity plan: `H100=8@7.516`, and the columns and limits that follow."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..autoscale.columns import capped_key
from ..autoscale.mix import Column
from ..autoscale.step_model import Bucket, Slo, StepModel, max_rate
from ..errors import ServingModelError
from ..fit.accelerators import DATA_SHEETS, accelerator
from ..fit.chunks import MIN_CHUNK_TOKENS
from ..fit.model import ModelShape
from ..power import Phase
from ..power.curves import LEVELS, PUBLISHED, slowdown
from .serving_trace import Buckets, ServingTrace

LLAMA_8B = ModelShape("llama", 32, 4096, 14336, 32, 8, 128, 128_256, tied=False)
"""Llama-3-8B's dimensions."""
PHASES = (Phase.PREFILL, Phase.DECODE)
LEAST_RATE = 1e-3
"""Below this a replica is of no use to a bucket."""
PER_NODE = 8
"""Accelerators of a node, where the pool does not say."""
MOST_ACCELERATORS = 1_000_000
"""Of a pool; each of its nodes may fail."""
_POOL = re.compile(
    r"(?P<type>[^=@:]+)(:(?P<zone>[^=@:]+))?=((?P<nodes>\d+)x)?(?P<count>\d+)@(?P<price>\d+(\.\d+)?)"
)


@dataclass(frozen=True, slots=True)
class Pool:
    """Accelerators of one type at one price."""

    type: str
    stock: int
    price_per_h: float
    zone: str = ""
    per_node: int = PER_NODE

    @property
    def name(self) -> str:
        """Its type, and its zone if it is in one."""
        return f"{self.type}:{self.zone}" if self.zone else self.type


def parse_pools(text: str) -> tuple[Pool, ...]:
    """`L4=8@0.70,H100:a=2x8@7.516`: type, zone, how many (or nodes and how many on each), price per hour of one.

    Raises:
        ServingModelError: not of that form, an unknown type, a type named twice, too many accelerators, or no price.
    """
    pools: list[Pool] = []
    for item in text.split(","):
        match = _POOL.fullmatch(item.strip())
        if match is None:
            raise ServingModelError(
                f"--pools: {item.strip()!r} is not TYPE=COUNT@PRICE_PER_HOUR; also TYPE:ZONE=NODESxPER_NODE@PRICE_PER_HOUR"
            )
        if accelerator(match["type"]) is None or match["type"] == "cpu":
            known = ", ".join(name for name in DATA_SHEETS if name != "cpu")
            raise ServingModelError(
                f"--pools: there is no data sheet of {match['type']!r}; known are {known}"
            )
        count = int(match["count"])
        per_node, stock = (
            (PER_NODE, count) if match["nodes"] is None else (count, int(match["nodes"]) * count)
        )
        if per_node < 1:
            raise ServingModelError(f"--pools: {item.strip()!r} has nodes without accelerators")
        pool = Pool(match["type"], stock, float(match["price"]), match["zone"] or "", per_node)
        if stock > MOST_ACCELERATORS:
            raise ServingModelError(
                f"--pools: {item.strip()!r} has {stock} accelerators; a pool has at most {MOST_ACCELERATORS}"
            )
        if pool.price_per_h == 0:
            raise ServingModelError(
                f"--pools: {item.strip()!r} costs nothing, so that no number of replicas is the cheapest; give a price, such as"
                " 0.01"
            )
        if any(other.name == pool.name for other in pools):
            raise ServingModelError(f"--pools: {pool.name} is named twice")
        pools.append(pool)
    return tuple(pools)


def parse_slo(text: str) -> Slo:
    """`ttft=2,tpot=0.1,percentile=99`: seconds; what is missing keeps its default.

    Raises:
        ServingModelError: another key, or a value that is no SLO.
    """
    values = {"ttft": Slo().ttft_s, "tpot": Slo().tpot_s, "percentile": Slo().percentile}
    seen: set[str] = set()
    for item in text.split(","):
        key, _, value = item.strip().partition("=")
        if key in seen:
            raise ServingModelError(f"--slo: {key} is given twice; give it once")
        seen.add(key)
        if key not in values:
            raise ServingModelError(
                f"--slo: {item.strip()!r} is not ttft=, tpot= or percentile= with a number"
            )
        try:
            values[key] = float(value)
        except ValueError as error:
            raise ServingModelError(f"--slo: {value!r} is not a number") from error
    return Slo(values["ttft"], values["tpot"], values["percentile"])


def parse_caps(text: str) -> tuple[float, ...]:
    """`80,60`: parts of the boards' watts, in per cent.

    Raises:
        ServingModelError: not of that form, or out of range.
    """
    try:
        caps = sorted({int(item) for item in text.split(",")}, reverse=True)
    except ValueError as error:
        raise ServingModelError(f"--caps: {text!r} is not per cent, separated by commas") from error
    if not all(LEVELS[0] <= cap < 100 for cap in caps):
        raise ServingModelError(f"--caps: {text!r} is not between {LEVELS[0]} and 99 %")
    return tuple(cap / 100 for cap in caps)


def step_models(
    pools: Sequence[Pool], shape: ModelShape, caps: Sequence[float] = ()
) -> tuple[dict[str, StepModel], dict[str, str]]:
    """Step models by pool, and under caps by `capped_key`; and why the other pools cannot hold the model."""
    models: dict[str, StepModel] = {}
    refused: dict[str, str] = {}
    for pool in pools:
        device = accelerator(pool.type)
        assert device is not None
        try:
            models[pool.name] = whole = StepModel.prior(pool.type, shape, device)
            for cap in caps:
                key, slow = capped_key(pool.name, cap), (slowdown(PUBLISHED[phase], cap) for phase in PHASES)
                models[key] = whole.under_cap(key, cap, *slow)
        except ServingModelError as error:
            refused[pool.name] = str(error)
    if not models:
        raise ServingModelError("no pool can hold the model: " + "; ".join(refused.values()))
    return models, refused


def columns_of(
    pools: Sequence[Pool],
    models: Mapping[str, StepModel],
    buckets: Buckets,
    slo: Slo,
    caps: Sequence[float] = (),
) -> tuple[Column, ...]:
    """One column per pool that can hold the model, and one more for each cap.

    Raises:
        ServingModelError: no type meets the SLO for any bucket; names the type that comes nearest.
    """
    columns = tuple(
        Column(
            key,
            pool.name,
            pool.price_per_h,
            tuple(_useful(max_rate(models[key], bucket, slo)) for bucket in buckets.means),
            watts=models[key].watts,
            failure_domain=pool.zone,
            power_cap=cap,
        )
        for pool in pools
        for cap in (1.0, *caps)
        if (key := capped_key(pool.name, cap)) in models
    )
    if not any(rate > 0 for column in columns for rate in column.rates):
        raise ServingModelError(
            f"no pool meets the SLO at any load. {_nearest(models, buckets.means[0], slo)}"
        )
    return columns


def out_of_reach(
    trace: ServingTrace,
    buckets: Buckets,
    columns: Sequence[Column],
    models: Mapping[str, StepModel],
    slo: Slo,
) -> tuple[int, str]:
    """Requests of the buckets that no pool serves within the SLO, and a sentence about them; 0 and none: there are none."""
    counts = Counter(buckets.index(prompt) for prompt in trace.prompts)
    nowhere = [b for b in range(len(buckets.means)) if not any(column.rates[b] > 0 for column in columns)]
    number = sum(counts[b] for b in nowhere)
    if not number:
        return 0, ""
    most = max(nowhere, key=lambda b: counts[b])
    return number, (
        f"{number} of the {len(trace)} requests are within the SLO on no pool, however many replicas there are."
        f" {_nearest(models, buckets.means[most], slo)}. Nothing is planned for them, and others wait behind them."
    )


def _nearest(models: Mapping[str, StepModel], bucket: Bucket, slo: Slo) -> str:
    """What the type that comes nearest to the SLO makes of one such request."""
    tokens = bucket.prompt_tokens + bucket.output_tokens
    asked = f"prompts of {bucket.prompt_tokens:.0f} tokens"
    holding = [model for model in models.values() if tokens <= model.kv_tokens]
    if not holding:
        largest = max(models.values(), key=lambda model: model.kv_tokens)
        return (
            f"No KV cache holds {asked} with answers of {bucket.output_tokens:.0f}: the largest, of {largest.name}, has"
            f" {largest.kv_tokens:.0f}"
        )

    rate, name = max((max_rate(model, bucket, slo), model.name) for model in holding)
    if rate > 0:
        return (
            f"Nearest is {name}: of {asked} with answers of {bucket.output_tokens:.0f}, one in {1 / rate:.0f} s is all that a"
            " replica serves"
        )

    def alone(model: StepModel) -> tuple[float, float]:
        step_s = model.decode_s(1, bucket.prompt_tokens)
        return model.prompt_s(bucket.prompt_tokens) + step_s, step_s + MIN_CHUNK_TOKENS * model.d_s

    nearest = min(holding, key=lambda m: max(alone(m)[0] / slo.ttft_s, alone(m)[1] / slo.tpot_s))
    ttft_s, tpot_s = alone(nearest)
    return (
        f"Nearest is {nearest.name}: alone with {asked} it takes {ttft_s:.3f} s to the first token, and {tpot_s:.4f} s per"
        " token while others' prompts come"
    )


def _useful(rate: float) -> float:
    return rate if math.isfinite(rate) and rate >= LEAST_RATE else 0.0
