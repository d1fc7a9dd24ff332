"""The loop that asks for parts of limits: it goes on whatever happens."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from busbar.gateway import lease_keeper
from busbar.gateway.account_state import AccountState
from busbar.gateway.lease_keeper import LeaseKeeper
from busbar.gateway.leases import RENEW_S
from busbar.gateway.shared_limits import SharedLimits
from busbar.gateway.windows import Undelivered
from busbar.kube.contracts.allowances import Account, CostAllowance
from busbar.kube.contracts.budget_leases import LeaseAnswer, LeaseKind, LeaseRecall, LeaseRequest

NOON = datetime(2026, 5, 4, 12, tzinfo=UTC)
DAY = CostAllowance(period="day", started=NOON, ends=NOON + timedelta(days=1), limit_nano=1000)


async def test_a_gateway_that_holds_nothing_asks_what_others_lack_and_a_fault_does_not_end_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_keeper, "ROUND_S", 0.0)
    asked: list[LeaseRequest] = []
    enough = asyncio.Event()
    now = 0.0

    async def api(request: LeaseRequest) -> LeaseAnswer:
        asked.append(request)
        if len(asked) == 1:
            raise RuntimeError("a fault of ours")
        enough.set()
        lacks = [LeaseRecall(account="key/k", kind=LeaseKind.DAY, target=0)] if len(asked) == 2 else []
        return LeaseAnswer(number=request.number, recalls=lacks)

    def clock() -> float:
        nonlocal now
        now += RENEW_S / 10
        return now

    limits = SharedLimits({}, 2, lambda: datetime.now(UTC))
    keeper = LeaseKeeper(limits, api, lambda: "g", 2, tmp_path / "processes", clock)
    keeper.start()
    async with asyncio.timeout(20):
        await enough.wait()
        while limits.held or len(asked) < 3:  # noqa: ASYNC110 - another task asks
            await asyncio.sleep(0)
    await keeper.stop()
    first, second, third = asked[:3]
    assert not first.asks
    assert not second.asks
    (told,) = third.asks
    assert (told.account, told.kind, told.held, told.wanted) == ("key/k", LeaseKind.DAY, 0, 0)


def test_what_is_spent_since_an_account_was_forgotten_is_told_with_a_recall() -> None:
    """The account was forgotten a moment ago, and a request of it has ended since."""
    states: dict[str, AccountState] = {}
    limits = SharedLimits(states, 2, lambda: datetime.now(UTC))
    recall = LeaseAnswer(number=1, recalls=[LeaseRecall(account="key/k", kind=LeaseKind.DAY, target=0)])
    limits.take(recall, 0.0)
    states["key/k"] = AccountState(Account(name="key/k"))
    states["key/k"].limits = Account(name="key/k", costs=[DAY])
    states["key/k"].purse.add(Undelivered("r", NOON, 70))
    limits.take(recall, 0.0)
    (told,) = limits.asks(0.0)
    assert (told.limit, told.used, told.held) == (1000, 70, 70)
