"""Settings of a pod: the environment variables that the operator sets (`kube.contracts.workload`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from busbar.kube.contracts.workload import PORT, Env
from busbar.workloads.serving.errors import SettingsError
from busbar.workloads.serving.settings import EngineSettings, ServerSettings, parse_bytes


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
