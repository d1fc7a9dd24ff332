"""Engine processes that are ended while clients stream through a gateway, and what the clients got.

Two engines stand behind a gateway process. Clients stream without a pause; each answer is compared with the one that
an undisturbed run gave. Again and again one of the engines gets SIGKILL or SIGTERM, or is scaled down as the operator
does it (told to drain and of its peer, then SIGTERM), and another takes its place; or one moves its streams to the
other. No request meets two of the events that end an engine: one that kills two replicas is given up on purpose.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import aiohttp
from tests.free_port import free_port
from tests.gateway.parts import KEY_A, PATIENCE_S, House, events, route
from tests.gateway.test_process import Process
from tests.serving import forked

from busbar.kube.contracts.bearers import one_for_all
from busbar.kube.contracts.workload import ReplicaRole
from busbar.workloads.serving.settings import EngineSettings, ServerSettings

BEARER = "secret"
TRIES = 20
DRAIN_PAUSE_S = 0.5
"""Between a drain and SIGTERM, as the operator waits."""
DRAIN_S = 0.2
"""So short that SIGTERM cuts streams too."""


class Event(StrEnum):
    """What happens to an engine."""

    KILL = "kill"
    TERMINATE = "terminate"
    SCALE_DOWN = "scale-down"
    MIGRATE = "migrate"


Ask = tuple[str, dict[str, Any]]
"""Path and body."""


def asks(max_tokens: int) -> list[Ask]:
    """Greedy, seeded, penalised and constrained requests to the routes that stream, some with stop strings, logprobs, a grammar
    or several choices."""
    shared = {"model": "m", "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    shared["max_tokens"] = max_tokens
    code = "/v1/completions", {**shared, "prompt": "def add(a, b):\n"}
    long = "/v1/completions", {**shared, "prompt": "def add(a, b):\n    return a + b\n" * 20, "seed": 6}
    chat = "/v1/chat/completions", {**shared, "messages": [{"role": "user", "content": "hello 🙂"}]}
    plain = {
        "model": "m",
        "stream": True,
        "ignore_eos": True,
        "max_output_tokens": max_tokens,
        "input": "hello 🙂",
    }
    responses = [("/v1/responses", {**plain, **more}) for more in ({"temperature": 0}, {"seed": 13})]
    return [long, *responses] + [
        (path, {**body, **more})
        for path, body in (code, chat)
        for more in (
            {"temperature": 0},
            {"seed": 7},
            {"seed": 8, "top_p": 0.9, "temperature": 0.8, "stop": ["\nzzz", "qqqq"]},
            {"temperature": 0, "presence_penalty": 0.5, "repetition_penalty": 1.2},
            {"seed": 9, "n": 2},
            {"seed": 11, "allowed_token_ids": list(range(20, 300)), "bad_words": ["a", "re", "zq"]},
            {"seed": 12, "guided_regex": "([a-f]{1,9} é?[0-9]){400}"},
            {"seed": 10, "logprobs": True, "top_logprobs": 2} if path.endswith("chat/completions")
            else {"seed": 10, "logprobs": 2},
        )
    ]  # fmt: skip


@dataclass
class Answer:
    """What a client made of a stream: per choice text, logprobs and reason; usage; the error, if there was one."""

    texts: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[Any]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    counted: list[int] = field(default_factory=list)
    """(prompt, completion, total) tokens."""
    error: str | None = None
    complete: bool = False

    @classmethod
    def of(cls, data: bytes) -> Answer:
        found = cls()
        if data.startswith(b"event: "):
            return found._of_response(data)
        for event in events(data):
            if event == "[DONE]":
                found.complete = True
            elif "error" in event:
                found.error = json.dumps(event["error"])
            else:
                found._take(event)
        return found

    def _of_response(self, data: bytes) -> Answer:
        for number, event in enumerate(events(re.sub(rb"(?m)^event: .*\n", b"", data))):
            assert event["sequence_number"] == number, "an event is missing, or came twice"
            if event["type"] == "error":
                self.error = json.dumps(event)
            elif event["type"] == "response.output_text.delta":
                self.texts[0] = self.texts.get(0, "") + event["delta"]
            elif event["type"] in ("response.completed", "response.incomplete"):
                response = event["response"]
                ((part,),) = (item["content"] for item in response["output"])
                assert part["text"] == self.texts[0], "the last event repeats what the earlier ones said"
                usage = response["usage"]
                self.counted = [usage[name] for name in ("input_tokens", "output_tokens", "total_tokens")]
                self.reasons[0], self.complete = response["status"], True
        return self

    def _take(self, event: dict[str, Any]) -> None:
        usage = event.get("usage")
        if usage is not None:  # the part that was cached depends on who was there before
            self.counted = [usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")]
        for choice in event["choices"]:
            index = choice["index"]
            text = choice.get("text") or choice.get("delta", {}).get("content") or ""
            self.texts[index] = self.texts.get(index, "") + text
            if choice.get("logprobs"):
                self.logprobs.setdefault(index, []).extend(_entries(choice["logprobs"]))
            if choice["finish_reason"] is not None:
                assert index not in self.reasons, "a choice has ended twice"
                self.reasons[index] = choice["finish_reason"]


def _entries(logprobs: dict[str, Any]) -> list[Any]:
    if "content" in logprobs:
        return list(logprobs["content"])
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return list(zip(*(logprobs[name] for name in names), strict=True))


@dataclass
class Report:
    """What came of a disturbed run."""

    events: dict[str, int] = field(default_factory=Counter)
    moved: dict[str, int] = field(default_factory=Counter)
    """Streams by what became of them when they were to move; of drains without their reasons."""
    stays: dict[str, int] = field(default_factory=Counter)
    stalls: list[float] = field(default_factory=list)
    """Seconds for which a source held a stream whose blocks were copied."""
    requests: int = 0
    tokens: int = 0
    failed: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    """Requests whose text, logprobs, reasons or usage differ from the undisturbed run."""
    resumed: int = 0
    moved_on: int = 0
    """Streams that went on where their replica had moved them."""
    broken: int = 0
    counted: tuple[int, int, int] = (0, 0, 0)
    """(requests, prompt tokens, completion tokens) on the key's account."""
    expected: tuple[int, int, int] = (0, 0, 0)


