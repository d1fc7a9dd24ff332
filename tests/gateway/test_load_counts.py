"""What the gateway counts for the autoscaler: arrivals, sizes, lateness, and who still waits."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from busbar.gateway.load_counts import LoadCounts, Progress
from busbar.kube.contracts.demand import TIME_EDGES_MS, Demand, ServiceDemand, SizeCount, WindowDemand
from busbar.kube.contracts.routes import Promise

PROMISE = Promise(ttft_ms=2000, tpot_ms=100)


def answered(
    load: LoadCounts,
    at: float,
    first_s: float = 1.0,
    whole_s: float = 2.0,
    tokens: tuple[int, int] = (100, 11),
    *,
    stream: bool = True,
    code: int = 200,
    promise: Promise | None = PROMISE,
) -> None:
    """One request from its arrival to its end."""
    progress = Progress(stream)
    load.arrived(progress, at)
    progress.placed, progress.first_at = True, at + first_s
    load.left(progress)
    load.ended(progress, promise, code, tokens, at + whole_s)


def window(load: LoadCounts, seconds: int, now: float) -> WindowDemand:
    return next(w for w in load.windows(now) if w.seconds == seconds)


def test_requests_are_counted_when_they_come_and_leave_each_window_in_turn() -> None:
    load = LoadCounts()
    for second in range(100, 130):
        answered(load, second + 0.5, first_s=0.1, whole_s=0.2)
    assert [window(load, s, 130.9).arrivals for s in (10, 60, 180)] == [10, 30, 30]
    assert [window(load, s, 170.0).arrivals for s in (10, 60, 180)] == [0, 20, 30]
    assert load.windows(400.0) == []
    assert load.totals.answered == 30, "the totals stay"


def test_totals_have_the_tokens_and_of_streams_the_times_by_class() -> None:
    load = LoadCounts()
    for first_s, whole_s, tokens in ((0.1, 1.1, (100, 11)), (0.1, 0.6, (50, 11)), (0.5, 0.5, (10, 1))):
        answered(load, 100.0, first_s, whole_s, tokens)
    answered(load, 100.0, tokens=(7, 7), stream=False)
    answered(load, 100.0, tokens=(9, 9), code=500)
    totals = load.totals
    assert (totals.prompt_tokens, totals.output_tokens) == (167, 30)
    told = [
        [
            (round(TIME_EDGES_MS[place - 1]), round(TIME_EDGES_MS[place]), count)
            for place, count in times.items()
        ]
        for times in (totals.first_token, totals.per_token)
    ]
    assert told == [[(91, 108, 2), (431, 512, 1)], [(91, 108, 1), (45, 54, 1)]]


def test_the_running_second_is_not_counted_yet() -> None:
    load = LoadCounts()
    answered(load, 100.2, whole_s=0.1)
    assert window(load, 10, 100.9).arrivals == 0
    assert window(load, 10, 101.0).arrivals == 1


def test_sizes_are_counted_by_prompt_and_output_with_their_sums() -> None:
    load = LoadCounts()
    for tokens in ((64, 16), (65, 16), (60, 10), (100_000, 9000)):
        answered(load, 100.0, tokens=tokens)
    assert window(load, 10, 105.0).sizes == [
        SizeCount(prompt=0, output=0, count=2, prompt_tokens=124, output_tokens=26),
        SizeCount(prompt=1, output=0, count=1, prompt_tokens=65, output_tokens=16),
        SizeCount(prompt=8, output=7, count=1, prompt_tokens=100_000, output_tokens=9000),
    ]


@pytest.mark.parametrize(
    ("first_s", "whole_s", "stream", "late"),
    [
        (2.0, 3.0, True, (1, 0, 0)),
        (2.1, 3.0, True, (0, 1, 0)),
        (1.0, 2.0, True, (1, 0, 0)),
        (1.0, 2.1, True, (0, 0, 1)),
        (2.1, 4.0, True, (0, 1, 1)),
        (3.0, 3.0, False, (1, 0, 0)),
        (3.1, 3.1, False, (0, 0, 0)),
    ],
    ids=["both kept", "first late", "tokens kept", "tokens late", "both late", "whole kept", "whole late"],
)
def test_an_answer_is_within_the_promise_or_late_by_its_first_or_its_later_tokens(
    first_s: float, whole_s: float, stream: bool, late: tuple[int, int, int]
) -> None:
    load = LoadCounts()
    answered(load, 100.0, first_s, whole_s, stream=stream)
    seen = load.totals
    assert (seen.within, seen.late_first_token, seen.late_tokens) == late
    assert seen.answered == 1


def test_without_a_promise_every_answer_is_within_it() -> None:
    load = LoadCounts()
    answered(load, 100.0, 500.0, 900.0, promise=None)
    answered(load, 100.0, 500.0, 900.0, promise=Promise(), stream=False)
    assert (load.totals.answered, load.totals.within) == (2, 2)


def test_refusals_count_and_what_is_the_clients_own_doing_does_not() -> None:
    load = LoadCounts()
    for code in (503, 502, 429, 400, 404, 499):
        answered(load, 100.0, code=code)
    broken = Progress(stream=True, broken=True)
    load.arrived(broken, 100.0)
    load.ended(broken, PROMISE, 200, (5, 5), 101.0)
    assert (load.totals.refused, load.totals.answered) == (4, 0)
    assert window(load, 10, 105.0).arrivals == 7


def test_a_stream_waits_until_its_first_token_and_another_answer_until_a_replica_takes_it() -> None:
    load = LoadCounts()
    stream, whole = Progress(stream=True), Progress(stream=False)
    load.arrived(whole, 100.0)
    load.arrived(stream, 100.5)
    assert load.waits(PROMISE, 101.2) == (1, 1.2)
    whole.placed = stream.placed = True
    assert load.waits(PROMISE, 101.5) == (1, 1.0)
    stream.first_at = 101.5
    assert load.waits(PROMISE, 110.0) == (0, None)


def test_without_a_target_for_the_first_token_nobody_is_overdue() -> None:
    load = LoadCounts()
    load.arrived(Progress(stream=True), 100.0)
    assert load.waits(Promise(tpot_ms=5), 200.0) == (0, 100.0)
    assert load.waits(None, 200.0) == (0, 100.0)


def test_a_demand_of_an_older_or_faulty_gateway_has_no_windows_and_is_still_read() -> None:
    plain = {"namespace": "n", "name": "s", "inFlight": 3}
    good = {"seconds": 10, "arrivals": 5, "sizes": []}
    for windows, read in (
        (None, None),
        ([good], 5),
        ([], 0),
        ([{**good, "arrivals": -1}], None),
        ([{**good, "arrivals": "NaN"}], None),
        ([{**good, "sizes": [{"prompt": 99, "output": 0, "count": 1}]}], None),
    ):
        seen = ServiceDemand.model_validate(plain | ({} if windows is None else {"windows": windows}))
        found = seen.window(10)
        assert (seen.in_flight, None if found is None else found.arrivals) == (3, read), windows


@pytest.mark.parametrize(
    ("field", "bad", "good"),
    [
        ("waiting", "-1", "0"),
        ("inFlight", "-1", "0"),
        ("arrivals", "-1", "0"),
        ("lastRequestAgeSeconds", "NaN", "0.5"),
        ("lastRequestAgeSeconds", "Infinity", "1e9"),
        ("lastRequestAgeSeconds", "-0.1", "0"),
        ("lastRequestAgeSeconds", "1e12", "86400"),
        ("oldestWaitSeconds", "NaN", "0.5"),
    ],
)
def test_an_answer_of_a_gateway_with_a_number_that_nothing_can_be_is_no_answer(
    field: str, bad: str, good: str
) -> None:
    def answer(value: str) -> str:
        return f'{{"asOf": "2026-01-01T00:00:00Z", "services": [{{"namespace": "n", "name": "s", "{field}": {value}}}]}}'

    assert len(Demand.model_validate_json(answer(good)).services) == 1
    with pytest.raises(ValidationError, match=field):
        Demand.model_validate_json(answer(bad))
