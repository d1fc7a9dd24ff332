"""Prometheus metrics under vLLM's names, labels and buckets (a frozen surface), and a few of ours.

Pickers, dashboards and autoscaling rules made for vLLM then work on this engine unchanged. All
updates come from the engine thread; a scrape may come from any.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from busbar.kube.contracts.workload import RestartReport
from busbar.workloads.serving.hosttier import HostTier

TTFT_S: tuple[float, ...] = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0)
TTFT_S += (2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
ITL_S: tuple[float, ...] = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0)
ITL_S += (2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
LATENCY_S: tuple[float, ...] = (
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    40.0,
    50.0,
    60.0,
)
LATENCY_S += (120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
LABELS = ("model_name", "engine")
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
"""By level; vLLM's words."""
MOST_ADAPTERS = 64
"""Adapter names with counters of their own; later ones share the label `other`."""


def one_two_five(limit: int) -> list[int]:
    """1, 2, 5, 10, 20, 50 … up to `limit`: buckets for token counts."""
    buckets: list[int] = []
    scale = 1
    while True:
        for step in (1, 2, 5):
            if step * scale > limit:
                return buckets or [1]
            buckets.append(step * scale)
        scale *= 10


class _Followed:
    """Counters that follow totals which are counted elsewhere."""

    def __init__(self, *counters: Counter) -> None:
        self._counters, self._told = counters, (0,) * len(counters)

    def tell(self, *totals: int) -> None:
        """The totals now, in the counters' order; where one is smaller than before they have begun anew."""
        if any(now < before for now, before in zip(totals, self._told, strict=True)):
            self._told = (0,) * len(totals)
        for each, now, before in zip(self._counters, totals, self._told, strict=True):
            each.inc(now - before)
        self._told = totals


