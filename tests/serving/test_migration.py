"""Streams that move between two servers with their keys and values; the test is the gateway."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from tests.serving.inside import serving_inside
from tests.serving.models import save_model
from tests.serving.processes import OpenStream, Service

from busbar.kube.contracts.streams import DIGEST_HEADER, SIDE_LINE, TERMS_HEADER
from busbar.kube.contracts.workload import TENANT_HEADER
from busbar.workloads.serving.migration import LAST_STAGE_BLOCKS, Begin, framed
from busbar.workloads.serving.settings import EngineSettings

TERMS = json.dumps({"seed": 11, "created": 1_700_000_000, "usage": "last", "moves": True})
HEADERS = {"content-type": "application/json", TERMS_HEADER: TERMS, TENANT_HEADER: "research"}
BODY: dict[str, Any] = {"model": "m", "stream": True, "prompt": list(range(20, 170)), "ignore_eos": True}
SAMPLED = {**BODY, "max_tokens": 100, "temperature": 0.9, "seed": 5, "logprobs": 1}


LAYERS = 32
"""So many that an answer takes longer than a migration."""


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> EngineSettings:
    folder = tmp_path_factory.mktemp("moving")
    save_model(folder, num_hidden_layers=LAYERS)
    return EngineSettings(folder, block_tokens=16, threads=1, deterministic=True)


@pytest.fixture(scope="module")
def pair(settings: EngineSettings) -> Iterator[tuple[Service, Service]]:
    with serving_inside(settings, "m") as first, serving_inside(settings, "m") as second:
        yield first, second


@dataclass
class Got:
    """What a client and the gateway have of a stream."""

    texts: dict[int, str] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    end: str = ""
    """What the engine said when it ended the stream early."""
    done: bool = False

    def take(self, event: bytes) -> None:
        shown, mark, side = event.rpartition(SIDE_LINE)
        if mark and side.startswith(b"! "):
            self.end = side[2:].decode()
            return
        shown = shown if mark else event
        if shown == b"data: [DONE]":
            self.done = not self.end
            return
        chunk = json.loads(shown.removeprefix(b"data: "))
        for choice in chunk["choices"]:
            index = choice["index"]
            self.texts[index] = self.texts.get(index, "") + choice["text"]
            found = (choice.get("logprobs") or {}).get("token_logprobs", [])
            self.logprobs.setdefault(index, []).extend(found)
        if mark:
            index, _, _, _, ids = side.split(b" ")
            self.tokens.setdefault(int(index), []).extend(int(each) for each in ids.split(b",") if each)

    @property
    def count(self) -> int:
        return sum(map(len, self.tokens.values()))


class Gateway:
    """A stream that is read event by event, and goes on where it is told to."""

    def __init__(self, server: Service, body: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        self.body = body
        self.got = Got()
        self._stream = OpenStream(server, body, headers or HEADERS)
        assert self._stream.status == 200, self._stream.rest()
        self.digest = self._stream.headers[DIGEST_HEADER]

    def read(self, tokens: int) -> None:
        """Until so many tokens have come, or the stream has ended."""
        while self.got.count < tokens and not (self.got.end or self.got.done):
            self._event(self._stream.line())

    def leave(self) -> None:
        self._stream.close()

    def finish(self) -> Got:
        while line := self._stream.line():
            self._event(line)
        self._stream.close()
        return self.got

    def _event(self, line: bytes) -> None:
        lines = []
        while line.strip():
            lines.append(line.rstrip(b"\n"))
            line = self._stream.line()
        if lines:
            self.got.take(b"\n".join(lines))

    def resume(self, server: Service) -> Got:
        """Goes on at another server, to the end."""
        assert self.got.end
        choices = [{"tokens": self.got.tokens.get(i, [])} for i in range(self.body.get("n", 1))]
        body = {
            "path": "/v1/completions",
            "request": self.body,
            "digest": self.digest,
            "choices": choices,
        }
        status, _, data = server.call("POST", "/resume", json.dumps(body).encode(), headers=HEADERS)
        assert status == 200, data
        self.got.end = ""
        for event in data.split(b"\n\n"):
            if event:
                self.got.take(event)
        return self.got


def whole(server: Service, body: dict[str, Any]) -> Got:
    return Gateway(server, body).finish()


def computed(server: Service) -> float:
    return server.metric("vllm:iteration_tokens_total_sum")


def migrate(source: Service, to: Service, **more: Any) -> list[dict[str, Any]]:
    status, _, answer = source.post("/migrate", {"to": to.url, **more})
    assert status == 200, answer
    found: list[dict[str, Any]] = answer["streams"]
    return found


def check_moved(pair: tuple[Service, Service], body: dict[str, Any], at: int) -> tuple[dict[str, Any], float]:
    """Moves a stream behind `at` tokens; (what became of it, tokens that the destination computed too many)."""
    first, second = pair
    expected = whole(first, body)
    stream = Gateway(first, body)
    stream.read(at)
    (done,) = migrate(first, second)
    got = stream.finish()
    assert got.end == f"leaving {second.url}"
    had, before = got.count, computed(second)
    got = stream.resume(second)
    assert (got.tokens, got.texts, got.logprobs) == (expected.tokens, expected.texts, expected.logprobs)
    assert got.done
    left = expected.count - had
    return done, computed(second) - before - left


def test_a_stream_moves_with_its_keys_and_values_and_no_bit_changes(pair: tuple[Service, Service]) -> None:
    done, again = check_moved(pair, SAMPLED, 20)
    assert done["outcome"] == "copied"
    assert done["stages"] >= 1
    assert done["lastBlocks"] <= LAST_STAGE_BLOCKS
    assert again == 0  # nothing was computed twice


def test_both_answers_of_a_stream_move_together(pair: tuple[Service, Service]) -> None:
    done, again = check_moved(pair, {**SAMPLED, "prompt": list(range(30, 130)), "n": 2}, 40)
    assert done["outcome"] == "copied"
    assert again <= 0  # both began with the prompt that one of them computed


def test_after_a_migration_nothing_is_held_at_either_side(pair: tuple[Service, Service]) -> None:
    check_moved(pair, {**SAMPLED, "prompt": list(range(40, 190))}, 10)
    for server in pair:
        wait_for(
            lambda server=server: server.status()["kvBlocksFree"] == server.status()["kvBlocksTotal"], 15
        )


def wait_for(what: Any, limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_another_tenant_does_not_find_the_blocks(pair: tuple[Service, Service]) -> None:
    first, second = pair
    body = {**SAMPLED, "prompt": list(range(60, 210))}
    stream = Gateway(first, body)
    stream.read(10)
    migrate(first, second)
    stream.finish()
    before = computed(second)
    other = {**body, "max_tokens": 1, "stream": False}
    status, _, _ = second.call(
        "POST", "/v1/completions", json.dumps(other).encode(), headers={TENANT_HEADER: "another"}
    )
    assert status == 200
    assert computed(second) - before == 150


def test_blocks_of_another_form_are_computed_anew(settings: EngineSettings) -> None:
    other = replace(settings, block_tokens=32)
    with serving_inside(settings, "m") as first, serving_inside(other, "m") as second:
        done, again = check_moved((first, second), {**SAMPLED, "max_tokens": 60}, 10)
    assert done["outcome"] == "recomputed"
    assert again >= 150


def test_what_cannot_be_there_stays_and_goes_on(
    pair: tuple[Service, Service], settings: EngineSettings, tmp_path: Path
) -> None:
    """Another model, no server, itself, a peer that is full, a peer that hangs up at each message."""
    first, _ = pair
    body = {**SAMPLED, "max_tokens": 330, "prompt": list(range(200, 360))}
    expected = whole(first, body)
    save_model(tmp_path, seed=1)
    full = replace(settings, kv_bytes=6 * settings.block_tokens * LAYERS * 2 * 2 * 16 * 4)
    with (
        serving_inside(EngineSettings(tmp_path, threads=1), "m") as other,
        serving_inside(full, "m") as small,
    ):
        stream = Gateway(first, body)
        stream.read(5)
        check_stays(first, other.url, "another model")
        check_stays(first, "http://127.0.0.1:9", "")
        check_stays(first, first.url, "cannot move to the replica that it is at")
        check_stays(first, small.url, "no free KV blocks")
        for messages in range(3):
            with dying(pair[1], messages) as url:
                check_stays(first, url, "")
        got = stream.finish()
    assert (got.tokens, got.texts) == (expected.tokens, expected.texts)
    assert got.done


def check_stays(source: Service, to: str, why: str) -> None:
    status, _, answer = source.post("/migrate", {"to": to})
    assert status == 200, answer
    (done,) = answer["streams"]
    assert done["outcome"] == "stayed", done
    assert why in done["why"]


@contextmanager
def dying(server: Service, messages: int) -> Iterator[str]:
    """A way to `server` that breaks off in the message behind so many."""
    listener = socket.create_server(("127.0.0.1", 0))
    host, port = server.url.removeprefix("http://").split(":")

    def pump(source: socket.socket, target: socket.socket) -> None:
        while data := source.recv(65536):
            target.sendall(data)

    def run() -> None:
        client, _ = listener.accept()
        with client, socket.create_connection((host, int(port))) as upstream:
            threading.Thread(target=quietly, args=(pump, upstream, client), daemon=True).start()
            seen = 0
            while data := client.recv(65536):
                seen += data.count(b"POST /migrate/")
                if seen > messages:
                    return
                upstream.sendall(data)

    threading.Thread(target=quietly, args=(run,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.close()


def quietly(work: Any, *arguments: Any) -> None:
    with suppress(OSError):
        work(*arguments)


def test_a_drain_with_peers_moves_what_runs_and_refuses_what_comes(settings: EngineSettings) -> None:
    with serving_inside(settings, "m") as first, serving_inside(settings, "m") as second:
        body = {**SAMPLED, "max_tokens": 150}
        expected = whole(second, body)
        stream = Gateway(first, body)
        stream.read(5)
        status, _, _ = first.post("/drain", {"peers": [second.url]})
        assert status == 200
        got = stream.finish()
        assert got.end == f"leaving {second.url}"
        assert got.count < 150
        told = json.loads(first.get("/status")[2])
        assert told["running"] == 0
        assert told["drain"]["requests"] == 1
        assert told["drain"]["copied"] + told["drain"]["recomputed"] == 1
        assert json.loads(second.get("/status")[2])["drain"] is None
        assert first.post("/v1/completions", {**body, "stream": False})[0] == 503
        assert stream.resume(second).tokens == expected.tokens
        assert first.metric("busbar:migrations_total") >= 1


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ([], "an object with `to`"),
        ({"to": "http://a", "more": 1}, "an object with `to`"),
        ({"to": "ftp://a"}, "must be an address"),
        ({"to": "http://a b"}, "must not contain blanks"),
        ({"to": "http://a", "limit": 0}, "limit must be a whole number from 1"),
    ],
)
def test_a_bad_wish_is_refused(pair: tuple[Service, Service], body: object, problem: str) -> None:
    status, _, answer = pair[0].post("/migrate", body)
    assert status == 400
    assert problem in answer["error"]["message"]


def test_bad_messages_are_refused(pair: tuple[Service, Service]) -> None:
    first = pair[0]
    for path, body, status in (
        ("/migrate/begin", b"{}", 400),
        ("/migrate/blocks", b"\0\0", 400),
        ("/migrate/blocks", framed_json({"ticket": "no", "sequence": 0, "first": 0, "count": 0}), 404),
        ("/migrate/blocks", framed_json({"ticket": "no", "sequence": 0, "first": 0, "count": 1}), 400),
        ("/migrate/blocks", framed_json({"ticket": "no", "sequence": 0, "first": 0, "count": 9999}), 400),
        ("/migrate/blocks", b"\xff\xff\xff\xff", 413),
        ("/migrate/commit", framed_json({"ticket": "no", "sequences": []}), 404),
        ("/migrate/commit", framed_json({"ticket": "no", "sequences": []}) + b"x", 400),
        ("/migrate/begin", framed(begin("another"))[4:], 409),
    ):
        assert first.call("POST", path, body)[0] == status, (path, body)
        assert first.call("POST", path, body, token="wrong")[0] == 401


def framed_json(header: object) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(4, "big") + text


def begin(identity: str) -> Begin:
    return Begin.model_validate(
        {"sender": "x", "identity": identity, "layout": "", "sequences": [{"tokens": [1]}]}
    )


def test_a_client_alone_cannot_be_moved(pair: tuple[Service, Service]) -> None:
    """Without the gateway's terms nobody could go on with its stream."""
    first, second = pair
    with OpenStream(first, {**SAMPLED, "max_tokens": 40}) as stream:
        stream.line()
        assert migrate(first, second) == []
        assert b"[DONE]" in stream.rest()