class EngineProcess:
    """One serving engine."""

    def __init__(self, model: Path, role: ReplicaRole) -> None:
        self.role = role
        settings = ServerSettings(
            EngineSettings(model, deterministic=True, threads=1),
            "m",
            role=role,
            port=free_port(),
            bearers=one_for_all(BEARER),
            drain_s=DRAIN_S,
        )
        self.url = f"http://127.0.0.1:{settings.port}"
        self.process = forked.start(settings)

    async def ready(self, session: aiohttp.ClientSession) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                with suppress(aiohttp.ClientError):
                    async with session.get(self.url + "/ready") as answer:
                        if answer.status == 200:
                            return
                await asyncio.sleep(0.05)

    async def ended(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while self.process.is_alive():  # noqa: ASYNC110
                await asyncio.sleep(0.02)


class Disturbance:
    """Runs clients and events against a gateway and its engines."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        clients: int,
        max_tokens: int,
        roles: Sequence[ReplicaRole] = (ReplicaRole.BOTH,),
    ) -> None:
        """One engine after the other gets the next of the `roles`, from the first one again behind the last."""
        self._house = House(folder)
        self._roles = itertools.cycle(roles)
        self._model = model
        self._clients = clients
        self._asks = asks(max_tokens)
        self._expected: list[Answer] = []
        self._engines: list[EngineProcess] = []
        """Two that serve, and one that starts and takes the place of the next that is ended."""
        self._passed = 0
        """How often an event has begun, or its engine has ended: a request in between may meet the event as well."""
        self._running: dict[object, int] = {}
        """Requests in hand, with this number when each began."""
        self._stopping = False
        self.report = Report()

    async def run(self, happenings: Iterable[Event], after_each: Callable[[], None]) -> Report:
        """One event after another; `after_each` is called behind every one."""
        house = self._house
        await house.start_neighbours()
        gateway = Process(house)
        self._url = gateway.url.removesuffix("/v1/completions")
        try:
            self._engines = [self._engine() for _ in range(3)]
            await asyncio.gather(*(engine.ready(self._session) for engine in self._engines))
            await self._publish(1)  # one replica alone gives the answers to compare with
            await gateway.start()
            self._expected = [await self._ask(ask) for ask in self._asks]
            assert all(answer.complete and answer.error is None for answer in self._expected)
            await self._publish()
            async with asyncio.TaskGroup() as clients:
                for number in range(self._clients):
                    clients.create_task(self._client(number))
                for happening in happenings:
                    await self._disturb(happening)
                    after_each()
                self._stopping = True
            await self._count()
        finally:
            for engine in self._engines:
                engine.process.kill()
            if gateway.process is not None:
                await gateway.end(signal.SIGTERM)
            await house.stop()
        return self.report

    @property
    def _session(self) -> aiohttp.ClientSession:
        assert self._house.session is not None
        return self._house.session

    def _engine(self) -> EngineProcess:
        return EngineProcess(self._model, next(self._roles))

    async def _publish(self, count: int = 2) -> None:
        endpoints = [
            {"pod": e.url, "url": e.url, "ready": True, "draining": False, "role": e.role}
            for e in self._engines[:count]
        ]
        await self._house.operator.publish(route("m", *endpoints, bearer=BEARER))

    async def _disturb(self, happening: Event) -> None:
        """Moves streams; or ends an engine, once the last such event has met all it will ever meet, and puts another in
        its place."""
        self.report.events[happening] += 1
        if happening is Event.MIGRATE:
            for _ in range(TRIES):  # a stream may have just ended, or not begun
                await asyncio.sleep(random.uniform(0.0, 0.2))
                if await self._migrate(*random.sample(self._engines[:2], 2)):
                    break
            return
        async with asyncio.timeout(PATIENCE_S):
            while len(self._running) < self._clients or min(self._running.values()) < self._passed:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await asyncio.sleep(random.uniform(0.0, 0.3))
        self._passed += 1
        victim = self._engines.pop(0)
        if happening is Event.KILL:
            victim.process.kill()
        elif happening is Event.SCALE_DOWN:
            before = await self._outcomes(victim)
            await self._post(victim, "/drain", {"peers": [self._engines[0].url]})
            await asyncio.sleep(DRAIN_PAUSE_S)
            self.report.moved.update(Counter(await self._outcomes(victim)) - Counter(before))
            victim.process.terminate()
        else:
            victim.process.terminate()
        await self._engines[1].ready(self._session)
        await victim.ended()
        self._passed += 1
        await self._publish()
        self._engines.append(self._engine())

    async def _migrate(self, source: EngineProcess, to: EngineProcess) -> bool:
        """Moves all streams of one engine to the other; whether any did."""
        answer = await self._post(source, "/migrate", {"to": to.url})
        for stream in answer["streams"]:
            self.report.moved[stream["outcome"]] += 1
            if stream["outcome"] == "stayed":
                self.report.stays[stream["why"].replace(to.url, "the peer")[:120]] += 1
            elif stream["outcome"] == "copied":
                self.report.stalls.append(stream["stallSeconds"])
        return any(stream["outcome"] != "stayed" for stream in answer["streams"])

    async def _post(self, engine: EngineProcess, path: str, body: object) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {BEARER}"}
        async with self._session.post(engine.url + path, json=body, headers=headers) as answer:
            found: dict[str, Any] = await answer.json()
            return found

    async def _outcomes(self, engine: EngineProcess) -> dict[str, int]:
        """What became of the streams that this engine was to move, so far."""
        async with self._session.get(
            engine.url + "/metrics", headers={"Authorization": f"Bearer {BEARER}"}
        ) as answer:
            text = await answer.text()
        lines = [line for line in text.splitlines() if line.startswith("busbar:migrations_total{")]
        return {
            line.split('outcome="')[1].split('"')[0]: int(float(line.rpartition(" ")[2])) for line in lines
        }

    async def _client(self, number: int) -> None:
        turn = number
        while not self._stopping:
            which = turn % len(self._asks)
            me = object()
            self._running[me] = self._passed
            answer = await self._ask(self._asks[which])
            del self._running[me]
            expected, report = self._expected[which], self.report
            if answer.error is not None or not answer.complete:
                report.failed.append(f"{self._asks[which]}: {answer.error}")
            elif answer != expected:
                report.changed.append(f"{self._asks[which]}: {answer} instead of {expected}")
            turn += 1

    async def _ask(self, ask: Ask) -> Answer:
        path, body = ask
        headers = {"Authorization": f"Bearer {KEY_A}"}
        async with self._session.post(self._url + path, json=body, headers=headers) as response:
            data = await response.read()
            answer = Answer.of(data) if response.status == 200 else Answer(error=data.decode())
        report = self.report
        report.requests += 1
        if answer.counted:
            prompt, completion, _ = answer.counted
            report.tokens += completion
            report.expected = (
                report.requests, report.expected[1] + prompt, report.expected[2] + completion,
            )  # fmt: skip
        return answer

    async def _count(self) -> None:
        await self._house.api.wait_for(self.report.requests)
        self.report.counted = self._house.api.total()
        host = self._house.settings().internal_address
        async with self._session.get(f"http://{host}/metrics") as response:
            lines = (await response.text()).splitlines()
        numbers = {
            name: float(value)
            for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")
        }
        self.report.resumed = int(numbers["busbar_gateway_streams_resumed_total"])
        self.report.moved_on = int(numbers["busbar_gateway_streams_moved_total"])
        self.report.broken = int(numbers["busbar_gateway_streams_broken_total"])
