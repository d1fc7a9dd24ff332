"""A service's last day: what is counted into it, what is forgotten, and what is kept over a restart."""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import replace
from typing import Any, cast

import pytest
from pydantic import ValidationError
from tests.operator.builders import SETTINGS

from busbar.kube.client import KubeClient
from busbar.kube.contracts.demand import TIME_EDGES_MS, Totals
from busbar.kube.errors import ConnectionFailed, NotFound
from busbar.operator.serving.history import HOUR_S, Counts, History, Load, Spent, percentile_ms
from busbar.operator.serving.history_keeper import NAME, HistoryKeeper
from busbar.operator.write import kept_object
from busbar.scheduler.autoscale.day_profile import BIN_S, BINS, DayProfile

NOON = 500_000 * HOUR_S + 10.0


def totals(answered: int, refused: int = 0, **fields: Any) -> Totals:
    return Totals(answered=answered, within=answered, refused=refused, prompt_tokens=100 * answered, **fields)


def test_a_day_is_what_was_counted_since_the_first_reading_and_no_more_than_24_whole_hours() -> None:
    history = History()
    history.answered(totals(1000, first_token={30: 1000}), NOON)
    history.answered(totals(1010, 2, first_token={30: 1004, 31: 6}), NOON + 1)
    history.answered(totals(1015, 2, first_token={30: 1009, 31: 6}), NOON + HOUR_S)
    day = history.day(NOON + HOUR_S)
    assert (day.requests, day.within, day.tokens, day.first_token) == (17, 15, 1500, {30: 9, 31: 6})
    assert history.day(NOON + 24 * HOUR_S).requests == 17
    assert history.day(NOON + 25 * HOUR_S).requests == 5
    assert history.day(NOON + 26 * HOUR_S) == Counts()


def test_a_restarted_gateway_counts_from_zero() -> None:
    history = History()
    history.answered(totals(1000, first_token={30: 5}), NOON)
    history.answered(totals(4, first_token={29: 4}), NOON + 1)
    assert (history.day(NOON + 1).requests, history.day(NOON + 1).first_token) == (4, {29: 4})


def test_money_and_joules_are_those_that_were_spent_since_and_never_negative() -> None:
    history = History()
    history.used(Spent(cost=7.0, joules=50.0), NOON)
    history.used(Spent(cost=7.5, joules=80.0), NOON + 60)
    history.used(Spent(cost=1.0, joules=90.0), NOON + 120)  # of a status that was restored
    history.used(Spent(cost=1.25, joules=90.0), NOON + 180)
    day = history.day(NOON + 180)
    assert (day.cost, day.joules) == (0.75, 40.0)


def test_hours_without_anything_take_no_place_and_a_clock_that_goes_back_loses_nothing() -> None:
    history = History()
    for hour, answered in ((0, 0), (1, 5), (2, 5), (9, 6), (8, 8), (9, 9)):
        history.answered(totals(answered), NOON + hour * HOUR_S)
        assert history.day(NOON + 9 * HOUR_S).requests == answered
    assert len(history.hours) == 2


@pytest.mark.parametrize("part", [0.5, 0.9, 0.99])
def test_a_percentile_is_within_the_width_of_a_class(part: float) -> None:
    rng = random.Random(0)
    times = [rng.lognormvariate(5.0, 1.0) for _ in range(5000)]
    classes: dict[int, int] = {}
    for each in times:
        place = next(i for i, edge in enumerate(TIME_EDGES_MS) if each <= edge)
        classes[place] = classes.get(place, 0) + 1
    found, true = percentile_ms(classes, part), sorted(times)[int(part * len(times))]
    assert found is not None
    assert 1 / 1.1 < found / true < 1.1
    assert percentile_ms({}, part) is None
    assert percentile_ms({len(TIME_EDGES_MS): 3}, part) == TIME_EDGES_MS[-1], "nothing longer is told apart"


