"""`busbar token` and `busbar login` against the real API."""

from __future__ import annotations

import json
import stat
from datetime import UTC, datetime, timedelta

import pytest
from tests.cli.conftest import Site

from busbar.cli.commands.token import _state
from busbar.cli.results import Token


async def test_a_token_is_printed_alone_and_works_and_can_be_ended(site: Site) -> None:
    made = await site.busbar("token", "create", "--scopes", "rest", "--description", "for the test")
    assert made.code == 0
    (text,) = made.lines
    site.monkeypatch.setenv("BUSBAR_TOKEN", text)
    listed = await site.busbar("token", "list", "-o", "json")
    (mine,) = [item for item in json.loads(listed.out)["items"] if item["description"] == "for the test"]
    assert text not in listed.out
    assert mine["scopes"] == ["rest"]
    assert mine["id"] in made.err
    table = await site.busbar("token", "list")
    assert "for the test" in table.out
    assert (await site.busbar("token", "revoke", mine["id"])).code == 0
    site.world.clock.forward(seconds=120)
    assert (await site.busbar("list")).code == 4


async def test_a_token_has_limits_that_the_list_shows(site: Site) -> None:
    made = await site.busbar(
        "token", "create", "--scopes", "inference", "--tenant", "ada",
        "--tokens-per-minute", "500", "--budget", "0.5/day", "--budget", "20/month",
    )  # fmt: skip
    assert made.code == 0, made.err
    assert "500 tokens/min, 0.5/day, 20/month" in (await site.busbar("token", "list")).out
    for wrong in ("20", "x/day", "-1/day", "nan/day", "5/hour"):
        assert "COST/PERIOD" in (await site.busbar("token", "create", "--budget", wrong)).err


async def test_a_token_is_rotated_with_an_overlap_and_without(site: Site) -> None:
    made = await site.busbar("token", "create", "--scopes", "rest", "--description", "robot")
    listed = json.loads((await site.busbar("token", "list", "-o", "json")).out)["items"]
    (old,) = [item["id"] for item in listed if item["description"] == "robot"]
    done = await site.busbar("token", "rotate", old, "--overlap-hours", "48")
    assert done.code == 0, done.err
    (text,) = done.lines
    ends = site.world.clock() + timedelta(hours=48)
    assert f"Token {old} ends at {ends:%Y-%m-%d %H:%M} UTC." in done.err
    for valid in (made.lines[0], text):
        site.monkeypatch.setenv("BUSBAR_TOKEN", valid)
        assert (await site.busbar("list")).code == 0
    site.monkeypatch.setenv("BUSBAR_TOKEN", text)
    at_once = await site.busbar("token", "rotate", old, "--overlap-hours", "0")
    assert f"Token {old} has ended." in at_once.err
    site.monkeypatch.setenv("BUSBAR_TOKEN", made.lines[0])
    assert (await site.busbar("list")).code == 4
    assert (await site.busbar("token", "rotate", old, "--overlap-hours", "721")).code == 2


@pytest.mark.parametrize(
    ("ends", "revoked", "says"),
    [(9999, None, "valid"), (None, None, "valid"), (2000, None, "expired"), (2000, 2000, "revoked")],
)
def test_the_list_says_whether_a_token_is_valid(ends: int | None, revoked: int | None, says: str) -> None:
    at, over = (datetime(year, 1, 1, tzinfo=UTC) if year else None for year in (ends, revoked))
    assert _state(Token(id="a", expires_at=at, revoked_at=over)) == says


async def test_all_tokens_but_the_one_in_use_are_ended_together(site: Site) -> None:
    await site.world.token("alice")
    assert (await site.busbar("token", "revoke")).code == 2
    assert (await site.busbar("token", "revoke", "x", "--everyone")).code == 2
    refused = await site.busbar("token", "revoke", "--everyone")
    assert refused.code == 4
    done = await site.busbar("token", "revoke", "--subject", "alice")
    assert (done.code, done.out) == (0, "1 tokens of alice revoked\n")
    live = await site.busbar("token", "list", "--state", "live", "-o", "name")
    assert len(live.out.split()) == 1


async def test_login_checks_the_token_and_keeps_it_readable_by_the_owner_only(site: Site) -> None:
    site.monkeypatch.delenv("BUSBAR_TOKEN")
    site.monkeypatch.delenv("BUSBAR_SERVER")
    wrong = await site.busbar("login", site.url, stdin="bb_" + "x" * 43 + "\n")
    assert wrong.code == 4
    file = site.folder / "busbar" / "config.yaml"
    assert not file.exists()
    done = await site.busbar("login", site.url, stdin=site.token + "\n")
    assert done.code == 0
    assert "alice" in done.out
    assert site.token not in done.out + done.err
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert (await site.busbar("list", "jobs", "-o", "name")).lines == ["trainingjob/ada-run"]


async def test_a_stored_token_is_not_shown_to_another_server(site: Site) -> None:
    site.monkeypatch.delenv("BUSBAR_TOKEN")
    site.monkeypatch.delenv("BUSBAR_SERVER")
    await site.busbar("login", site.url, stdin=site.token + "\n")
    done = await site.busbar("list", "--server", "http://127.0.0.1:1")
    assert done.code == 4
    assert "No token" in done.err
