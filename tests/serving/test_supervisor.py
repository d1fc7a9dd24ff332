"""A server that crashes is followed by another one, with the weights of the one before."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from tests.serving.processes import Running, serving

from busbar.workloads.serving.supervisor import RESTARTS, WITHIN_S, Supervisor, how

BODY = {"model": "model", "prompt": "def add", "max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.mark.parametrize(
    ("code", "has_served", "follows"),
    [
        (-signal.SIGKILL, True, True),
        (-signal.SIGSEGV, True, True),
        (1, True, True),
        (-signal.SIGKILL, False, False),
        (1, False, False),
        (0, True, False),
        (2, True, False),
        (143, True, False),
    ],
)
def test_only_a_crash_of_a_server_that_served_is_followed(code: int, has_served: bool, follows: bool) -> None:
    assert Supervisor(lambda: 0.0).is_followed(code, has_served) is follows


def test_crashes_that_come_again_and_again_end_the_process() -> None:
    now = 0.0
    supervisor = Supervisor(lambda: now)
    for _ in range(RESTARTS):
        assert supervisor.is_followed(1, True)
    assert not supervisor.is_followed(1, True)
    now = WITHIN_S + 1
    assert supervisor.is_followed(1, True)


def test_how_a_server_ended_is_told() -> None:
    assert how(-9) == "was killed by SIGKILL"
    assert how(1) == "ended with code 1"


def child_of(process: int) -> int:
    [child] = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return int(child)


def server_of(running: Running) -> int:
    """The front that serves."""
    return child_of(running.process.pid)


def tokens(running: Running) -> Any:
    status, _, answer = running.post("/v1/completions", BODY)
    assert status == 200
    return answer["choices"][0]["text"]


def test_a_killed_server_comes_back_with_its_weights_and_a_stopped_one_does_not(
    llama: tuple[Path, Any], tmp_path: Path
) -> None:
    flags = ("--keep-weights", str(tmp_path / "kept"), "--model-id", "model")
    with serving(llama[0], *flags) as running:
        first, server = tokens(running), server_of(running)
        assert "weights are kept in" in running.log()
        for crash, (killed, said) in enumerate(
            [(server, "was killed by SIGKILL"), (None, "ended with code 1")], start=1
        ):
            os.kill(killed or child_of(server_of(running)), signal.SIGKILL)
            running.wait_for(lambda crash=crash: running.log().count("is started again") == crash)
            running.wait_for(lambda: _ready(running))
            assert tokens(running) == first
            assert f"the server {said}" in running.log()
            assert running.log().count("weights are mapped from") == crash
        assert server_of(running) != server
        server = server_of(running)
        running.process.kill()  # as a container ends: the server asks itself to stop
        running.process.wait()
        running.wait_for(lambda: not Path(f"/proc/{server}").exists())
    running.wait_for(lambda: not _answers(running))
    with serving(llama[0], *flags) as running:
        assert "weights are mapped from" in running.log()
        assert tokens(running) == first
        server = server_of(running)
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(20) == 0
        assert not Path(f"/proc/{server}").exists()


def test_a_server_that_cannot_load_its_model_is_not_started_again(tmp_path: Path) -> None:
    began = time.monotonic()
    with (
        pytest.raises(AssertionError, match=r"config\.json is missing"),
        serving(tmp_path, "--keep-weights", str(tmp_path / "kept")),
    ):
        pass
    assert time.monotonic() - began < 60


def _ready(running: Running) -> bool:
    try:
        return running.get("/ready")[0] == 200
    except OSError:
        return False


def _answers(running: Running) -> bool:
    try:
        running.get("/health")
    except OSError:
        return False
    return True