class Metrics:
    """One engine's metrics, in a registry of their own."""

    def __init__(self, model_id: str, max_model_len: int) -> None:
        self.registry = CollectorRegistry()
        self._values = (model_id, "0")
        self._model_len = max_model_len

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, LABELS, registry=self.registry).labels(*self._values)

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, LABELS, registry=self.registry).labels(*self._values)

        def histogram(name: str, text: str, buckets: Iterable[float]) -> Histogram:
            made = Histogram(name, text, LABELS, registry=self.registry, buckets=tuple(buckets))
            return made.labels(*self._values)

        def counters(name: str, text: str, label: str) -> Counter:
            return Counter(name, text, (*LABELS, label), registry=self.registry)

        def gauges(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(name, text, (*LABELS, *labels), registry=self.registry)

        self.running = gauge("vllm:num_requests_running", "Requests in the batch.")
        self.waiting = gauge("vllm:num_requests_waiting", "Requests waiting for a place in the batch.")
        self.kv_usage = gauge("vllm:kv_cache_usage_perc", "Used share of the KV cache, 0 to 1.")
        self.kv_usage_old = gauge("vllm:gpu_cache_usage_perc", "Older name of kv_cache_usage_perc.")
        self.prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens processed.")
        self.generation_tokens = counter("vllm:generation_tokens", "Tokens generated.")
        self.preemptions = counter("vllm:num_preemptions", "Times a request lost its KV blocks.")
        self._prefixes = _Followed(
            counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
            counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache."),
        )
        self._guesses = _Followed(
            counter("vllm:spec_decode_num_drafts", "Times that guessed tokens of a request were checked."),
            counter("vllm:spec_decode_num_draft_tokens", "Guessed tokens that were checked."),
            counter("vllm:spec_decode_num_accepted_tokens", "Guessed tokens that were right."),
        )
        self._experts = _Followed(
            counter("busbar:expert_queries", "Experts that a layer computed with, each once per step."),
            counter("busbar:expert_hits", "Those of them that were in memory when the layer asked."),
            counter("busbar:expert_prefetches", "Experts that were read ahead."),
            counter("busbar:expert_prefetch_hits", "Those of them that the layer then used."),
            counter(
                "busbar:expert_read_bytes", "Bytes of experts read because memory does not hold them all."
            ),
        )
        self.saturated = gauge(
            "busbar:saturated", "1 while the promised time per token cannot be kept by smaller steps."
        )
        self._success = counters("vllm:request_success", "Requests ended, by reason.", "finished_reason")
        self._rejections = counters(
            "vllm:admission_rejections", "Requests refused at the door, by reason.", "reason"
        )
        self._phases = counters(
            "busbar:phase_seconds",
            "Seconds spent on prompts (prefill), on decoding and on nothing (idle).",
            "phase",
        )
        self._phases_told: dict[str, float] = {}
        self.phases({"prefill": 0.0, "decode": 0.0, "idle": 0.0})
        copied = counters(
            "busbar:kv_blocks_copied", "KV blocks copied to host memory (out) and back (in).", "direction"
        )
        self._copied = _Followed(*(copied.labels(*self._values, way) for way in ("out", "in")))
        self._host_usage = gauge("busbar:host_kv_usage_perc", "Used share of the host's KV blocks, 0 to 1.")
        self._tenant_blocks = gauges(
            "busbar:tenant_kv_blocks",
            "KV blocks held by running requests, of each tenant with a quota.",
            "tenant",
        )
        self._migrations = counters(
            "busbar:migrations",
            "Streams that were to move to another replica: copied, recomputed (without their blocks) or stayed.",
            "outcome",
        )
        for outcome in ("copied", "recomputed", "stayed"):
            self._migrations.labels(*self._values, outcome)
        self._sleep = gauges(
            "vllm:engine_sleep_state",
            "1 for the state that the engine is in: awake, weights_offloaded (level 1) or discard_all (level 2).",
            "sleep_state",
        )
        self.sleeping(0)
        self._restarts = _Followed(
            counter(
                "busbar:server_restarts", "Servers that crashed before this one since the container's start."
            )
        )
        self._crashed_at = gauge(
            "busbar:server_crash_timestamp_seconds",
            "When the last of them ended, in Unix time; 0: there was none.",
        )
        self._adapters: set[str] = set()
        self._adapter_requests = counters(
            "busbar:adapter_requests", "Requests that came, by adapter.", "adapter"
        )
        self._adapter_tokens = counters(
            "busbar:adapter_generation_tokens", "Tokens generated, by adapter.", "adapter"
        )
        self._lora = gauges(
            "vllm:lora_requests_info",
            "Names of the adapters of running and waiting requests; the value is the time of the scrape.",
            "max_lora",
            "running_lora_adapters",
            "waiting_lora_adapters",
        )
        for reason in ("stop", "length", "abort"):
            self._success.labels(*self._values, reason)
        self.ttft = histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", TTFT_S)
        self.itl = histogram("vllm:inter_token_latency_seconds", "Between two tokens.", ITL_S)
        self.tpot = histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time per token after the first.", ITL_S
        )
        self.e2e = histogram("vllm:e2e_request_latency_seconds", "Arrival to end.", LATENCY_S)
        self.queue_time = histogram("vllm:request_queue_time_seconds", "Arrival to first step.", LATENCY_S)
        self.prefill_time = histogram(
            "vllm:request_prefill_time_seconds", "First step to first token.", LATENCY_S
        )
        self.decode_time = histogram(
            "vllm:request_decode_time_seconds", "First token to last token.", LATENCY_S
        )
        self.inference_time = histogram(
            "vllm:request_inference_time_seconds", "First step to last token.", LATENCY_S
        )
        self.step_tokens = histogram("vllm:iteration_tokens_total", "Tokens in one step.", STEP_TOKENS)
        lengths = one_two_five(max_model_len)
        self.request_prompt = histogram("vllm:request_prompt_tokens", "Prompt length.", lengths)
        self.request_generation = histogram("vllm:request_generation_tokens", "Output length.", lengths)
        self.params_n = histogram("vllm:request_params_n", "Requested n.", (1, 2, 5, 10, 20))
        self.params_max_tokens = histogram("vllm:request_params_max_tokens", "Requested max_tokens.", lengths)

    def cache_config(self, block_tokens: int, blocks: int, stored: str) -> None:
        """The constant gauge that endpoint pickers read block sizes from."""
        info = Gauge(
            "vllm:cache_config_info",
            "The KV cache's layout.",
            (*LABELS, "block_size", "num_gpu_blocks", "cache_dtype"),
            registry=self.registry,
        )
        info.labels(*self._values, str(block_tokens), str(blocks), stored).set(1)

    def prefix_cache(self, queries: int, hits: int) -> None:
        """Totals since the start."""
        self._prefixes.tell(queries, hits)

    def speculation(self, drafts: int, proposed: int, accepted: int) -> None:
        """Totals since the start."""
        self._guesses.tell(drafts, proposed, accepted)

    def experts(self, queries: int, hits: int, prefetches: int, prefetch_hits: int, read_bytes: int) -> None:
        """Totals since the weights were read."""
        self._experts.tell(queries, hits, prefetches, prefetch_hits, read_bytes)

    def phases(self, seconds: Mapping[str, float]) -> None:
        """Totals since the start."""
        for phase, total in seconds.items():
            passed = total - self._phases_told.get(phase, 0.0)
            if passed >= 0:  # what a step took is known at its end; until then it was idle
                self._phases.labels(*self._values, phase).inc(passed)
                self._phases_told[phase] = total

    def host_tier(self, host: HostTier) -> None:
        """Its totals since it was made, and how full it is."""
        self._copied.tell(host.moves_total[True], host.moves_total[False])
        self._host_usage.set(host.used / host.total if host.total else 0.0)

    def migrated(self, outcome: str) -> None:
        self._migrations.labels(*self._values, outcome).inc()

    def tenant_blocks(self, tenant: str, blocks: int) -> None:
        self._tenant_blocks.labels(*self._values, tenant).set(blocks)

    def forget_tenant(self, tenant: str) -> None:
        """It has no quota any more."""
        with suppress(KeyError):  # no step has told of it yet
            self._tenant_blocks.remove(*self._values, tenant)

    def sleeping(self, level: int) -> None:
        for number, name in enumerate(SLEEP_STATES):
            self._sleep.labels(*self._values, name).set(number == level)

    def restarted(self, report: RestartReport | None) -> None:
        if report is not None:
            self._restarts.tell(report.count)
            self._crashed_at.set(report.at.timestamp())

    def adapter_request(self, name: str) -> None:
        self._adapter_requests.labels(*self._values, self._adapter_label(name)).inc()

    def adapter_tokens(self, name: str, count: int) -> None:
        self._adapter_tokens.labels(*self._values, self._adapter_label(name)).inc(count)

    def lora_info(self, most: int, running: Iterable[str], waiting: Iterable[str], now: float) -> None:
        """What endpoint pickers read of adapters: one series with this content."""
        self._lora.clear()
        names = (",".join(sorted(set(each))) for each in (running, waiting))
        self._lora.labels(*self._values, str(most), *names).set(now)

    def _adapter_label(self, name: str) -> str:
        if name not in self._adapters and len(self._adapters) >= MOST_ADAPTERS:
            return "other"
        self._adapters.add(name)
        return name

    def finished(self, reason: str) -> None:
        self._success.labels(*self._values, reason).inc()

    def rejected(self, reason: str) -> None:
        self._rejections.labels(*self._values, reason).inc()

    def render(self) -> bytes:
        """The text exposition of everything."""
        return generate_latest(self.registry)
