"""Settings of a pod: the environment variables that the operator sets (`kube.contracts.workload`).

The spec's `args` arrive as the command line and may set what the spec has no field for. Threads follow
the cores that the pod asked for, not those the node has: more threads than free cores are slower.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any, NoReturn

from busbar.kube.contracts.adapters import AskedAdapter, AskedAdapters
from busbar.kube.contracts.bearers import Role, bearers_in
from busbar.kube.contracts.workload import ARTIFACTS_ROOT, KEPT_WEIGHTS, PORT, Env, ReplicaRole
from busbar.kube.documents import shown
from busbar.kube.types.meta import CLAIM_PATH_PATTERN, claim_of
from busbar.workloads.machine.limits import usable_processors
from busbar.workloads.serving.errors import SettingsError
from busbar.workloads.serving.quota import Quota
from busbar.workloads.serving.settings import (
    EngineSettings,
    ServerSettings,
    SpecAdapters,
    parse_bytes,
    parse_quota,
)

MODES: dict[str, dict[str, Any]] = {
    "resident": {},
    "int8": {"weights_dtype": "int8"},
    "int4": {"weights_dtype": "int4"},
    "stream": {"weights": "stream"},
}
"""The settings of the engine modes: all weights in memory, in float or in codes, or layers streamed that do not fit."""


def from_environment(env: Mapping[str, str], arguments: Sequence[str] = ()) -> ServerSettings:
    """The settings of a pod (BUSBAR_SPEC holds the ModelService's spec as JSON)."""
    extra = _arguments(arguments)
    spec = _spec(env)
    folder = _needed(env, Env.MODEL_DIR)
    name, namespace = _needed(env, Env.JOB_NAME), env.get(Env.NAMESPACE, "")
    bearers = _bearers(env)
    memory = spec.get("kvCacheMemory")
    mode = env.get(Env.MODE) or "resident"
    if mode not in MODES:
        raise SettingsError(f"{Env.MODE} is {mode!r}; this engine runs in the modes {', '.join(MODES)}")
    length = spec.get("maxModelLen")
    if length is not None and (not isinstance(length, int) or isinstance(length, bool)):
        raise SettingsError(f"BUSBAR_SPEC: maxModelLen must be a whole number, not {length!r}")
    model_id = str(env.get(Env.MODEL_ID) or spec.get("modelId") or name)
    aliases = {name, *((f"{namespace}/{name}", f"{namespace}/{model_id}") if namespace else ())} - {model_id}
    process = {name: extra.pop(name) for name in ("max_waiting", "stall_s") if name in extra}
    fixed = extra.pop("kv_quotas", ())
    adapters = _adapters(spec)
    engine = EngineSettings(
        model_dir=Path(folder),
        kv_bytes=None if memory is None else parse_bytes(memory, "BUSBAR_SPEC: kvCacheMemory"),
        kv_quotas=(*_kv_quotas(spec), *fixed),
        max_model_len=length,
        tpot_ms=(spec.get("slo") or {}).get("tpotMilliseconds"),
        threads=min(_cores_asked_for(spec), usable_processors()),
        adapters=adapters.sources(adapters.asked),
        skip_bad_adapters=True,
    )
    return ServerSettings(
        engine=replace(engine, **(MODES[mode] | extra)),
        **process,
        model_id=model_id,
        role=_role(env),
        host="0.0.0.0",
        port=_number(env, Env.PORT) or PORT,
        bearers=bearers,
        fixed_kv_quotas=fixed,
        spec_adapters=adapters,
        aliases=tuple(sorted(aliases)),
        drain_s=_seconds(spec.get("drainSeconds", 30)),
        accelerator=env.get(Env.ACCELERATOR) or ServerSettings.accelerator,
    )


def _role(env: Mapping[str, str]) -> ReplicaRole:
    given = env.get(Env.ROLE) or ReplicaRole.BOTH
    if given not in set(ReplicaRole):
        raise SettingsError(f"{Env.ROLE} is {given!r}; a replica has the role {', '.join(ReplicaRole)}")
    return ReplicaRole(given)


def _adapters(spec: Mapping[str, Any]) -> SpecAdapters:
    """Those of the spec; the operator mounts the claims of their addresses."""
    given = spec.get("adapters") or ()
    try:
        asked = AskedAdapters(adapters=[AskedAdapter(name=each["name"], uri=each["uri"]) for each in given])
    except (KeyError, TypeError, ValueError) as error:
        raise SettingsError(
            f"BUSBAR_SPEC: adapters must be a list of name and uri, and is not: {error!r}"
        ) from error
    return SpecAdapters(asked, Path(ARTIFACTS_ROOT))


def _kv_quotas(spec: Mapping[str, Any]) -> list[tuple[str, Quota]]:
    """The shares of the KV cache in `access.tenants`; `--kv-quota` of the spec's args may name further tenants."""
    found = []
    try:
        for given in (spec.get("access") or {}).get("tenants") or ():
            guaranteed, most = given.get("guaranteedKv"), given.get("maxKv")
            if guaranteed is not None or most is not None:
                quota = Quota(
                    0.0 if guaranteed is None else float(guaranteed), 1.0 if most is None else float(most)
                )
                found.append((str(given["name"]), quota))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise SettingsError(
            f"BUSBAR_SPEC: access.tenants must be a list of name, guaranteedKv and maxKv, and is not: {error!r}"
        ) from error
    return found


def _bearers(env: Mapping[str, str]) -> dict[Role, str]:
    folder = _needed(env, Env.BEARERS_DIR)
    try:
        found = bearers_in(folder)
    except OSError as error:
        raise SettingsError(f"the bearers in {folder} cannot be read: {error.strerror or error}") from error
    missing = [role for role in Role if role not in found]
    if missing:
        raise SettingsError(
            f"{folder} has no bearer for {', '.join(missing)}: in a pod every call must carry one. "
            "The operator mounts them; to run alone use `busbar serve DIR`"
        )
    return found


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"spec.args: {message}")


