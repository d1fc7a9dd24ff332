"""Prices of watt-hours in work, for people: a price in value compares jobs, and means nothing to anybody else."""

from __future__ import annotations

from ..fairness.work import WorkRates
from ..model.plans import PowerPrice
from .state import PlanningState


def power_prices(state: PlanningState) -> tuple[PowerPrice, ...]:
    """The price of a watt-hour on each limiting domain, by name; 0 where watts hold nobody back.

    In work it is what the last job pays that gets watts there: the part of its work (in unit-hours, as entitlements count
    it) that it does for its watts and not for its accelerators.
    """
    feeds, prices = state.cluster.feeds, state.market.domains
    if feeds is None:
        return ()
    marginal = _work_per_value(state) if any(price > 0 for price in prices.values()) else {}
    work = {
        number: price * marginal.get(price, 0.0)
        for number, domain in enumerate(feeds.domains)
        if (price := prices.get(domain.name, 0.0)) > 0
    }
    return tuple(
        PowerPrice(domain.name, prices.get(domain.name, 0.0), work.get(number, 0.0))
        for number, domain in enumerate(feeds.domains)
    )


def _work_per_value(state: PlanningState) -> dict[float, float]:
    """By price of a watt-hour: the work that one of value stands for, of the job that gains least of those that gain."""
    rates = WorkRates(state.holdings.rate, state.holdings.capacity_m)
    least: dict[float, tuple[float, float]] = {}
    for _, assignment in sorted(state.assignments.items()):
        for one in assignment.option.candidates:
            price = state.market.watts.get(one.pool, 0.0)
            if price <= 0 or not one.draw_w or one.value <= 0:
                continue
            gain = abs(one.value - state.market.cost(one)) / one.value
            if price not in least or gain < least[price][0]:
                least[price] = gain, rates.work(assignment.option.shared, one) / one.value
    return {price: work for price, (_, work) in least.items()}
