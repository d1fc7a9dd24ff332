"""The engines of a ModelService that are not Busbar's own, one row each: how they are started, read, drained and refused.

    ModelService ──► rules of the CRD       what an engine cannot do is refused (engine_rules.py)
                 ──► pod                    command, flags, the file with its API key, probes, preStop hook
                 ──► GET /metrics           names of what runs and waits, of the KV cache, of steps and tokens
                 ──► routes                 most requests at a time, whether it orders requests by `priority`

A row holds facts of one release, named in `version`:

- vLLM 0.32.0 ran on a CPU, behind the gateway, and its metrics were recorded.
- SGLang 0.5.23 has not run here. Its row was written from the source of that release: `srt/utils/auth.py`,
  `srt/utils/server_args_config_parser.py`, `srt/arg_groups/fields/`, `srt/arg_groups/validation_hook.py`,
  `srt/entrypoints/http_server.py`, `srt/entrypoints/openai/serving_base.py`, `srt/managers/tokenizer_manager.py` and
  `srt/observability/metrics_collector.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType


class ServiceEngine(StrEnum):
    BUILTIN = "builtin"
    VLLM = "vllm"
    SGLANG = "sglang"


Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Series:
    """The samples of one metric that have these labels; a label that a sample lacks counts as empty."""

    name: str
    labels: Labels = ()
    in_labels: tuple[str, ...] = ()
    """The value is the product of these labels, of a metric that only has labels."""
    sign: int = 1


Sum = tuple[Series, ...]
"""Added up over series and engines."""
Reading = tuple[Sum, ...]
"""The first sum of which the server has a series counts: releases differ in their names."""


def _names(*readings: Reading) -> tuple[str, ...]:
    return tuple(series.name for reading in readings for terms in reading for series in terms)


def _series(name: str, **labels: str) -> Series:
    return Series(name, tuple(labels.items()))


def _one(name: str, **labels: str) -> Reading:
    return ((_series(name, **labels),),)


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """Names in an engine's Prometheus exposition. Counters count since the process began."""

    prefix: str
    engines: str
    """A gauge that each engine of a data-parallel server has; one without it counts nothing."""
    engine_label: str
    ranks: tuple[str, ...]
    """Labels of the processes of one engine. Of the samples that have them, those of the first process count."""
    running: Reading
    waiting: Reading
    used: Reading
    """Part of the KV cache, 0 to 1."""
    cache_tokens: Reading
    block_tokens: Reading
    steps: Reading
    decode_steps: Reading
    """Those that make a token for each sequence: all of an engine that computes prompts in the same steps."""
    generated: Reading
    computed: Reading
    """Prompt tokens that were not in the prefix cache."""
    ended: Reading
    gaps: Reading
    """How many gaps between tokens of one stream were seen."""
    gaps_s: Reading
    levels: tuple[Reading, ...] = ()
    """1 while it sleeps at the level 1, 2 and so on."""

    @property
    def in_hand(self) -> tuple[str, ...]:
        """The gauges of requests that run or wait."""
        return _names(self.running, self.waiting)

    @property
    def names(self) -> tuple[str, ...]:
        """All that are read."""
        return (
            self.engines,
            *_names(
                *(self.running, self.waiting, self.used, self.cache_tokens, self.block_tokens, self.steps),
                *(self.decode_steps, self.generated, self.computed, self.ended, self.gaps, self.gaps_s),
                *self.levels,
            ),
        )


@dataclass(frozen=True, slots=True)
class ForeignEngine:
    """One engine that is not ours."""

    engine: ServiceEngine
    title: str
    version: str
    config_file: str
    """Key and file of its `--config`: its API key, so that the key is in neither its arguments nor its environment."""
    reserved_args: str
    """CEL and Python: arguments that would replace the file or the key, also abbreviated, as its parser accepts them."""
    command: tuple[str, ...]
    """Empty: the image's own."""
    model_flag: str
    always: tuple[str, ...]
    """Arguments of every replica."""
    length_flag: str
    kv_bytes_flag: str | None
    """None: it takes no size of the KV cache in bytes."""
    kv_args: str
    """Its arguments for that, where it takes none."""
    running_flag: str
    """How many requests it computes together."""
    parallel_args: str
    """Arguments that say how it uses several accelerators."""
    adapters_flag: str
    full_adapter_names: bool
    """Whether it knows an adapter as `MODEL:NAME`, as it is asked for, or takes what is behind the colon for its name."""
    ranked_by: Labels
    """Arguments with which it orders requests by the field `priority`, lowest first; an empty value: a flag without one."""
    colon_in_model: bool
    """Whether its model's name may have a colon."""
    ready_path: str
    health_path: str
    metrics: EngineMetrics
    uncounted: str
    """Why its metrics may lack the gauge `engines`."""


_V_STEPS = _one("vllm:iteration_tokens_total_count")
_V_CACHE = "vllm:cache_config_info"
_V_SLEEP = "vllm:engine_sleep_state"

