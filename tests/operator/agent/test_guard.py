"""The guard lowers boards whose agent is dead, and no others."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.operator.agent.boards import Boards, Clock

from busbar.operator.agent import heartbeat
from busbar.operator.agent.guard import Guard
from busbar.operator.agent.settings import Settings


def guard(folder: Path, clock: Clock, **boards: Boards) -> tuple[Guard, Path]:
    file = folder / "beat"
    return Guard(Settings(heartbeat_file=str(file), set_limits=True), boards, clock), file


def test_an_old_heartbeat_lowers_what_is_not_released_and_a_new_one_stops_it(tmp_path: Path) -> None:
    clock, held, free = Clock(), Boards(), Boards()
    made, file = guard(tmp_path, clock, held=held, free=free)
    for _ in range(20):
        clock.now_s += 0.2
        heartbeat.write(file, clock.now_s, ["free"])
        made.look()
    assert (held.writes, free.writes) == ([], [])
    clock.now_s += 0.9
    made.look()
    assert held.writes == []
    clock.now_s += 0.2
    made.look()
    assert made.lowers
    assert (held.total_w, free.writes) == (400.0, [])
    held.set_w["a"] = 250.0
    made.look()
    assert held.total_w == 400.0, "as long as the agent is away"
    heartbeat.write(file, clock.now_s, [])
    held.set_w["a"] = 250.0
    made.look()
    assert held.total_w == 550.0


@pytest.mark.parametrize("text", [None, "", "{}", "[1]", '{"at": "x", "released": []}'])
def test_without_a_heartbeat_nobody_is_released(tmp_path: Path, text: str | None) -> None:
    clock, boards = Clock(), Boards()
    made, file = guard(tmp_path, clock, n=boards)
    if text is not None:
        file.write_text(text)
    made.look()
    assert boards.writes == [], "the agent may be just starting"
    clock.now_s += 1.1
    made.look()
    assert boards.total_w == 400.0


def test_a_board_that_refuses_or_a_node_that_is_gone_does_not_keep_it_from_the_others(tmp_path: Path) -> None:
    clock, gone, stubborn = Clock(), Boards(lost=True), Boards(refusing={"a"})
    made, _ = guard(tmp_path, clock, gone=gone, stubborn=stubborn)
    made.end()
    assert [stubborn.limit_w(n) for n in "abcd"] == [400.0, 100.0, 100.0, 100.0]