def _arguments(words: Sequence[str]) -> dict[str, Any]:
    """What of `args` was given, by the settings' names."""
    parser = _Parser(prog="spec.args", add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for name in (
        "max-running",
        "max-batched-tokens",
        "block-tokens",
        "max-waiting",
        "threads",
        "speculate",
        "stream-depth",
    ):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--adapter-memory", type=_adapter_memory, dest="adapter_bytes")
    parser.add_argument("--host-kv-memory", type=_host_kv_memory, dest="host_kv_bytes")
    parser.add_argument("--kv-quota", type=parse_quota, action="append", dest="kv_quotas")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--no-prefix-cache", action="store_false", dest="prefix_cache")
    parser.add_argument("--keep-weights", action="store_const", const=Path(KEPT_WEIGHTS), dest="keep_dir")
    parser.add_argument("--stall-seconds", type=float, dest="stall_s")
    parser.add_argument("--memory", type=_memory, dest="memory_bytes")
    parser.add_argument("--draft", type=_draft, dest="draft_dir")
    for name in ("device", "dtype", "weights", "weights-dtype", "kv-dtype", "stream-unit"):
        parser.add_argument(f"--{name}")
    found = vars(parser.parse_args(list(words)))
    if "kv_quotas" in found:
        found["kv_quotas"] = tuple(found["kv_quotas"])
    return found


def _memory(text: str) -> int:
    return parse_bytes(text, "spec.args: --memory")


def _draft(address: str) -> Path:
    """Of a pvc:// address: its claim is that of the model or of an adapter, which the operator mounts."""
    if not re.fullmatch(CLAIM_PATH_PATTERN, address):
        raise SettingsError(
            f"spec.args: --draft {shown(address)} must be pvc://CLAIM/FOLDER, with the claim of the model or of an adapter"
        )
    claim, path = claim_of(address)
    return Path(ARTIFACTS_ROOT) / claim / path


def _host_kv_memory(text: str) -> int:
    return parse_bytes(text, "spec.args: --host-kv-memory")


def _adapter_memory(text: str) -> int:
    return parse_bytes(text, "spec.args: --adapter-memory")


def _cores_asked_for(spec: Mapping[str, Any]) -> int:
    """shape.cpu, or one core for each accelerator."""
    shape = spec.get("shape") or {}
    cpu = shape.get("cpu")
    if cpu is None:
        return max(1, int(shape.get("acceleratorsPerPod") or 1))
    text = str(cpu)
    try:
        cores = float(text[:-1]) / 1000 if text.endswith("m") else float(text)
    except ValueError:
        raise SettingsError(f"BUSBAR_SPEC: shape.cpu {cpu!r} is not an amount of cores") from None
    return max(1, ceil(cores))


def _spec(env: Mapping[str, str]) -> dict[str, Any]:
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
