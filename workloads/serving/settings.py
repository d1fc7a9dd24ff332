"""All settings, read once at the start. Units are in the names.

`EngineSettings` shapes the engine, `ServerSettings` the process around it. A pod's come from the
environment the operator sets (`pod.py`), a person's from the flags of `busbar serve`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from busbar.kube.contracts.adapters import AskedAdapters
from busbar.kube.contracts.bearers import Bearers
from busbar.kube.contracts.request_size import REPLICA_REQUEST_BYTES
from busbar.kube.contracts.workload import ReplicaRole, RestartReport
from busbar.kube.documents import shown
from busbar.kube.types.meta import claim_of
from busbar.kube.types.quantity import to_bytes
from busbar.workloads.serving.errors import SettingsError
from busbar.workloads.serving.quota import Quota
from busbar.workloads.serving.stream_plan import UNITS

MOST_BYTES = 2**63
MOST_GUESSES = 16
MOST_DEPTH = 7
STEP_TOKENS = 512
ADAPTER_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")


@dataclass(frozen=True)
class AdapterSource:
    """A LoRA adapter: the name that requests use, and the folder."""

    name: str
    folder: Path

    def __post_init__(self) -> None:
        if ADAPTER_NAME.fullmatch(self.name) is None:
            raise SettingsError(
                f"{shown(self.name)} is no name for an adapter: use up to 63 letters, digits, dots, dashes or "
                "underscores, with a letter or digit at both ends"
            )


@dataclass(frozen=True)
class SpecAdapters:
    """The adapters of a ModelService, which the operator may ask to be others while the server runs."""

    asked: AskedAdapters
    """At the start."""
    root: Path
    """Claims are mounted below it, under their names."""

    def sources(self, asked: AskedAdapters) -> tuple[AdapterSource, ...]:
        """Raises SettingsError."""
        found = []
        for each in asked.adapters:
            claim, path = claim_of(each.uri)
            found.append(AdapterSource(each.name, self.root / claim / path))
        return tuple(found)


@dataclass(frozen=True)
class EngineSettings:
    """The engine: model, memory, batch."""

    model_dir: Path
    kv_bytes: int | None = None
    """Bytes for the KV cache; None: 256 MiB on a CPU, 85 % of free memory on a GPU."""
    host_kv_bytes: int = 0
    """Host memory for KV blocks that have no place in the cache; 0: none."""
    kv_quotas: tuple[tuple[str, Quota], ...] = ()
    """Tenants with a guaranteed and a largest part of the KV cache."""
    max_model_len: int | None = None
    """Longest prompt plus output in tokens; None: what the model was made for."""
    max_running: int = 64
    """Sequences in one step."""
    max_batched_tokens: int | None = None
    """Tokens in one step; longer prompts are split. Smaller: steadier decoding, slower prompts. None: 512; where weights
    are streamed as many as their plan has memory for."""
    block_tokens: int = 64
    """Tokens per KV block; a power of two up to 256."""
    device: str = "auto"
    """auto, cpu or cuda."""
    dtype: str = "auto"
    """auto, float32, bfloat16 or fastest. auto: float32 on a CPU (repeatable), the checkpoint's on a GPU."""
    weights_dtype: str = "auto"
    """auto, int8 or int4: of the layers' matrices in memory. auto: `dtype`. Everything else stays in `dtype`."""
    weights: str = "resident"
    """resident, stream or auto: whether all layers stay in memory, or those that do not fit are read in every step. auto:
    resident where that fits."""
    memory_bytes: int | None = None
    """Memory that weights, KV cache and work space may take; None: what is free on the device."""
    stream_dir: Path | None = None
    """Folder for the file that layers are streamed from; None: one for temporary files."""
    stream_depth: int | None = None
    """Layers read ahead; None: one, more of small ones. Of experts that are read one by one: 0 reads none ahead."""
    stream_unit: str = "auto"
    """auto, layers or experts: what is read at a time. auto: single experts where the model has them and the rest of its
    layers fits, else layers."""
    keep_dir: Path | None = None
    """Folder in which weights outlive the process, ready to compute with; None: they end with it."""
    kv_dtype: str = "auto"
    """auto, int8 or int4: of keys and values in memory. auto: float32 on a CPU, that of the weights on a GPU."""
    prefix_cache: bool = True
    """Prompts that begin alike share the blocks of their beginning, within a tenant."""
    tpot_ms: float | None = None
    """Time per token that running requests shall keep: sizes the pieces of prompts. None: max_batched_tokens always."""
    speculate: int = 0
    """Tokens of a request that are guessed from its own text and checked in one step, at most; 0: none."""
    draft_dir: Path | None = None
    """A small model with the same tokenizer, which guesses where a request's own text says nothing; None: none does."""
    deterministic: bool = False
    """Compute in a fixed order: a request's logits do not depend on the other requests, bit for bit (slower on a
    CPU)."""
    threads: int | None = None
    """CPU threads; None: the processors this container may use."""
    adapters: tuple[AdapterSource, ...] = ()
    """Read at the start."""
    skip_bad_adapters: bool = False
    """Serve without an adapter that is refused, and report why; otherwise it ends the start."""
    adapter_bytes: int = 2**30
    """For adapters in memory, at most; those that are not used are read again when they are asked for."""
    adapter_root: Path | None = None
    """Adapters below this folder may be loaded over HTTP; None: none may."""

    def __post_init__(self) -> None:
        names = [adapter.name for adapter in self.adapters]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise SettingsError(f"two adapters have the name {twice!r}; rename one")
        tenants = [tenant for tenant, _ in self.kv_quotas]
        twice = next((tenant for tenant in tenants if tenants.count(tenant) > 1), None)
        if twice is not None:
            raise SettingsError(f"tenant {twice!r} has two KV quotas; give one")
        if self.stream_depth is not None and not 0 <= self.stream_depth <= MOST_DEPTH:
            raise SettingsError(f"stream_depth must be 0 to {MOST_DEPTH}, not {self.stream_depth}")
        asked = self.stream_dir or self.stream_depth is not None or self.stream_unit != "auto"
        if self.weights == "resident" and asked:
            raise SettingsError(
                "stream_dir, stream_depth and stream_unit are for streamed weights; add --weights stream, or leave them out"
            )
        if self.host_kv_bytes < 0:
            raise SettingsError(f"host_kv_bytes must be at least 0, not {self.host_kv_bytes}")
        if self.tpot_ms is not None and not 0 < self.tpot_ms < inf:
            raise SettingsError(f"tpot_ms must be a finite number above 0, not {self.tpot_ms:g}")
        if not 0 <= self.speculate <= MOST_GUESSES:
            raise SettingsError(f"speculate must be 0 to {MOST_GUESSES}, not {self.speculate}")
        if self.draft_dir is not None and not self.speculate:
            raise SettingsError(
                "--draft names a model that guesses tokens, and --speculate says how many; add --speculate 4, or leave --draft "
                "out"
            )
        if self.block_tokens not in {1 << n for n in range(9)}:
            raise SettingsError(f"block size {self.block_tokens} is not a power of two up to 256")
        for name in (
            "max_running",
            "max_batched_tokens",
            "max_model_len",
            "kv_bytes",
            "memory_bytes",
            "threads",
            "adapter_bytes",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SettingsError(f"{name} must be at least 1, not {value}")
        for name, allowed in (
            ("device", ("auto", "cpu", "cuda")),
            ("dtype", ("auto", "float32", "bfloat16", "fastest")),
            ("weights", ("resident", "stream", "auto")),
            ("stream_unit", UNITS),
            ("weights_dtype", ("auto", "int8", "int4")),
            ("kv_dtype", ("auto", "int8", "int4")),
        ):
            if getattr(self, name) not in allowed:
                raise SettingsError(
                    f"{name} must be one of {', '.join(allowed)}, not {getattr(self, name)!r}"
                )


@dataclass(frozen=True)
class ServerSettings:
    """The process around the engine."""

    engine: EngineSettings
    model_id: str
    role: ReplicaRole = ReplicaRole.BOTH
    host: str = "127.0.0.1"
    port: int = 8000
    bearers: Bearers | None = field(default=None, repr=False)
    """What each route but /health and /ready wants; None: open (stand-alone)."""
    fixed_kv_quotas: tuple[tuple[str, Quota], ...] = ()
    """Those of `engine.kv_quotas` that stay when the operator asks for others: the command line's."""
    spec_adapters: SpecAdapters | None = None
    """None: no operator asks for adapters (stand-alone)."""
    aliases: tuple[str, ...] = ()
    """Other model names that are accepted (a pod answers to `namespace/name` too)."""
    drain_s: float = 30.0
    """How long running requests may go on after SIGTERM."""
    stall_s: float = 30.0
    """A step that takes longer makes /health and /ready fail, because the engine is assumed to hang."""
    max_waiting: int = 256
    """Requests waiting for a place in the batch; more are refused with 503."""
    max_body_bytes: int = REPLICA_REQUEST_BYTES
    accelerator: str = "cpu"
    restarted: RestartReport | None = None
    """Of the servers before this one, by their supervisor; None: there were none."""

    def __post_init__(self) -> None:
        if self.max_waiting < 1:  # a request waits, if only for a moment, before it joins the batch
            raise SettingsError(f"max_waiting must be at least 1, not {self.max_waiting}")
        if not 0 < self.stall_s < inf:
            raise SettingsError(f"stall_s must be a finite number above 0, not {self.stall_s:g}")
        if not 0 <= self.drain_s < inf:
            raise SettingsError(f"drain_s must be a finite number of at least 0, not {self.drain_s:g}")


def parse_adapter(text: str) -> AdapterSource:
    """NAME=DIR, as in --adapter."""
    name, equals, folder = text.partition("=")
    if not equals or not folder:
        raise SettingsError(f"--adapter {shown(text)} must be NAME=DIR")
    return AdapterSource(name, Path(folder))


def parse_quota(text: str) -> tuple[str, Quota]:
    """TENANT=GUARANTEED:MOST in percent of the KV cache, as in --kv-quota."""
    match = re.fullmatch(r"([^=\s]+)=([0-9]+(?:\.[0-9]+)?):([0-9]+(?:\.[0-9]+)?)", text)
    if match is None:
        raise SettingsError(
            f"--kv-quota {shown(text)} must be TENANT=GUARANTEED:MOST in percent, as research=25:50"
        )
    return match[1], Quota(float(match[2]) / 100, float(match[3]) / 100)


def parse_bytes(value: object, where: str) -> int:
    """A Kubernetes quantity of bytes (256Mi, 1G, 1.5Gi, 1e9, 1048576), as `spec.kvCacheMemory` may have."""
    try:
        size = to_bytes(str(value).strip())
    except ValueError as error:
        raise SettingsError(
            f"{where}: {shown(value)} is not an amount of memory; write 256Mi, 2Gi or a number"
        ) from error
    if size >= MOST_BYTES:
        raise SettingsError(f"{where}: {shown(value)} is more than a machine can address")
    if size < 1:
        raise SettingsError(f"{where}: {shown(value)} is not more than nothing")
    return size
