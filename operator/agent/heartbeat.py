"""The agent's heartbeat: a file that its guard reads. Times are those of the node's monotonic clock, which containers share."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What the file says."""

    at_s: float = -math.inf
    """When all limits were last as they should be."""
    released: frozenset[str] = frozenset()
    """Nodes whose boards nobody limits."""


def write(path: Path, at_s: float, released: Iterable[str]) -> None:
    """Replaces the file as a whole."""
    new = path.with_name(f".{path.name}")
    new.write_text(json.dumps({"at": at_s, "released": sorted(released)}))
    new.replace(path)


def read(path: Path) -> Heartbeat:
    """An absent or damaged file is no heartbeat."""
    try:
        found = json.loads(path.read_text())
        return Heartbeat(float(found["at"]), frozenset(map(str, found["released"])))
    except (OSError, ValueError, KeyError, TypeError):
        return Heartbeat()
