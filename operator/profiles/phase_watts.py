"""How a profile's cells hold what boards draw in each phase of serving. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from busbar.kube.types.performance_profile import PhaseWatts, ProfileCell
from busbar.operator.profiles.phase_draws import DrawPlace, PhaseDraw


def with_draws(
    cells: Iterable[ProfileCell],
    old: Iterable[ProfileCell],
    workload_class: str,
    draws: Mapping[tuple[DrawPlace, int], PhaseDraw],
) -> list[ProfileCell]:
    """The cells of replicas with what was measured, now or before the operator's start; the others as they are.

    Args:
        old: as they are written.
    """
    before = {_key(workload_class, cell): cell for cell in old if cell.phase_watts is not None}
    found = []
    for cell in cells:
        key = _key(workload_class, cell)
        if cell.step_model is None:
            found.append(cell)
        elif (draw := draws.get(key)) is not None:
            phases = PhaseWatts(
                prefill=_short(draw.prefill), decode=_short(draw.decode), idle=_short(draw.idle)
            )
            found.append(cell.model_copy(update={"watts": _short(draw.busy), "phase_watts": phases}))
        elif (known := before.get(key)) is not None:
            found.append(cell.model_copy(update={"watts": known.watts, "phase_watts": known.phase_watts}))
        else:
            found.append(cell)
    return found


def _key(workload_class: str, cell: ProfileCell) -> tuple[DrawPlace, int]:
    place = DrawPlace(workload_class, cell.accelerator, cell.accelerators, cell.mode)
    return place, cell.power_cap_percent


def _short(watts: float | None) -> float | None:
    return None if watts is None else round(watts, 1)
