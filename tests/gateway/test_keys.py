"""The cache of keys: which answers it keeps, for how long, and what happens when the API is unavailable."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest
from tests.gateway.parts import KEY_A, PATIENCE_S, key

from busbar.gateway.errors import Unauthenticated, Unavailable
from busbar.gateway.keys import ApiUnreachable, KeyDirectory
from busbar.kube.contracts.keys import KeyIdentity, digest_of


class Setting:
    """A cache of keys with a test clock and an API with scripted answers."""

    def __init__(self, entries: int = 10) -> None:
        self.now = 0.0
        self.asked: list[str] = []
        self.away = False
        self.known = {digest_of(KEY_A): self.identity()}
        self.gate: asyncio.Event | None = None
        self.directory = KeyDirectory(
            self.lookup,
            fresh_s=60,
            stale_s=3600,
            negative_s=5,
            entries=entries,
            monotonic=lambda: self.now,
            now=lambda: datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=self.now),
        )

    @staticmethod
    def identity(expires_at: datetime | None = None) -> KeyIdentity:
        return KeyIdentity(
            key_id="id",
            subject="ann",
            tenant="t",
            namespaces=["n"],
            scopes=["inference"],
            expires_at=expires_at,
        )

    async def lookup(self, digest: str) -> KeyIdentity | None:
        self.asked.append(digest)
        if self.gate:
            await self.gate.wait()
        if self.away:
            raise ApiUnreachable("away")
        return self.known.get(digest)

    async def identify(self, text: str = KEY_A) -> KeyIdentity:
        return await self.directory.identify(f"Bearer {text}")


async def test_an_answer_is_cached_for_a_minute() -> None:
    here = Setting()
    for here.now in (0.0, 59.9):
        assert (await here.identify()).subject == "ann"
    assert len(here.asked) == 1
    here.now = 60.0
    await here.identify()
    assert len(here.asked) == 2


async def test_only_the_digest_is_asked_for() -> None:
    here = Setting()
    await here.identify()
    assert here.asked == [digest_of(KEY_A)]


async def test_a_revoked_key_ends_when_the_minute_ends() -> None:
    here = Setting()
    await here.identify()
    here.known.clear()
    here.now = 59.0
    await here.identify()
    here.now = 60.0
    with pytest.raises(Unauthenticated):
        await here.identify()


async def test_while_the_api_is_away_a_known_key_works_for_an_hour_and_no_longer() -> None:
    here = Setting()
    await here.identify()
    here.away = True
    here.now = 3599.0
    await here.identify()
    here.now = 3600.0
    with pytest.raises(Unavailable):
        await here.identify()


async def test_while_the_api_is_known_to_be_away_a_known_key_does_not_wait_for_it() -> None:
    here = Setting()
    await here.identify()
    here.now, here.away = 60.0, True
    await here.identify()  # this one waited, and got the answer
    here.gate = asyncio.Event()
    async with asyncio.timeout(PATIENCE_S):
        for _ in range(5):
            await here.identify()
            await asyncio.sleep(0)
    assert len(here.asked) == 3  # the first, the one that failed, and one that still hangs
    here.away = False
    here.known.clear()
    here.gate.set()
    await asyncio.gather(*here.directory._asking.values())
    with pytest.raises(Unauthenticated):
        await here.identify()


async def test_while_the_api_is_away_an_unknown_key_gets_unavailable() -> None:
    here = Setting()
    here.away = True
    with pytest.raises(Unavailable) as caught:
        await here.identify()
    assert caught.value.retry_after_s


async def test_while_the_api_is_away_an_expired_key_is_refused() -> None:
    here = Setting()
    here.known = {digest_of(KEY_A): here.identity(datetime(2026, 1, 1, 0, 2, tzinfo=UTC))}
    await here.identify()
    here.away = True
    here.now = 120.0
    with pytest.raises(Unauthenticated):
        await here.identify()


async def test_a_wrong_key_is_asked_about_once_in_five_seconds() -> None:
    here = Setting()
    for here.now in (0.0, 4.9):
        with pytest.raises(Unauthenticated):
            await here.identify(key("x"))
    assert len(here.asked) == 1
    here.known[digest_of(key("x"))] = here.identity()
    here.now = 5.0
    await here.identify(key("x"))


async def test_a_malformed_key_is_not_asked_about() -> None:
    here = Setting()
    for header in (None, "", "Bearer", "Bearer  ", "Basic abc", "Bearer bb_short", f"Bearer {KEY_A}x"):
        with pytest.raises(Unauthenticated):
            await here.directory.identify(header)
    assert here.asked == []


async def test_many_requests_of_one_key_ask_once_and_one_that_leaves_does_not_fail_the_others() -> None:
    here = Setting()
    here.gate = asyncio.Event()
    tasks = [asyncio.create_task(here.identify()) for _ in range(5)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    here.gate.set()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(answers[0], asyncio.CancelledError)
    assert [answer.subject for answer in answers[1:] if isinstance(answer, KeyIdentity)] == ["ann"] * 4
    assert len(here.asked) == 1


async def test_the_cache_is_bounded() -> None:
    here = Setting(entries=2)
    for letter in "xyw":
        with pytest.raises(Unauthenticated):
            await here.identify(key(letter))
    assert len(here.directory._cache) == 2
