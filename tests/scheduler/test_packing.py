"""Small requests go where they leave the rest most useful."""

from __future__ import annotations

import pytest

from busbar.scheduler.packing import Machine, Packer, Request, typical

WHOLE = Request(4000, 1024, 8, 1000)
ONE = Request(4000, 1024, 1, 1000)
HALF = Request(2000, 1024, 1, 500)


def test_fragmentation_is_what_the_typical_request_cannot_use() -> None:
    packer = Packer([Machine("n", 64_000, 10**6, 8, "G")], [(WHOLE, 0.25), (ONE, 0.75)])
    assert packer.fragmentation(0, 64_000, [1000] * 8) == pytest.approx(0)
    # One device gone: requests for eight can use nothing of the other seven.
    assert packer.fragmentation(0, 64_000, [0] + [1000] * 7) == pytest.approx(0.25 * 7000)
    # No CPU left: nobody can use anything.
    assert packer.fragmentation(0, 0, [1000] * 8) == pytest.approx(8000)


def test_a_share_goes_onto_the_device_that_is_broken_already() -> None:
    packer = Packer([Machine("n", 64_000, 10**6, 2, "G")], [(ONE, 0.5), (HALF, 0.5)])
    packer.place(HALF)
    packer.place(HALF)
    assert sorted(packer.free[0]) == [0, 1000]


def test_a_whole_machine_is_kept_for_those_who_need_it() -> None:
    machines = [Machine("a", 64_000, 10**6, 8, "G"), Machine("b", 64_000, 10**6, 2, "G")]
    packer = Packer(machines, [(WHOLE, 0.5), (ONE, 0.5)])
    assert packer.place(ONE) == 1
    assert packer.place(WHOLE) == 0


def test_models_memory_and_devices_are_respected() -> None:
    packer = Packer([Machine("a", 64_000, 1000, 1, "G")], typical([ONE]))
    assert packer.place(Request(1000, 10, 1, 1000, frozenset({"H"}))) is None
    assert packer.place(Request(1000, 2000, 1, 1000)) is None
    assert packer.place(Request(1000, 10, 2, 1000)) is None
    assert packer.place(Request(1000, 10, 1, 1000, frozenset({"G"}))) == 0
    assert packer.place(HALF) is None
