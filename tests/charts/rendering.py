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