VLLM = ForeignEngine(
    engine=ServiceEngine.VLLM,
    title="vLLM",
    version="0.32.0",
    config_file="vllm.yaml",
    reserved_args="^--(api([-_](k(ey?)?)?)?|conf(ig?)?)(=|$)",
    command=(),
    model_flag="--model",
    always=(),
    length_flag="--max-model-len",
    kv_bytes_flag="--kv-cache-memory-bytes",
    kv_args="",
    running_flag="--max-num-seqs",
    parallel_args=r"(--(tensor|pipeline|data)-parallel-size|-tp|-pp|-dp)\b",
    adapters_flag="--lora-modules",
    full_adapter_names=True,
    ranked_by=(("--scheduling-policy", "priority"),),
    colon_in_model=True,
    ready_path="/health",
    health_path="/health",
    metrics=EngineMetrics(
        prefix="vllm:",
        engines="vllm:num_requests_running",
        engine_label="engine",
        ranks=(),
        running=_one("vllm:num_requests_running"),
        waiting=_one("vllm:num_requests_waiting"),
        used=(*_one("vllm:kv_cache_usage_perc"), *_one("vllm:gpu_cache_usage_perc")),
        cache_tokens=(
            (Series(_V_CACHE, in_labels=("kv_cache_size_tokens",)),),
            (Series(_V_CACHE, in_labels=("num_gpu_blocks", "block_size")),),
        ),
        block_tokens=((Series(_V_CACHE, in_labels=("block_size",)),),),
        steps=_V_STEPS,
        decode_steps=_V_STEPS,
        generated=_one("vllm:generation_tokens_total"),
        computed=(
            *_one("vllm:prompt_tokens_by_source_total", source="local_compute"),
            # Releases that do not count them by source.
            (Series("vllm:prompt_tokens_total"), Series("vllm:prefix_cache_hits_total", sign=-1)),
        ),
        ended=_one("vllm:request_success_total"),
        gaps=(
            *_one("vllm:inter_token_latency_seconds_count"),
            *_one("vllm:time_per_output_token_seconds_count"),
        ),
        gaps_s=(
            *_one("vllm:inter_token_latency_seconds_sum"),
            *_one("vllm:time_per_output_token_seconds_sum"),
        ),
        levels=(
            _one(_V_SLEEP, sleep_state="weights_offloaded"),
            _one(_V_SLEEP, sleep_state="discard_all"),
        ),
    ),
    uncounted="--disable-log-stats is among its arguments",
)

_S_PASSES = "sglang:cuda_graph_passes_total"
_S_TOKENS = "sglang:realtime_tokens_total"

SGLANG = ForeignEngine(
    engine=ServiceEngine.SGLANG,
    title="SGLang",
    version="0.5.23",
    config_file="sglang.yaml",
    reserved_args="^--(ap|conf)",  # no other argument begins so
    command=("python3", "-m", "sglang.launch_server"),
    model_flag="--model-path",
    always=("--host", "0.0.0.0", "--enable-metrics", "--enable-cache-report"),
    length_flag="--context-length",
    kv_bytes_flag=None,
    kv_args="--mem-fraction-static or --max-total-tokens",
    running_flag="--max-running-requests",
    parallel_args=r"--((tensor|pipeline|data)-parallel-size|[tpd]p(-size)?)(=|$)",
    adapters_flag="--lora-paths",
    full_adapter_names=False,
    ranked_by=(("--enable-priority-scheduling", ""), ("--schedule-low-priority-values-first", "")),
    colon_in_model=False,
    ready_path="/ready",  # /health computes a token, which takes a second and more
    health_path="/health",
    metrics=EngineMetrics(
        prefix="sglang:",
        engines="sglang:max_total_num_tokens",
        engine_label="dp_rank",
        ranks=("pp_rank", "tp_rank"),  # each process has the gauges, the first one counts requests
        # With priorities each gauge is there once more for each of them.
        running=_one("sglang:num_running_reqs", priority=""),
        waiting=(
            (
                _series("sglang:num_queue_reqs", priority=""),
                _series("sglang:num_grammar_queue_reqs", priority=""),
            ),
        ),
        used=_one("sglang:token_usage"),
        cache_tokens=_one("sglang:max_total_num_tokens"),
        block_tokens=_one("sglang:page_size"),
        steps=_one(_S_PASSES),
        decode_steps=(tuple(_series(_S_PASSES, mode=mode) for mode in ("decode_cuda_graph", "decode_none")),),
        # Tokens of decode passes, and the first one of each answer, which the pass of its prompt makes.
        generated=((_series(_S_TOKENS, mode="decode"), Series("sglang:time_to_first_token_seconds_count")),),
        computed=_one(_S_TOKENS, mode="prefill_compute"),
        ended=_one("sglang:num_requests_total"),
        gaps=_one("sglang:inter_token_latency_seconds_count"),
        gaps_s=_one("sglang:inter_token_latency_seconds_sum"),
    ),
    uncounted="another release with other names",
)

FOREIGN: Mapping[ServiceEngine, ForeignEngine] = MappingProxyType({row.engine: row for row in (VLLM, SGLANG)})
"""By `spec.engine`; Busbar's own is not here."""
