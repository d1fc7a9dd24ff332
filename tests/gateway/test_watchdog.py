"""Requests that wait too long, and replicas that are probed, on a test clock."""

from __future__ import annotations

import asyncio

from busbar.gateway.watchdog import Silence, Watchdog
from busbar.scheduler.autoscale.contacts import STRIKES


class World:
    """A clock, healthy and unhealthy replicas, and the probes that they got."""

    def __init__(self) -> None:
        self.now = 100.0
        self.well = True
        self.asked: list[str] = []
        self.dog = Watchdog(self.probe, probe_after_s=10.0, clock=lambda: self.now)

    async def probe(self, url: str) -> bool:
        self.asked.append(url)
        return self.well

    async def after(self, seconds: float) -> None:
        """Advances the clock and runs the watchdog."""
        self.now += seconds
        self.dog.sweep()
        for _ in range(3):
            await asyncio.sleep(0)


async def test_silence_beyond_its_limit_ends_a_wait_and_data_restarts_the_limit() -> None:
    world = World()
    cut: list[bool] = []
    with world.dog.watch("", 30.0) as watch:
        watch.cut = lambda: cut.append(True)
        await world.after(29.0)
        watch.heard()
        await world.after(29.0)
        watch.pause()
        await world.after(1000.0)
        assert not cut
        watch.heard()
        await world.after(31.0)
        await world.after(31.0)
    assert cut == [True]
    assert watch.silence == Silence("it was silent for 30 s", hung=False)
    assert world.asked == []  # no replica is assigned to the client
    await world.dog.stop()


async def test_a_silent_replica_is_asked_once_for_all_and_given_up_after_two_bad_answers() -> None:
    world = World()
    with (
        world.dog.watch("a", 600.0) as one,
        world.dog.watch("a", 600.0) as two,
        world.dog.watch("b", 600.0) as b,
    ):
        await world.after(9.0)
        assert world.asked == []
        b.heard()
        await world.after(2.0)
        assert world.asked == ["a"]
        world.well = False
        two.heard()
        for strike in range(STRIKES):
            assert one.silence is None, strike
            await world.after(5.0)
            b.heard()
        assert world.asked == ["a"] * (1 + STRIKES)
        assert one.silence is not None
        assert one.silence.hung
        assert two.silence == one.silence  # the same length of silence
        assert b.silence is None
    await world.dog.stop()


async def test_a_good_health_check_resets_the_count_of_failures() -> None:
    world = World()
    with world.dog.watch("a", 600.0) as watch:
        for well in (False, True, False, True):
            world.well = well
            await world.after(10.0)
        assert len(world.asked) == 4
        assert watch.silence is None
    await world.dog.stop()
