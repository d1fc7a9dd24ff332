"""Every knob, read once at the edge. Units are in the names.

`EngineSettings` shapes the engine, `ServerSettings` the process around it. A pod's come from the
environment the operator sets (`from_environment`), a person's from the flags of `busbar serve`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from busbar.kube.contracts.workload import PORT, Env
from busbar.workloads.serving.errors import SettingsError

_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


@dataclass(frozen=True)
class EngineSettings:
    """The engine: model, memory, batch."""

    model_dir: Path
    kv_bytes: int | None = None
    """Bytes for the KV cache; None: 256 MiB on a CPU, 85 % of free memory on a GPU."""
    max_model_len: int | None = None
    """Longest prompt plus output in tokens; None: what the model was made for."""
    max_running: int = 64
    """Sequences in one step."""
    max_batched_tokens: int = 512
    """Tokens in one step; longer prompts are split. Smaller: steadier decoding, slower prompts."""
    block_tokens: int = 64
    """Tokens per KV block; a power of two up to 256."""
    device: str = "auto"
    """auto, cpu or cuda."""
    dtype: str = "auto"
    """auto, float32 or bfloat16. auto: float32 on a CPU (repeatable), the checkpoint's on a GPU."""
    threads: int | None = None
    """CPU threads; None: the processors this container may use."""

    def __post_init__(self) -> None:
        if self.block_tokens not in {1 << n for n in range(9)}:
            raise SettingsError(f"block size {self.block_tokens} is not a power of two up to 256")
        for name in ("max_running", "max_batched_tokens", "max_model_len", "kv_bytes", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SettingsError(f"{name} must be at least 1, not {value}")
        for name, allowed in (
            ("device", ("auto", "cpu", "cuda")),
            ("dtype", ("auto", "float32", "bfloat16")),
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
    host: str = "127.0.0.1"
    port: int = PORT
    token: str | None = field(default=None, repr=False)
    """Bearer that every route but /health and /ready wants; None: open (stand-alone)."""
    aliases: tuple[str, ...] = ()
    """Other model names that are accepted (a pod answers to `namespace/name` too)."""
    drain_s: float = 30.0
    """How long running requests may go on after SIGTERM."""
    max_waiting: int = 256
    """Requests waiting for a place in the batch; more are refused with 503."""
    max_body_bytes: int = 4 * 2**20
    accelerator: str = "cpu"


def from_environment(env: Mapping[str, str]) -> ServerSettings:
    """The settings of a pod (BUSBAR_SPEC holds the ModelService's spec as JSON)."""
    spec = _spec(env)
    folder = _needed(env, Env.MODEL_DIR)
    name, namespace = _needed(env, Env.JOB_NAME), env.get(Env.NAMESPACE, "")
    token = env.get(Env.TOKEN)
    if not token:
        raise SettingsError(
            "BUSBAR_TOKEN is not set: in a pod every call must carry a bearer. "
            "The operator sets it; to run alone use `busbar serve DIR`"
        )
    memory = spec.get("kvCacheMemory")
    length = spec.get("maxModelLen")
    if length is not None and (not isinstance(length, int) or isinstance(length, bool)):
        raise SettingsError(f"BUSBAR_SPEC: maxModelLen must be a whole number, not {length!r}")
    model_id = str(env.get(Env.MODEL_ID) or spec.get("modelId") or name)
    aliases = {name, *((f"{namespace}/{name}", f"{namespace}/{model_id}") if namespace else ())} - {model_id}
    return ServerSettings(
        engine=EngineSettings(
            model_dir=Path(folder),
            kv_bytes=None if memory is None else parse_bytes(memory, "BUSBAR_SPEC: kvCacheMemory"),
            max_model_len=length,
            threads=_number(env, "BUSBAR_THREADS"),
        ),
        model_id=model_id,
        host="0.0.0.0",
        port=_number(env, Env.PORT) or PORT,
        token=token,
        aliases=tuple(sorted(aliases)),
        drain_s=_seconds(spec.get("drainSeconds", 30)),
        accelerator=env.get("BUSBAR_ACCELERATOR", "cpu"),
    )


def parse_bytes(value: object, where: str) -> int:
    """A Kubernetes quantity of bytes (256Mi, 1G, 1.5Gi, 1048576)."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([kMGT]?|[KMGT]i)", str(value).strip())
    if match is None or match[2] not in _UNITS:
        raise SettingsError(f"{where}: {value!r} is not an amount of memory; write 256Mi, 2Gi or a number")
    size = int(float(match[1]) * _UNITS[match[2]])
    if size < 1:
        raise SettingsError(f"{where}: {value!r} is not more than nothing")
    return size


def usable_processors() -> int:
    """Processors this process may use: its affinity, or less under a cgroup quota (v2 or v1)."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_quota(Path("/sys/fs/cgroup"))
    return max(1, min(count, int(quota))) if quota is not None else count


def _cgroup_quota(root: Path) -> float | None:
    try:
        quota, period = (root / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (root / "cpu" / "cpu.cfs_quota_us").read_text().strip()
            period = (root / "cpu" / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    if quota in ("max", "-1") or not quota.isdigit() or not period.isdigit() or int(period) == 0:
        return None
    return int(quota) / int(period)


def _spec(env: Mapping[str, str]) -> dict[str, object]:
    try:
        spec = json.loads(env.get(Env.SPEC, ""))
    except ValueError as error:
        raise SettingsError(f"BUSBAR_SPEC is not JSON: {error}") from error
    if not isinstance(spec, dict):
        raise SettingsError("BUSBAR_SPEC must hold the spec of a ModelService, a JSON object")
    return spec


def _needed(env: Mapping[str, str], name: str) -> str:
    value = env.get(name)
    if not value:
        raise SettingsError(f"{name} is not set; the operator sets it in serving pods")
    return value


def _number(env: Mapping[str, str], name: str) -> int | None:
    value = env.get(name)
    if not value:
        return None
    if not value.isdigit() or int(value) < 1:
        raise SettingsError(f"{name} must be a positive whole number, not {value!r}")
    return int(value)


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise SettingsError(f"BUSBAR_SPEC: drainSeconds must be a number of seconds, not {value!r}")
    return float(value)