class Server:
    """ConfigMaps as an API server keeps them: a write must name the version that it replaces."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.writes = 0
        self.failing: list[Exception] = []

    async def get(self, _resource: Any, name: str, _namespace: str) -> dict[str, Any]:
        if self.failing:
            raise self.failing.pop()
        if name not in self.objects:
            raise NotFound(404, "NotFound", "no such ConfigMap", "GET")
        return self.objects[name]

    async def create(self, _resource: Any, body: dict[str, Any], _namespace: str) -> dict[str, Any]:
        assert body["metadata"]["name"] not in self.objects
        return self._write(body)

    async def replace(self, _resource: Any, body: dict[str, Any], _namespace: str) -> dict[str, Any]:
        name = body["metadata"]["name"]
        assert body["metadata"]["resourceVersion"] == self.objects[name]["metadata"]["resourceVersion"]
        return self._write(body)

    def _write(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.failing:
            raise self.failing.pop()
        self.writes += 1
        written = {**body, "metadata": {**body["metadata"], "resourceVersion": str(self.writes)}}
        self.objects[body["metadata"]["name"]] = written
        return written


def keeper(server: Server, histories: dict[str, History], **settings: Any) -> HistoryKeeper:
    client = cast(KubeClient, server)
    known = replace(SETTINGS, **{"gateway_url": "http://gateway", "history_period_s": 0.01, **settings})
    return HistoryKeeper(client, client, histories, known, lambda: NOON)


async def some_time(of: HistoryKeeper, seconds: float = 0.1) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(of.run(), seconds)


async def until_written(of: HistoryKeeper, server: Server) -> None:
    """Runs until something was written, however long that takes here."""
    before, running = server.writes, asyncio.create_task(of.run())
    async with asyncio.timeout(60):
        while server.writes == before:  # noqa: ASYNC110 - the server is a dictionary
            await asyncio.sleep(0.005)
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


async def test_another_process_goes_on_from_what_was_written_and_nothing_new_is_not_written() -> None:
    server, history = Server(), History()
    history.answered(totals(1), NOON)
    history.answered(totals(8, first_token={30: 7}), NOON)
    history.used(Spent(cost=2.0), NOON)
    await until_written(keeper(server, {"uid-web": history, "uid-idle": History()}), server)
    histories: dict[str, History] = {}
    second = keeper(server, histories)
    await second.load()
    assert set(histories) == {"uid-web"}
    assert histories["uid-web"].day(NOON) == history.day(NOON)
    await some_time(second)
    assert server.writes == 1, "nothing has changed"
    histories["uid-web"].answered(totals(20), NOON)  # the first reading of this process
    histories["uid-web"].used(Spent(cost=2.5), NOON)
    assert (histories["uid-web"].day(NOON).requests, histories["uid-web"].day(NOON).cost) == (7, 0.5)
    await until_written(second, server)
    assert server.writes == 2


def test_the_load_by_time_of_day_goes_on_without_the_bin_that_is_not_over() -> None:
    profile = DayProfile()
    for step in range(3 * BINS):
        profile.observe(NOON + step * BIN_S, 1 + step % BINS / 7)
    history = History(load=Load.of(profile))
    assert history.profile.means.keys() == profile.means.keys()
    assert all(history.profile.at(s) == pytest.approx(profile.at(s), rel=1e-3) for s in range(0, 86_400, 77))
    assert list(history.profile.today) == list(profile.today)[:-1]
    assert Load.of(DayProfile()) is None
    assert Load.of(DayProfile(today={7: (2.0, 1)})) is None


async def test_the_load_is_kept_with_its_service_and_written_when_a_bin_is_over() -> None:
    server, history = Server(), History()
    for step in range(20):
        history.profile.observe(NOON + step * 100, 3.0)
    first = keeper(server, {"uid-web": history})
    await until_written(first, server)
    history.profile.observe(NOON + 2000, 3.0)
    await some_time(first)
    assert server.writes == 1, "the bin is not over"
    history.profile.observe(NOON + 2100, 3.0)
    await until_written(first, server)
    assert server.writes == 2
    histories: dict[str, History] = {}
    await keeper(server, histories).load()
    assert list(histories["uid-web"].profile.today) == list(history.profile.today)[:-1]


@pytest.mark.parametrize(
    "load",
    [
        {"means": [1.0] * (BINS - 1), "days": [1] * BINS},
        {"means": [-1.0] * BINS, "days": [1] * BINS},
        {"means": [1.0] * BINS, "days": [0] * BINS},
        {"means": [None] * BINS, "days": [1] * BINS},
        {"means": [1.0] * BINS, "days": [8] * BINS},
        {"means": [None] * BINS, "days": [0] * BINS, "today": [1.0] * (BINS + 1)},
    ],
)
def test_a_load_that_nobody_wrote_is_refused(load: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        History.model_validate({"load": load})


async def test_a_write_that_failed_is_done_again_and_without_a_gateway_nothing_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, history = Server(), History()
    history.used(Spent(cost=2.0), NOON)
    await some_time(keeper(server, {"uid-web": history}, gateway_url=""))
    assert server.writes == 0
    server.failing = [NotFound(404, "NotFound", "", "GET"), ConnectionFailed("away")]
    await until_written(keeper(server, {"uid-web": history}), server)
    assert server.writes == 1
    monkeypatch.setattr(kept_object, "AGAIN_S", 0.01)
    server.failing = [ConnectionFailed("away")]
    histories: dict[str, History] = {}
    await keeper(server, histories).load()
    assert "uid-web" in histories


async def test_what_cannot_be_read_begins_anew(caplog: pytest.LogCaptureFixture) -> None:
    server = Server()
    for data in ("", "AAAA", "!", None):
        server.objects[NAME] = {"metadata": {"resourceVersion": "1"}, "binaryData": {"checkpoint": data}}
        histories: dict[str, History] = {}
        await keeper(server, histories).load()
        assert not histories
        assert "is passed over" in caplog.text
        caplog.clear()


async def test_where_all_are_too_many_the_services_with_most_requests_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from busbar.operator.serving import kept_services

    monkeypatch.setattr(kept_services, "MOST_BYTES", 4000)
    rng, server = random.Random(0), Server()
    histories = {f"uid-{n:03}": History() for n in range(200)}
    for n, history in enumerate(histories.values()):
        history.answered(totals(0), NOON)
        history.answered(totals(n, first_token={rng.randrange(80): n}), NOON)
        history.used(Spent(cost=rng.random()), NOON)
    await until_written(keeper(server, histories), server)
    read: dict[str, History] = {}
    await keeper(server, read).load()
    assert 20 < len(read) < 200
    assert set(read) == set(sorted(histories)[-len(read) :])
