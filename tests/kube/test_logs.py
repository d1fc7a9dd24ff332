"""The one form of log lines: fixed fields first, an event's own after them, one line each."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from busbar.kube import logs


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    yield
    root.setLevel(level)
    root.handlers[:] = handlers


def record(message: str, **fields: Any) -> logging.LogRecord:
    made = logging.getLogger("busbar.x").makeRecord("busbar.x", logging.WARNING, "f", 1, message, (), None)
    made.created = 1700000000.25
    vars(made).update(fields)
    return made


def test_json_has_the_fixed_fields_first_and_the_events_own_after_them() -> None:
    line = logs.JsonLogFormatter().format(record("pod asked", pod="ns/ü", tries=2, ok=True, error=None))
    assert line == (
        '{"time": "2023-11-14T22:13:20.250Z", "level": "warning", "logger": "busbar.x", '
        '"message": "pod asked", "pod": "ns/ü", "tries": 2, "ok": true, "error": null}'
    )


def test_text_has_the_same_as_words_and_pairs() -> None:
    fields = {"pod": "ns/a", "tries": 2, "why": "no answer", "empty": "", "odd": 'a="b"\n'}
    assert logs.TextLogFormatter().format(record("pod\nasked", **fields)) == (
        "2023-11-14T22:13:20.250Z warning busbar.x pod\\nasked "
        'pod=ns/a tries=2 why="no answer" empty="" odd="a=\\"b\\"\\n"'
    )


def test_a_field_cannot_stand_for_a_fixed_one_and_objects_are_left_out() -> None:
    odd = record("m", time="never", level="high", logger="nobody", k8s_ref={"name": "x"}, color_message="m")
    assert list(json.loads(logs.JsonLogFormatter().format(odd)).values()) == [
        "2023-11-14T22:13:20.250Z", "warning", "busbar.x", "m",
    ]  # fmt: skip


@pytest.mark.parametrize("form", [logs.JsonLogFormatter(), logs.TextLogFormatter()])
def test_a_traceback_is_kept(form: logging.Formatter) -> None:
    try:
        raise ValueError("boom")
    except ValueError:
        made = record("m")
        made.exc_info = sys.exc_info()
    line = form.format(made)
    assert "ValueError: boom" in line
    if isinstance(form, logs.JsonLogFormatter):
        assert "ValueError: boom" in json.loads(line)["exception"]


def test_the_level_decides_what_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    logs.set_up("text", "warning")
    logging.getLogger("a").info("unseen")
    logging.getLogger("a").warning("seen", extra={"n": 1})
    assert capsys.readouterr().err.endswith("Z warning a seen n=1\n")


@pytest.mark.parametrize("form", ["json", "text"])
def test_the_gateway_speaks_in_the_chosen_form(form: str, tmp_path: Any) -> None:
    """An address that is taken ends it right after its logs are set up and `no_cluster` was logged."""
    env = {"PATH": os.environ["PATH"], "BUSBAR_LOG_FORMAT": form, "BUSBAR_GATEWAY_STATE_DIR": str(tmp_path)}
    env["BUSBAR_GATEWAY_PUBLIC_ADDRESS"] = "192.0.2.1:1"  # of no machine: it cannot be listened on
    ended = subprocess.run(
        [sys.executable, "-m", "busbar.gateway.main"], env=env, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 1
    (line,) = [line for line in ended.stderr.splitlines() if "no_cluster" in line]
    if form == "json":
        told = json.loads(line)
        assert list(told)[:4] == ["time", "level", "logger", "message"]
        assert told["effect"] == "/demand is closed"
    else:
        assert " warning busbar.gateway no_cluster error=KeyError" in line
