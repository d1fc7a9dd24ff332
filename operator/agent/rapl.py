"""Processor packages through RAPL (`/sys/class/powercap`). It only reads; most systems let only root do so.

Counters are microjoules and wrap at `max_energy_range_uj`; several packages are one meter. A package has no lowest
limit that we would set, so its nameplate is its floor: the long-term limit that the firmware allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from busbar.kube.contracts.power import Backend

from .meters import HOST, BackendAbsent, Sample

ROOT = Path("/sys/class/powercap")


class Rapl:
    """All packages of the node."""

    backend = Backend.RAPL

    def __init__(self, root: Path = ROOT) -> None:
        """Raises BackendAbsent where there are none, or where they cannot be read."""
        self._packages = [p for p in sorted(root.glob("intel-rapl:*")) if p.name.count(":") == 1]
        if not self._packages:
            raise BackendAbsent(f"{root} has no processor package")
        try:
            self._nameplate_w = sum(_number(p, "constraint_0_max_power_uw") for p in self._packages) / 1e6
            self._ranges = [_number(p, "max_energy_range_uj") for p in self._packages]
            self._last = [_number(p, "energy_uj") for p in self._packages]
        except (OSError, ValueError) as error:
            raise BackendAbsent(f"{root} cannot be read: {error}") from error
        if self._nameplate_w <= 0:
            raise BackendAbsent("the packages do not say what they can draw")
        self._joules = 0.0

    def sample(self, clock_s: float) -> Sequence[Sample]:
        now = [_number(package, "energy_uj") for package in self._packages]
        for before, after, wraps_at in zip(self._last, now, self._ranges, strict=True):
            self._joules += (after - before + (wraps_at if after < before else 0)) / 1e6
        self._last = now
        return [Sample(HOST, self._nameplate_w, self._nameplate_w, joules=self._joules)]


def _number(package: Path, name: str) -> int:
    return int((package / name).read_text())
