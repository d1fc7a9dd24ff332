"""What differs between two tuples is what a comparison of all their objects finds, in the same order."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from busbar.scheduler.model.diff import CHUNK, differing


class One:
    """Known by its identity."""


@given(st.integers(0, 2 * CHUNK), st.randoms(use_true_random=False), st.integers(0, 30))
def test_all_that_came_went_and_moved_is_found(size: int, random: Random, changes: int) -> None:
    old = [One() for _ in range(size)]
    replaced = random.choice((0.0, 0.1, 0.4, 0.8))
    new = [One() if random.random() < replaced else one for one in old]
    for _ in range(changes):
        at = random.randint(0, len(new))
        kind = random.randrange(5) if at < len(new) else 0
        if kind == 0:
            new[at:at] = [One() for _ in range(random.choice((1, 1, 12)))]
        elif kind == 1:
            new[at] = One()
        elif kind == 2:
            del new[at : at + random.choice((1, 1, 12))]
        elif kind == 3:
            new.insert(random.randint(0, len(new) - 1), new.pop(at))
        else:
            new[at : at + 12] = [One() for _ in new[at : at + 12]]
    before, after = {id(one) for one in old}, {id(one) for one in new}
    gone, come = differing(tuple(old), tuple(new))
    assert gone == [one for one in old if id(one) not in after]
    assert come == [one for one in new if id(one) not in before]
