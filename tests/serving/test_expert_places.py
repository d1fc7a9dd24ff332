"""Which experts stay in memory: what is used often, and soon."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from busbar.workloads.serving.expert_places import LATELY, WINDOW, ExpertPlaces

Pass = list[list[int]]
"""The experts that each layer uses."""


def misses(places: ExpertPlaces, passes: list[Pass]) -> list[int]:
    """Of each pass; the experts of a layer are busy while it is computed, and nothing is read ahead."""
    found = []
    for each in passes:
        missed = 0
        for layer, used in enumerate(each):
            places.count(layer, used)
            missing = places.missing(layer, used)
            missed += len(missing)
            places.busy[layer, [expert for expert in used if expert not in missing]] = True
            taken = places.take(layer, missing, layer)
            assert [expert for expert, _ in taken] == missing
            places.busy[:] = False
        found.append(missed)
    return found


def best(passes: list[Pass], count: int) -> int:
    """Misses of one place after the other when the future is known (Belady 1966)."""
    order = [(layer, expert) for each in passes for layer, used in enumerate(each) for expert in used]
    held: set[tuple[int, int]] = set()
    missed = 0
    for now, key in enumerate(order):
        if key in held:
            continue
        missed += 1
        if len(held) == count:
            rest = order[now + 1 :]
            held.remove(max(held, key=lambda each: rest.index(each) if each in rest else len(rest)))
        held.add(key)
    return missed


def test_where_all_are_used_a_fixed_part_stays() -> None:
    """The least recently used one would be the next to be used: every use would miss."""
    passes = [[list(range(4))] * 10] * 20
    found = misses(ExpertPlaces(10, 4, 24, 2), passes)
    assert found[0] == 40
    assert max(found[3:]) <= 40 - 24 + 4  # the optimum, and one layer for those that are busy


def test_what_is_used_often_stays() -> None:
    rng = random.Random(0)
    often = [rng.sample(range(16), 3) for _ in range(6)]
    rare = [[each for each in range(16) if each not in often[layer]] for layer in range(6)]
    passes = [[[*often[layer], rng.choice(rare[layer])] for layer in range(6)] for _ in range(60)]
    found = misses(ExpertPlaces(6, 16, 30, 4), passes)
    assert sum(found[WINDOW:]) <= 1.1 * 6 * len(found[WINDOW:])  # little more than the rare ones


@settings(max_examples=10)
@given(seed=st.integers(0, 2**16), count=st.integers(8, 30))
def test_it_is_near_the_best_that_knows_the_future(seed: int, count: int) -> None:
    rng = random.Random(seed)
    liked = [[rng.random() ** 2 for _ in range(8)] for _ in range(4)]

    def some(weights: list[float]) -> list[int]:
        return sorted(range(8), key=lambda i: rng.random() ** (1 / (weights[i] + 0.01)), reverse=True)[:3]

    passes = [[some(weights) for weights in liked] for _ in range(12)]
    assert sum(misses(ExpertPlaces(4, 8, count, 3), passes)) <= 1.9 * best(passes, count) + 10


def filled(layers: int, experts: int, places: int) -> ExpertPlaces:
    """All are taken, by the first layers' experts, which have been used in every pass."""
    made = ExpertPlaces(layers, experts, places, experts)
    for index in range(places):
        layer, expert = divmod(index, experts)
        made.take(layer, [expert], layer)
    made.busy[:] = False
    return made


def test_a_busy_one_never_gives_way() -> None:
    places = filled(3, 4, 8)
    places.busy[:2] = True
    assert places.take(2, [0, 1], 2) == []
    places.busy[0, 1] = False
    assert [expert for expert, _ in places.take(2, [0, 1], 2)] == [0]
    assert places.place(0, 1) is None


def test_what_is_read_ahead_takes_no_place_that_this_pass_needs() -> None:
    places = filled(4, 4, 12)
    places.foresee(3, [0, 1])
    places.busy[2] = True
    assert places.take(3, [0, 1], 2, ahead=True) == []  # those of the next pass's first layers come before
    places.busy[2, :1] = False  # computed: needed again after a whole pass
    assert [expert for expert, _ in places.take(3, [0, 1], 2, ahead=True)] == [0]
    assert places.place(2, 0) is None
    assert places.ahead[3].tolist() == [True, False, False, False]
    assert places.count(3, [0, 1]) == 1


def test_what_is_foreseen_wrongly_is_trusted_less_and_takes_no_place() -> None:
    def take() -> list[tuple[int, int]]:
        places.foresee(1, [3])
        return places.take(1, [3], 0, ahead=True)

    places = ExpertPlaces(2, 4, 4, 1)
    for _ in range(WINDOW):  # each in half of the passes, and the first of the second layer in none
        places.count(0, [0, 1])
        places.count(0, [2, 3])
    assert [expert for expert, _ in places.take(0, [0, 1, 2, 3], 0)] == [0, 1, 2, 3]
    places.busy[:] = False
    for _ in range(4 * WINDOW):
        places.foresee(1, [3])
        places.count(1, [0])
    assert places.right < 0.1
    assert take() == []
    for _ in range(4 * WINDOW):
        places.foresee(1, [0])
        places.count(1, [0])
    assert places.right > 0.9
    assert len(take()) == 1


def test_what_was_not_read_gives_its_place_back() -> None:
    places = ExpertPlaces(2, 4, 1, 1)
    assert places.take(0, [2], 0) == [(2, 0)]
    places.drop(0, 2)
    assert places.place(0, 2) is None
    assert places.take(1, [3], 0) == [(3, 0)]


def test_the_use_of_the_last_passes_is_what_counts() -> None:
    places = ExpertPlaces(1, 4, 2, 1)
    for used in ([0, 1],) * 40 + ([2, 3],) * 20:
        places.count(0, used)
    assert places.often(0) == [2, 3]
    waits = places.waits(0)
    assert np.argsort(waits[0])[:2].tolist() in ([2, 3], [3, 2])


def test_reading_ahead_stops_where_it_is_not_used_and_is_tried_again() -> None:
    places = ExpertPlaces(2, 4, 8, 2)

    def read_ahead(used: list[int]) -> None:
        places.take(1, [0, 1], 0, ahead=True)
        places.busy[:] = False
        places.count(1, used)
        for expert in (0, 1):
            places.drop(1, expert)

    assert places.pays()
    for _ in range(LATELY):
        read_ahead([2, 3])
    assert [places.pays() for _ in range(2 * LATELY)].count(True) == 2
    for _ in range(LATELY):
        read_ahead([0, 1])
    assert all(places.pays() for _ in range(LATELY))
