"""Limits of keys and tenants: windows of a minute, money per period, and what survives a restart."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from busbar.gateway.accounts import Accounts, Grant
from busbar.gateway.admissions import AdmissionRing
from busbar.gateway.errors import BadRequest, QuotaSpent, RateLimited
from busbar.gateway.request_cost import Estimate, PromptRatio, estimate
from busbar.gateway.windows import WINDOW_S, Window
from busbar.kube.contracts.allowances import NANO, Account, CostAllowance, Price
from busbar.kube.contracts.keys import KeyIdentity
from busbar.kube.contracts.routes import AccessRoute, ServiceRoute

NOW = datetime(2026, 5, 4, 12, tzinfo=UTC)
PRICE = Price(prompt=1.0, cached=0.1, output=4.0)


class Time:
    """Both clocks."""

    def __init__(self) -> None:
        self.s = 1000.0

    def clock(self) -> float:
        return self.s

    def now(self) -> datetime:
        return NOW + timedelta(seconds=self.s - 1000)


def day(limit: float, spent_nano: int = 0) -> CostAllowance:
    return CostAllowance(
        period="day",
        started=NOW.replace(hour=0),
        ends=NOW.replace(hour=0) + timedelta(days=1),
        limit_nano=round(limit * NANO),
        spent_nano=spent_nano,
    )


def key(*accounts: Account, counted_through: int = 0) -> KeyIdentity:
    return KeyIdentity(
        key_id="k", subject="ann", tenant="ada", accounts=list(accounts), counted_through=counted_through
    )


class Desk:
    """Accounts of one key, and its requests by number."""

    def __init__(self, *limits: Account, ring: AdmissionRing | None = None) -> None:
        self.time = Time()
        self.accounts = Accounts(self.time.clock, self.time.now)
        if ring is not None:
            self.accounts.restore(ring, {})
        self.key = key(*limits)
        self.accounts.learn(self.key, "g")
        self.count = 0

    def accept(self, prompt: int = 10, output: int = 0, price: Price | None = None) -> Grant:
        self.count += 1
        asks = Estimate(prompt, output, output_field="max_tokens")
        return self.accounts.accept(self.key, f"req-{self.count}", asks, service(price))


def service(price: Price | None = None, **fields: Any) -> ServiceRoute:
    return ServiceRoute(
        tenant="ada", namespace="ns", name="m", uid="u", model_id="m", bearer="b", price=price, **fields
    )


def test_requests_of_a_minute_are_limited_and_the_answer_says_when_to_come_again() -> None:
    desk = Desk(Account(name="key/k", requests_per_minute=2))
    grant = desk.accept()
    assert grant.headers["x-ratelimit-limit-requests"] == "2"
    assert grant.headers["x-ratelimit-remaining-requests"] == "1"
    desk.time.s += 20
    desk.accept()
    with pytest.raises(RateLimited) as refused:
        desk.accept()
    assert (refused.value.kind, refused.value.retry_after_s) == ("requests", 41)
    desk.time.s += refused.value.retry_after_s or 0
    assert desk.accept().headers["x-ratelimit-remaining-requests"] == "0"


def test_tokens_are_reserved_by_prompt_and_max_tokens_and_settled_at_the_end() -> None:
    desk = Desk(Account(name="tenant/ada", tokens_per_minute=100))
    first = desk.accept(10, 80)
    assert first.headers["x-ratelimit-remaining-tokens"] == "10"
    with pytest.raises(RateLimited) as refused:
        desk.accept(5, 10)
    assert refused.value.kind == "tokens"
    assert "tenant ada" in refused.value.message
    first.settle(30)
    first.settle(30)
    assert desk.accept(5, 10).headers["x-ratelimit-remaining-tokens"] == "55"


def test_a_refused_request_reserves_nothing_in_any_account() -> None:
    desk = Desk(
        Account(name="key/k", tokens_per_minute=100), Account(name="tenant/ada", requests_per_minute=1)
    )
    desk.accept(10, 10).settle(20)
    with pytest.raises(RateLimited):
        desk.accept(10, 10)
    desk.time.s += WINDOW_S + 1
    assert desk.accept(10, 10).headers["x-ratelimit-remaining-tokens"] == "80"


def test_what_no_empty_account_could_take_is_a_bad_request_that_names_the_field() -> None:
    desk = Desk(Account(name="key/k", tokens_per_minute=100, costs=[day(0.001)]))
    for prompt, output, price, param in (
        (10, 91, None, "max_tokens"),
        (101, 1, None, None),
        (10, 90, Price(output=50.0), "max_tokens"),
    ):
        with pytest.raises(BadRequest) as refused:
            desk.accept(prompt, output, price)
        assert refused.value.param == param
    assert desk.accept(10, 90, Price(output=10.0)).cost_nano == 900_000
    unstated = desk.accounts.accept(key(), "r", Estimate(10, 1024), service())
    assert unstated.headers == {}


def test_a_request_that_states_no_most_may_use_what_the_limit_allows() -> None:
    desk = Desk(Account(name="key/k", tokens_per_minute=100))
    grant = desk.accounts.accept(desk.key, "r", Estimate(10, 1024), service())
    assert grant.tokens == 100
    grant.settle(20)
    assert desk.accounts.accept(desk.key, "r", Estimate(10, 1024), service()).tokens == 80
    with pytest.raises(RateLimited):
        desk.accounts.accept(desk.key, "r", Estimate(10, 1024), service())


def test_money_is_reserved_settled_and_refused_until_the_period_ends() -> None:
    desk = Desk(Account(name="key/k", costs=[day(0.0005)]))
    grant = desk.accept(100, 90, PRICE)  # 100 + 4 * 90 millionths
    with pytest.raises(QuotaSpent) as refused:
        desk.accept(100, 0, PRICE)
    assert refused.value.retry_after_s == 12 * 3600
    desk.accept(100, 100, None)  # a service without a price is not refused
    grant.settle(110)
    desk.accounts.ended(record(1, PRICE.cost_nano(100, 50, 10)))  # 50 + 5 + 40
    desk.accept(100, 75, PRICE)
    with pytest.raises(QuotaSpent):
        desk.accept(6, 0, PRICE)


def record(number: int, cost_nano: int, at: datetime = NOW, **more: int) -> dict[str, object]:
    who = {"requestId": f"req-{number}", "keyId": "k", "tenant": "ada"}
    return {**who, "finishedAt": at.isoformat(), "costNano": cost_nano, **more}


def test_each_cost_counts_once_whether_the_api_has_it_or_not() -> None:
    desk = Desk(Account(name="key/k", costs=[day(1.0)]))
    for number in (1, 2, 3):
        desk.accounts.ended(record(number, 100))
    desk.accounts.numbered([record(1, 100, seq=1), record(2, 100, seq=2)])
    purse = desk.accounts._states["key/k"].purse
    assert purse.spent_nano(day(1.0), NOW) == 300
    desk.accounts.learn(key(Account(name="key/k", costs=[day(1.0, 200)]), counted_through=2), "g")
    assert purse.spent_nano(day(1.0, 200), NOW) == 300
    desk.accounts.learn(key(Account(name="key/k", costs=[day(1.0, 100)]), counted_through=1), "g")
    assert desk.accounts._states["key/k"].limits.costs[0].spent_nano == 200, "an answer that was overtaken"
    tomorrow = NOW + timedelta(days=1)
    assert purse.spent_nano(day(1.0, 200), tomorrow) == 0, (
        "a period that begins before the key is looked up again"
    )


def test_accounts_without_limits_are_forgotten() -> None:
    desk = Desk()
    desk.accounts.ended(record(1, 100))
    desk.accounts.numbered([record(1, 100, seq=1)])
    desk.accounts.delivered(1)
    assert desk.accounts._states == {}


def test_a_limit_that_was_taken_away_is_not_kept(tmp_path: Path) -> None:
    desk = Desk(Account(name="key/k", requests_per_minute=1))
    desk.accept()
    desk.key = key()
    desk.accounts.learn(desk.key, "g")
    desk.accept()


def test_what_was_accepted_in_the_last_minute_survives_the_process(tmp_path: Path) -> None:
    limits = Account(name="tenant/ada", requests_per_minute=100, tokens_per_minute=1000)
    before = Desk(limits, ring=AdmissionRing(tmp_path / "ring", 8))
    old = before.accept(500, 0)
    old.settle(500)
    before.time.s += WINDOW_S + 2
    before.accept(100, 100).settle(120)
    before.accept(100, 100)  # its client has 30 tokens when the process dies
    before.accept(100, 100)  # and this one has none

    after = Accounts(Time().clock, lambda: before.time.now() + timedelta(seconds=10))
    after.restore(AdmissionRing(tmp_path / "ring", 8), {"req-3": 130})
    after.learn(key(limits), "g")
    grant = after.accept(key(limits), "req-5", Estimate(1, 0), service())
    assert grant.headers["x-ratelimit-remaining-tokens"] == str(1000 - 120 - 130 - 1)
    assert grant.headers["x-ratelimit-remaining-requests"] == "96"
    again = list(AdmissionRing(tmp_path / "ring", 8).left_over({}, 0.0))
    assert [each.tokens for each in again] == [500, 120, 130, 0, 0], "settled by the restart, and not again"


def test_a_tenants_part_of_a_shared_service_is_an_account_of_its_own(tmp_path: Path) -> None:
    shared = service(access=[AccessRoute(tenant="guest", tokens_per_minute=100)])
    guest = KeyIdentity(key_id="g", subject="gus", tenant="guest")
    desk = Desk(ring=AdmissionRing(tmp_path / "ring", 8))
    grant = desk.accounts.accept(guest, "r1", Estimate(10, 60, output_field="max_tokens"), shared)
    assert grant.headers["x-ratelimit-remaining-tokens"] == "30"
    with pytest.raises(RateLimited, match="tenant guest at ns/m"):
        desk.accounts.accept(guest, "r2", Estimate(10, 60, output_field="max_tokens"), shared)
    assert desk.accept(10, 60).headers == {}, "the owner has no such limit"
    grant.settle(50)
    again = Desk(ring=AdmissionRing(tmp_path / "ring", 8))
    grant = again.accounts.accept(guest, "r3", Estimate(10, 0), shared)
    assert grant.headers["x-ratelimit-remaining-tokens"] == "40"


def test_a_full_ring_forgets_its_oldest_entries(tmp_path: Path) -> None:
    ring = AdmissionRing(tmp_path / "ring", 4)
    places = [ring.add(float(at), f"r{at}", "k", "ada", "ns/m", 0) for at in range(1, 7)]
    ring.settle(places[0], 99)  # overwritten by r5 meanwhile
    assert [entry.at for entry in ring.left_over({}, 0.0)] == [3.0, 4.0, 5.0, 6.0]


@given(st.lists(st.tuples(st.floats(0, 3), st.integers(1, 40), st.integers(0, 40)), max_size=60))
def test_no_minute_has_more_tokens_than_the_limit(steps: list[tuple[float, int, int]]) -> None:
    window, now, used = Window(), 5.0, []
    for pause, reserved, actual in steps:
        now += pause * 10
        window.expire(now)
        if window.tokens + reserved <= 100:
            window.correct(window.add(now, reserved), min(actual, reserved) - reserved)
            used.append((now, min(actual, reserved)))
    for start, _ in used:
        assert sum(tokens for at, tokens in used if start <= at < start + WINDOW_S) <= 100


@pytest.mark.parametrize(
    ("document", "prompt", "output"),
    [
        ({"prompt": "x" * 100, "max_tokens": 7}, 50, 7),
        ({"prompt": [1, 2, 3], "max_tokens": 7, "n": 2}, 3, 14),
        ({"prompt": ["x" * 10, "y" * 10], "max_tokens": 7}, 10, 14),
        ({"prompt": [[1], [2, 3]], "max_completion_tokens": 5}, 3, 10),
        ({"prompt": "é" * 50}, 50, 950),
        ({"input": "x" * 100, "max_output_tokens": 9}, 50, 9),
        ({"prompt": "x", "max_tokens": 10**40}, 0, 1000),
        ({"prompt": "x", "max_tokens": True}, 0, 1000),
        ({"prompt": None, "max_tokens": "7", "n": -3}, 0, 1000),
    ],
)
def test_a_request_is_estimated_by_its_prompt_and_its_most(
    document: dict[str, object], prompt: int, output: int
) -> None:
    found = estimate("/v1/completions", document, 0.5, 1000)
    assert (found.prompt_tokens, found.output_tokens) == (prompt, output)


def test_only_what_computes_tokens_is_estimated() -> None:
    assert estimate("/tokenize", {"prompt": "x" * 100}, 0.5, None) == Estimate()
    assert estimate("/v1/embeddings", {"input": "x" * 100}, 0.5, None).tokens == 50
    chat = {"messages": [{"role": "user", "content": "x" * 100}]}
    assert 50 < estimate("/v1/chat/completions", chat, 0.5, None).prompt_tokens < 80


def test_the_length_of_prompts_is_learned_from_answers() -> None:
    ratio = PromptRatio()
    for _ in range(60):
        ratio.learn("s", 1000, 1000)
    assert ratio.of("s") == pytest.approx(1.0, abs=0.01)
    assert ratio.of("other") < 0.5
    ratio.learn("s", 0, 10)
