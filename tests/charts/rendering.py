"""Rendering and checking our charts with the real helm."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from busbar.local.build import binary

ROOT = Path(__file__).resolve().parents[2]
CHARTS = ROOT / "charts"
GOLDEN = Path(__file__).with_name("golden")
KUBERNETES = "1.36.3"
JSON = dict[str, Any]
POWER = (
    "power.agent.enabled=true",
    "power.agent.runtimeClassName=nvidia",
    "power.agent.nodeSelector.gpus=yes",
    "power.agent.tolerations[0].key=nvidia.com/gpu",
    "power.agent.tolerations[0].operator=Exists",
    "power.simulatedNodes[0]=sim-0",
    "power.simulatedNodes[1]=sim-1",
)

_RANDOM = re.compile(r"^(  (?:key|secret): )[A-Za-z0-9+/=]{80,}$", re.MULTILINE)


@cache
def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run helm; the answer with its exit code."""
    return subprocess.run(
        [str(binary("helm")), *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def render(chart: str, *settings: str, kubernetes: str = KUBERNETES) -> str:
    """The chart as YAML. Random values are replaced by a fixed word, so that renders can be compared."""
    sets = [part for setting in settings for part in ("--set", setting)]
    result = helm(
        "template", "busbar", str(CHARTS / chart), "-n", "busbar-system", "--kube-version", kubernetes, *sets
    )
    assert result.returncode == 0, result.stderr
    return _RANDOM.sub(r"\1<random>", result.stdout)


def refusal(*settings: str) -> str:
    """helm's message about settings that it refuses."""
    sets = [part for setting in settings for part in ("--set", setting)]
    result = helm("template", "busbar", str(CHARTS / "busbar"), "-n", "busbar-system", *sets)
    assert result.returncode != 0, "it was accepted"
    return result.stderr


def documents(text: str) -> list[JSON]:
    """The objects of a render."""
    return [document for document in yaml.safe_load_all(text) if document]


def find(found: list[JSON], kind: str, name: str) -> JSON:
    """One object."""
    matching = [d for d in found if d["kind"] == kind and d["metadata"]["name"] == name]
    assert len(matching) == 1, f"{len(matching)} objects are {kind} {name}"
    return matching[0]


def environment(found: list[JSON], name: str, kind: str = "Deployment") -> dict[str, str]:
    """The variables of a workload's first container."""
    pod = find(found, kind, name)["spec"]["template"]["spec"]
    return {variable["name"]: variable.get("value", "") for variable in pod["containers"][0]["env"]}


def workloads(found: list[JSON]) -> list[JSON]:
    """The objects that make pods."""
    return [d for d in found if d["kind"] in ("Deployment", "DaemonSet", "StatefulSet")]
