"""Requests are placed so that the remaining capacity stays most useful."""

from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np
import pytest
from benchmarks.scheduling.openb import Fgd, Machine, Packer
from numpy.typing import NDArray

from busbar.scheduler.placement.fragment_prices import WHOLE, FragmentPrices
from busbar.scheduler.placement.packing import PodRequest, typical

WHOLE_NODE = PodRequest(4000, 1024, 8, 1000)
ONE = PodRequest(4000, 1024, 1, 1000)
HALF = PodRequest(2000, 1024, 1, 500)


def worth(packer: Packer) -> list[float]:
    scorer = packer.scorer
    return [float(scorer.worth(scorer._described([state]))[0]) for state in packer.states]


def market(often: dict[int, float], fragments: NDArray[np.int64]) -> NDArray[np.float64]:
    found = FragmentPrices(often)
    found.adjust(fragments)
    return found.worth()


def test_a_node_is_worth_what_the_workload_could_fill_of_it() -> None:
    machines = [Machine("rich", 32_000, 10**6, 8, "G"), Machine("poor", 12_000, 10**6, 8, "G")]
    packer = Packer(machines, [(ONE, 1.0)])
    # CPU for three of eight requests: the next request fits both nodes, and five accelerators of one are stranded.
    assert worth(packer) == pytest.approx([8000, 3000])
    packer.place(PodRequest(31_000, 0, 0, 0))
    assert worth(packer) == pytest.approx([0, 3000])


def test_half_the_workload_needs_all_devices_of_a_node() -> None:
    packer = Packer([Machine("n", 64_000, 10**6, 8, "G")], [(WHOLE_NODE, 0.25), (ONE, 0.75)])
    assert worth(packer) == pytest.approx([8000])
    packer.place(ONE)
    assert worth(packer) == pytest.approx([0.75 * 7000])


def test_requests_without_devices_go_where_cpu_is_left_over() -> None:
    machines = [Machine("tight", 32_000, 10**6, 8, "G"), Machine("rich", 64_000, 10**6, 2, "G")]
    packer = Packer(machines, [(ONE, 1.0)])
    assert [packer.place(PodRequest(8000, 0, 0, 0)) for _ in range(7)] == [1] * 7
    assert worth(packer) == pytest.approx([8000, 2000])


def test_a_share_goes_onto_the_device_that_is_shared_already() -> None:
    packer = Packer([Machine("n", 64_000, 10**6, 2, "G")], [(ONE, 0.5), (HALF, 0.5)])
    packer.place(HALF)
    packer.place(HALF)
    assert packer.free == [1000]


def test_a_whole_machine_is_kept_for_requests_that_need_it() -> None:
    machines = [Machine("a", 64_000, 10**6, 8, "G"), Machine("b", 64_000, 10**6, 2, "G")]
    packer = Packer(machines, [(WHOLE_NODE, 0.5), (ONE, 0.5)])
    assert packer.place(ONE) == 1
    assert packer.place(WHOLE_NODE) == 0


def test_models_memory_and_devices_are_respected() -> None:
    packer = Packer([Machine("a", 64_000, 1000, 1, "G")], typical(Counter([ONE])))
    assert packer.place(PodRequest(1000, 10, 1, 1000, frozenset({"H"}))) is None
    assert packer.place(PodRequest(1000, 2000, 1, 1000)) is None
    assert packer.place(PodRequest(1000, 10, 2, 1000)) is None
    assert packer.place(PodRequest(1000, 10, 1, 1000, frozenset({"G"}))) == 0
    assert packer.place(HALF) is None


def test_without_machines_or_devices_nothing_breaks() -> None:
    assert Packer([], typical(Counter([ONE]))).place(ONE) is None
    cpu = Packer([Machine("a", 4000, 1000, 0, "")], [])
    assert cpu.place(HALF) is None
    assert [cpu.place(PodRequest(3000, 1, 0, 0)) for _ in range(2)] == [0, None]


def test_shares_are_exact_though_their_worth_is_counted_in_grains() -> None:
    packer = Packer([Machine("a", 64_000, 1000, 1, "G")], typical(Counter([ONE])))
    assert packer.place(PodRequest(0, 0, 1, 525)) == 0
    assert packer.place(PodRequest(0, 0, 1, 476)) is None
    assert packer.place(PodRequest(0, 0, 1, 475)) == 0
    assert packer.free == []


def test_a_free_fragment_is_worth_the_requests_that_will_fill_it() -> None:
    fragments = np.zeros(WHOLE + 1, dtype=np.int64)
    fragments[53] = 20
    value = market({500: 10.0, 470: 100.0}, fragments)
    assert value[WHOLE] == 1000
    assert value[46] == 0
    assert value[47] == pytest.approx(470)
    assert 470 <= value[53] <= 500
    assert (np.diff(value) >= 0).all()


def test_many_free_fragments_that_only_rare_requests_fit_are_worth_nothing() -> None:
    fragments = np.zeros(WHOLE + 1, dtype=np.int64)
    few, many = fragments.copy(), fragments.copy()
    few[19], many[19] = 5, 900
    assert market({160: 50.0, 810: 500.0}, few)[19] == pytest.approx(160)
    assert market({160: 50.0, 810: 500.0}, many)[19] == pytest.approx(0)


def test_scores_that_are_kept_are_those_that_would_be_computed_now() -> None:
    random = Random(3)
    shares = (160, 320, 470, 810, 1000)
    kinds = [PodRequest(c, 0, 1, s) for c in (2000, 6000, 11_000) for s in shares]
    kinds += [
        PodRequest(9000, 0, 0, 0),
        PodRequest(8000, 0, 4, 1000),
        PodRequest(8000, 0, 1, 1000, frozenset({"T"})),
    ]
    machines = [Machine(f"g{i}", 96_000, 10**6, 8, "G") for i in range(6)]
    machines += [Machine(f"t{i}", 52_000, 10**6, 2, "T") for i in range(9)]
    order = [random.choice(kinds) for _ in range(150)]
    kept, fresh = Packer(machines, typical(Counter(order))), Packer(machines, typical(Counter(order)))
    for request in order:
        fresh.scorer._forget()
        fresh._node_index.reset()
        assert kept.place(request) == fresh.place(request)
    assert kept.states == fresh.states
    assert min(min(cpu_m, whole, *parts, 0) for _, cpu_m, whole, parts in kept.states) == 0
    assert min(kept.memory) >= 0


def test_more_is_placed_than_by_looking_at_the_next_request_only() -> None:
    """Eight accelerators and CPU for eight ordinary requests; CPU-only requests belong on the other nodes."""
    random = Random(0)
    machines = [Machine(f"g{i}", 96_000, 10**6, 8, "G") for i in range(12)]
    machines += [Machine(f"t{i}", 96_000, 10**6, 2, "T") for i in range(12)]
    kinds = [ONE, PodRequest(12_000, 0, 1, 1000), PodRequest(12_000, 0, 1, 470), PodRequest(16_000, 0, 0, 0)]
    order = [random.choice(kinds) for _ in range(400)]
    left = []
    workload = typical(Counter(order))
    for packer in (Packer(machines, workload), Packer(machines, workload, Fgd)):
        for request in order:
            packer.place(request)
        left.append(sum(packer.free))
    assert left[0] <= 0.03 * 1000 * (12 * 8 + 12 * 2)
    assert left[0] < left[1]
