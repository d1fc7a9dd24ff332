"""Settings of a pod: the environment variables that the operator sets (`kube.contracts.workload`).

The spec's `args` arrive as the command line and may set what the spec has no field for. Threads follow
the cores that the pod asked for, not those the node has: more threads than free cores are slower.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any, NoReturn

from busbar.kube.contracts.workload import PORT, Env
from busbar.workloads.serving.errors import SettingsError
from busbar.workloads.serving.settings import EngineSettings, ServerSettings, parse_bytes, usable_processors


def from_environment(env: Mapping[str, str], arguments: Sequence[str] = ()) -> ServerSettings:
    """The settings of a pod (BUSBAR_SPEC holds the ModelService's spec as JSON)."""
    extra = _arguments(arguments)
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
    max_waiting: int | None = extra.pop("max_waiting", None)
    engine = EngineSettings(
        model_dir=Path(folder),
        kv_bytes=None if memory is None else parse_bytes(memory, "BUSBAR_SPEC: kvCacheMemory"),
        max_model_len=length,
        threads=min(_cores_asked_for(spec), usable_processors()),
    )
    return ServerSettings(
        engine=replace(engine, **extra),
        max_waiting=ServerSettings.max_waiting if max_waiting is None else max_waiting,
        model_id=model_id,
        host="0.0.0.0",
        port=_number(env, Env.PORT) or PORT,
        token=token,
        aliases=tuple(sorted(aliases)),
        drain_s=_seconds(spec.get("drainSeconds", 30)),
        accelerator=env.get("BUSBAR_ACCELERATOR", "cpu"),
    )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"spec.args: {message}")


def _arguments(words: Sequence[str]) -> dict[str, Any]:
    """What of `args` was given, by the settings' names."""
    parser = _Parser(prog="spec.args", add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for name in ("max-running", "max-batched-tokens", "block-tokens", "max-waiting", "threads"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("device", "dtype"):
        parser.add_argument(f"--{name}")
    return vars(parser.parse_args(list(words)))


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
