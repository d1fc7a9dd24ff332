"""Arrivals never stop, and still nobody waits without bound.

Small clusters are watched for some hours as production decides them: a plan every minute, an answer to every
event. Whatever comes, a gang starts within what its right needs to collect its room:

    right                    bound, each with two rounds for the plans
    priority                 min_run_s: by then every job of lower priority may be stopped
    patience                 its patience, then the longest job beside it ends; min_run_s for one that was started
                             in the room of the reservation
"""

from __future__ import annotations

from benchmarks.scheduling.replay import ROUND_S, Arrival, Situation, replay
from benchmarks.scheduling.scenario_parts import MIN_RUN_S, TWO, H, cluster, job
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from busbar.scheduler import Policy

quiet = settings(
    max_examples=6, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
POLICY = Policy(solver=False)
GANG_S = 1500.0
"""When the gang comes."""


@st.composite
def beside(draw: st.DrawFn, nodes: int, hours: float) -> tuple[tuple[Arrival, ...], float]:
    """Jobs that keep coming faster than they can be served, and the hours of the longest."""
    kinds = draw(
        st.lists(st.tuples(st.sampled_from((1, 2, 4, 8)), st.floats(0.2, 1.0)), min_size=2, max_size=5)
    )
    load = draw(st.floats(0.95, 1.3))
    found: list[Arrival] = []
    at_s = 0.0
    while at_s < hours * H:
        size, length_h = kinds[len(found) % len(kinds)]
        found.append(job(f"s{len(found):04d}", length_h, gpus=size, at=at_s))
        at_s += length_h * H * size / (load * 8 * nodes)
    return tuple(found), max(length_h for _, length_h in kinds)


def waited_s(
    stream: tuple[Arrival, ...], own: Arrival, nodes: int, hours: float, known: bool, tenants: int = 1
) -> float:
    """Of the gang; if it never started: as long as the watch."""
    snapshot = cluster({"H100": nodes}, *TWO[:tenants])
    return replay(Situation(snapshot, (*stream, own), hours, known, POLICY)).wait_s("gang")


def gang(pods: int, *, tenant: str = "a", priority: int = 100, hours: float = 0.4) -> Arrival:
    return job("gang", hours, gpus=8, pods=pods, at=GANG_S, tenant=tenant, priority=priority)


PROMPT_S = MIN_RUN_S + 2 * ROUND_S


@quiet
@given(st.data(), st.integers(1, 3), st.booleans())
def test_a_gang_of_higher_priority_waits_no_longer_than_its_bound(
    data: st.DataObject, nodes: int, known: bool
) -> None:
    stream, _ = data.draw(beside(nodes, 0.75))
    pods = data.draw(st.integers(1, nodes))
    assert waited_s(stream, gang(pods, priority=500), nodes, 0.75, known) <= PROMPT_S


@quiet
@given(st.data(), st.integers(1, 3), st.booleans(), st.integers(1, 2))
def test_a_gang_of_equal_rights_waits_no_longer_than_its_bound(
    data: st.DataObject, nodes: int, known: bool, tenants: int
) -> None:
    stream, longest_h = data.draw(beside(nodes, 4.0))
    pods = nodes if tenants == 2 else data.draw(st.integers(1, nodes))
    own = gang(pods, tenant="b" if tenants == 2 else "a")
    expected_s = own.hours * H if known else max(POLICY.expected_run_s, longest_h * H)
    bound_s = POLICY.patience * expected_s + longest_h * H + PROMPT_S
    assert waited_s(stream, own, nodes, 4.0, known, tenants) <= bound_s
