"""A server that crashes is followed by another one, with the weights of the one before."""

from __future__ import annotations

import os
import signal
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tests.serving.processes import Running, serving

from busbar.kube.contracts.workload import MOST_CAUSE
from busbar.workloads.serving.settings import EngineSettings, ServerSettings
from busbar.workloads.serving.supervisor import RESTARTS, WITHIN_S, Supervisor, Told, how

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
    assert how(-40) == "was killed by signal 40", "of most real-time signals there is no name"
    assert how(1) == "ended with code 1"


NOW = datetime(2026, 1, 1, 0, 0, 0, 700_000, tzinfo=UTC)
SETTINGS = ServerSettings(EngineSettings(Path("nowhere"), keep_dir=Path("kept")), "model")


def test_each_server_is_told_of_the_crashes_before_it() -> None:
    """The servers are processes, and write what they were told to a pipe."""
    read, write = os.pipe()

    def serve(settings: ServerSettings, told: Told) -> int:
        told.serves()
        before = settings.restarted
        os.write(write, f"{before and (before.count, before.cause, before.at.second)}\n".encode())
        match 0 if before is None else before.count:
            case 0:
                told.ends_for("grün " * MOST_CAUSE)
                return 1
            case 1:
                os.kill(os.getpid(), signal.SIGKILL)
            case 2:
                raise RuntimeError("a bug")
        return 0

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(signal, "signal", lambda *_: None)  # the test's own handlers stay
        assert Supervisor(wall=lambda: NOW).run(SETTINGS, serve) == 0
    os.close(write)
    with os.fdopen(read, encoding="utf-8") as told:
        lines = told.read().splitlines()
    first, second, *others = lines
    assert first == "None"
    assert second.startswith("(1, 'grün grün")
    assert len(second.encode()) <= MOST_CAUSE + 20
    assert others == ["(2, 'the server was killed by SIGKILL', 0)", "(3, 'RuntimeError: a bug', 0)"]


def tokens(running: Running) -> Any:
    status, _, answer = running.post("/v1/completions", BODY)
    assert status == 200
    return answer["choices"][0]["text"]


def test_a_killed_server_comes_back_with_its_weights_and_a_stopped_one_does_not(
    llama: tuple[Path, Any], tmp_path: Path
) -> None:
    flags = ("--keep-weights", str(tmp_path / "kept"), "--model-id", "model")
    with serving(llama[0], *flags) as running:
        first, [_, server, _] = tokens(running), running.processes
        assert "weights are kept in" in running.log()
        for crash, (place, said) in enumerate(
            [(1, "the server was killed by SIGKILL"), (2, "ended by signal 9 (SIGKILL)")], start=1
        ):
            os.kill(running.processes[place], signal.SIGKILL)
            running.wait_for(lambda crash=crash: running.log().count("is started again") == crash)
            running.wait_for(lambda: _ready(running))
            assert tokens(running) == first
            told = running.status()["restarted"]
            assert (told["count"], said in told["cause"]) == (crash, True)
            assert running.metric("busbar:server_restarts_total") == crash
            assert running.metric("busbar:server_crash_timestamp_seconds") > time.time() - 60
            assert f"{told['cause']}; the server is started again" in running.log()
            assert running.log().count("weights are mapped from") == crash
        assert running.processes[1] != server
        server = running.processes[1]
        running.process.kill()  # as a container ends: the server asks itself to stop
        running.process.wait()
        running.wait_for(lambda: not Path(f"/proc/{server}").exists())
    running.wait_for(lambda: not _answers(running))
    with serving(llama[0], *flags) as running:
        assert "weights are mapped from" in running.log()
        assert tokens(running) == first
        server = running.processes[1]
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(20) == 0
        assert not Path(f"/proc/{server}").exists()


def test_a_server_that_cannot_load_its_model_is_not_started_again(tmp_path: Path) -> None:
    with (
        pytest.raises(AssertionError, match=r"config\.json is missing") as ended,
        serving(tmp_path, "--keep-weights", str(tmp_path / "kept")),
    ):
        pass
    assert "started again" not in str(ended.value)


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
