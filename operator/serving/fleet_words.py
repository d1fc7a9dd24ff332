"""Why a fleet changed, and what it lacks, in sentences for the service's status."""

from __future__ import annotations

from collections.abc import Mapping

from busbar.operator.serving.fleet_input import Seen, priced, window_too_short
from busbar.operator.serving.replica_speed import Speeds
from busbar.operator.serving.room import held_back, reserve_missing, zones_missing
from busbar.scheduler.autoscale.fleet import Cause, Fleet
from busbar.scheduler.autoscale.mix import Limits


def cause_sentence(cause: Cause, load: float, rate: float, room: float, limits: Limits) -> str:
    """Why the target changed.

    Args:
        load: requests per second that the new target is for.
        rate: those of the last ten seconds.
        room: what the ready replicas sustain.
    """
    part = 100 * limits.domain_reserve
    reserve = f", and to carry {part:.0f} % of the load without any one of them" if part else ""
    have = f"the ready replicas sustain {room:.3g}"
    return {
        Cause.PANIC: f"{rate:.3g} requests/s came in the last ten seconds, or the oldest waited too long; {have}.",
        Cause.FORECAST: f"{load:.3g} requests/s are expected when a new replica would be ready; {have}.",
        Cause.IDLE: f"The load of the last minutes needs fewer, {load:.3g} requests/s are expected; {have}.",
        Cause.SWITCH: f"Another mix of types carries {load:.3g} requests/s for less.",
        Cause.BUDGET: "The replicas cost more than spec.scaling.maxCostPerHour; the mix within it that carries most remains.",
        Cause.DOMAINS: f"Replicas are to stand in {limits.min_domains} zones{reserve}.",
    }[cause]


def hindrance(
    seen: Seen,
    fleet: Fleet,
    target: Mapping[str, int],
    each: Mapping[str, float],
    upper: float | None,
    speeds: Speeds,
) -> str:
    """What the target cannot do, or what it is made without knowing; of several things what comes first here. Empty: nothing.

    Args:
        each: requests per second of one replica, by pool.
        upper: those that may come until a new replica is ready; None: not known yet.
        speeds: of the pools, with those that are not measured or not usable.
    """
    spec = seen.service.spec.scaling
    said = (
        held_back(fleet.columns, fleet.limits, target, each, upper) if upper is not None else "",
        zones_missing(spec.min_zones, fleet.limits, seen.room),
        reserve_missing(spec.zone_reserve, fleet.exposed),
        _budget_without_prices(seen),
        window_too_short(seen.service, fleet.settings.start_s),
        _together("Not chosen yet: {}.", "; ", speeds.refused),
        _together("{}", " ", speeds.predicted),
    )
    return next(filter(None, said), "")


def _budget_without_prices(seen: Seen) -> str:
    if seen.service.spec.scaling.max_cost_per_hour is None or priced(seen.pools):
        return ""
    return "scaling.maxCostPerHour limits nothing: not every pool has a pricePerHour."


def _together(form: str, between: str, sentences: Mapping[str, str]) -> str:
    """What is said of several pools, each sentence once; empty where nothing is said."""
    return form.format(between.join(sorted(set(sentences.values())))) if sentences else ""
