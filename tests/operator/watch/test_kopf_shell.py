"""Kopf in its thread: when it ends, it is started again, and the operator goes on."""

from __future__ import annotations

import asyncio
from typing import Any

import kopf
import pytest
from tests.operator.builders import SETTINGS

from busbar.kube.login import Login
from busbar.operator.watch import kopf_shell
from busbar.operator.watch.kopf_shell import KopfShell


async def test_kopf_is_started_again_when_it_gives_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loop, third, runs = asyncio.get_running_loop(), asyncio.Event(), 0

    async def gives_up(*, stop_flag: Any, **_: Any) -> None:
        nonlocal runs
        runs += 1
        if runs < 3:
            raise RuntimeError("the server answered 504 too often")
        loop.call_soon_threadsafe(third.set)
        await asyncio.to_thread(stop_flag.wait)

    monkeypatch.setattr(kopf, "operator", gives_up)
    monkeypatch.setattr(kopf_shell, "AGAIN_S", (0.01, 0.02))
    shell = KopfShell(Login(server="http://127.0.0.1:1"), SETTINGS, lambda *_: None)
    task = asyncio.create_task(shell.run())
    async with asyncio.timeout(60):
        await third.wait()
    assert not task.done()
    assert caplog.text.count("504 too often") == 2
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.to_thread(shell.join, 10)
