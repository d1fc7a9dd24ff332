"""The front's side of the socket to the engine (`frames.py`): what the engine's state is, and streams of its tokens.

Everything runs in the front's event loop. What readers confirm goes out once for each turn of the loop. When the socket
closes, every open stream ends with an error.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from array import array
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from busbar.workloads.serving import errors
from busbar.workloads.serving.context_limits import ContextLimits
from busbar.workloads.serving.delta import Delta
from busbar.workloads.serving.engine import EngineState, unavailable
from busbar.workloads.serving.errors import EngineFailed, Overloaded, RequestError, ServingError
from busbar.workloads.serving.fairness import NOBODY, Owner
from busbar.workloads.serving.frames import (
    Frame,
    Frames,
    Kind,
    confirm_frame,
    event_of,
    frame,
    step_of,
)
from busbar.workloads.serving.openai_format import GrammarSpec
from busbar.workloads.serving.params_wire import grammar_document, to_document
from busbar.workloads.serving.prompt_logprobs import PromptLogprobs
from busbar.workloads.serving.sampling import SamplingParams
from busbar.workloads.serving.sequence import Pooling

PLAIN = SamplingParams()
SILENT_S = 2.0
"""An engine that has told nothing for so long, though it tells its state more often, is taken to be in a step that long."""
GONE = "the engine's process ended; the request may be sent again"


@dataclass(frozen=True)
class Prompt:
    """One prompt of a request."""

    tokens: list[int]
    params: SamplingParams = PLAIN
    had: list[int] | None = None
    """Of an answer that began on another replica the tokens so far."""
    confirms: bool = False
    """Its reader may end it, and says which tokens it has taken."""
    pooling: Pooling | None = None
    """A vector is wanted."""


@dataclass(frozen=True)
class ChosenAdapter:
    """An adapter that the engine holds for a request."""

    handle: int
    digest: str


@dataclass(frozen=True)
class Asked:
    """A client's request."""

    title: str
    """For logs and answers about it."""
    prompts: Sequence[Prompt]
    owner: Owner = NOBODY
    cache_salt: str = ""
    adapter: ChosenAdapter | None = None
    priority: int = 0
    moves: bool = False
    """It may go on at another replica."""
    to: Sequence[str] = ()
    """Where it is to go on at its first token."""


class Stream:
    """One prompt's deltas."""

    def __init__(self, number: int, confirms: bool = False) -> None:
        self.number = number
        self.confirms = confirms
        self._deltas: asyncio.Queue[Delta] = asyncio.Queue()
        self._told: PromptLogprobs | None = None

    def put(self, found: Delta | PromptLogprobs) -> None:
        if isinstance(found, PromptLogprobs):
            self._told = found  # goes with the next delta
            return
        if self._told is not None:
            found, self._told = replace(found, prompt_logprobs=self._told), None
        self._deltas.put_nowait(found)

    async def next(self) -> Delta:
        return await self._deltas.get()


class EngineLink(asyncio.Protocol):
    """To one engine."""

    def __init__(
        self, on_change: Callable[[], None] = lambda: None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.state = EngineState.LOADING
        self.sleep_level = 0
        self.identity = ""
        self.limits = ContextLimits(0)
        self.failure: ServingError | None = None
        """Why the engine has failed, as far as it could say."""
        self.lost = asyncio.Event()
        """The socket is closed."""
        self.greeted = asyncio.Event()
        """The engine has told its state."""
        self.stall_s = 0.0
        self._on_change = on_change
        self._clock = clock
        self._running = 0
        self._step_s = 0.0
        self._told_at = clock()
        self._frames = Frames()
        self._transport: asyncio.Transport | None = None
        self._streams: dict[int, Stream] = {}
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._taken: list[tuple[int, int, str | None]] = []

    @classmethod
    async def connect(
        cls, sock: socket.socket, on_change: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> EngineLink:
        link = cls(on_change, clock)
        await asyncio.get_running_loop().create_unix_connection(lambda: link, sock=sock)
        return link

    @property
    def open_streams(self) -> int:
        return len(self._streams)

    @property
    def waiting(self) -> int:
        """Requests that have no place in the batch."""
        return max(0, len(self._streams) - self._running)

    @property
    def stalled(self) -> bool:
        """Whether the engine hangs: in a step, or altogether."""
        silent = self._clock() - self._told_at
        if self.state is not EngineState.READY:
            return False
        busy = self._step_s + silent if self._step_s > 0 or silent > SILENT_S else 0.0
        return busy > self.stall_s

    def unavailable(self) -> Overloaded:
        return unavailable(self.state)

    @asynccontextmanager
    async def opened(self, asked: Asked) -> AsyncIterator[list[Stream]]:
        """The streams of a request's prompts, closed at the end. Raises what the engine refuses it for."""
        if self.state is not EngineState.READY:
            raise self.unavailable()
        group = next(self._numbers)
        streams = [Stream(next(self._numbers), each.confirms) for each in asked.prompts]
        self._streams.update((stream.number, stream) for stream in streams)
        try:
            await self.call("open", *_opening(group, streams, asked))
            yield streams
        finally:
            for stream in streams:
                self._streams.pop(stream.number, None)
            self.tell("end", group=group)

    def confirm(self, stream: Stream, taken: int, finish: str | None) -> None:
        """A reader that confirms has taken so many completion tokens, and the answer ends with them (stop, length)."""
        if not self._taken:
            asyncio.get_running_loop().call_soon(self._send_taken)
        self._taken.append((stream.number, taken, finish))

    async def check_grammar(self, spec: GrammarSpec) -> None:
        """Raises BadRequest for a grammar that cannot be served."""
        await self.call("grammar", {"grammar": grammar_document(spec)})

    @asynccontextmanager
    async def adapter(self, model: str) -> AsyncIterator[ChosenAdapter]:
        """The adapter that a model's name means, in memory and held. Raises NotFound, or Overloaded."""
        asking = asyncio.ensure_future(self.call("adapter", {"model": model}))
        try:
            found = ChosenAdapter(**await asyncio.shield(asking))
        except asyncio.CancelledError:
            asking.add_done_callback(self._release_untold)
            raise
        try:
            yield found
        finally:
            self.tell("release", handle=found.handle)

    async def call(self, name: str, asked: Mapping[str, Any] | None = None, tail: bytes = b"") -> Any:
        """The engine's answer. Raises the RequestError that it answers with, EngineFailed where it is gone."""
        if self.lost.is_set():
            raise EngineFailed(GONE)
        number = next(self._numbers)
        done = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(frame(Kind.CALL, {"id": number, "name": name, **(asked or {})}, tail))
            return await done
        finally:
            del self._waiting[number]

    def tell(self, name: str, **told: Any) -> None:
        """A command that has no answer, behind all that was confirmed."""
        self._send_taken()
        self._send(frame(Kind.TELL, {"name": name, **told}))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    # -- the protocol -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for found in self._frames.feed(data):
            self._take(found)

    def connection_lost(self, error: Exception | None) -> None:
        self.lost.set()
        self.greeted.set()
        if self.state not in (EngineState.FAILED, EngineState.STOPPED):
            self.state = EngineState.FAILED
        for done in self._waiting.values():
            if not done.done():
                done.set_exception(EngineFailed(GONE))
        for stream in self._streams.values():
            stream.put(Delta(str(stream.number), finish="error", error=GONE))
        self._streams.clear()
        self._on_change()

    # -- inside -------------------------------------------------------------------------------

    def _take(self, found: Frame) -> None:
        if found.kind is Kind.STEP:
            deltas, self._running = step_of(found.tail)
            self._step_s, self._told_at = 0.0, self._clock()
            for number, delta in deltas:
                self._give(number, delta)
        elif found.kind is Kind.EVENT:
            self._give(*event_of(found))
        elif found.kind is Kind.REPLY:
            self._answer(found.document)
        else:
            self._learn(found.document)

    def _give(self, number: int, found: Delta | PromptLogprobs) -> None:
        stream = self._streams.get(number)
        if stream is None:
            return  # its reader has left
        stream.put(found)
        if isinstance(found, Delta) and found.finish is not None:
            del self._streams[number]

    def _answer(self, reply: Mapping[str, Any]) -> None:
        done = self._waiting.get(reply["id"])
        if done is None or done.done():
            return  # its caller is gone
        if "error" in reply:
            done.set_exception(_error_of(reply["error"]))
        else:
            done.set_result(reply["result"])

    def _learn(self, told: Mapping[str, Any]) -> None:
        self.state, self.sleep_level = EngineState(told["state"]), told["sleep"]
        self._running, self._step_s, self.stall_s = told["running"], told["step_s"], told["stall_s"]
        self._told_at = self._clock()
        if "limits" in told:
            self.identity, self.limits = told["identity"], ContextLimits(**told["limits"])
        if "failure" in told:
            self.failure = _error_of(told["failure"])
        self.greeted.set()
        self._on_change()

    def _send_taken(self) -> None:
        if self._taken:
            taken, self._taken = self._taken, []
            self._send(confirm_frame(taken))

    def _send(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def _release_untold(self, asking: asyncio.Future[Mapping[str, Any]]) -> None:
        if not asking.cancelled() and asking.exception() is None:
            self.tell("release", handle=asking.result()["handle"])


def _opening(group: int, streams: Sequence[Stream], asked: Asked) -> tuple[dict[str, Any], bytes]:
    """The document and the tokens of an `open`; answers to the same prompt share its tokens."""
    lists: list[list[int]] = []
    places: dict[int, int] = {}

    def place_of(tokens: list[int]) -> int:
        if id(tokens) not in places:
            places[id(tokens)] = len(lists)
            lists.append(tokens)
        return places[id(tokens)]

    prompts = [
        {
            "number": stream.number,
            "prompt": place_of(each.tokens),
            "had": None if each.had is None else place_of(each.had),
            "params": to_document(each.params),
            "confirms": each.confirms,
            "pooling": each.pooling,
        }
        for stream, each in zip(streams, asked.prompts, strict=True)
    ]
    document = {
        "group": group,
        "title": asked.title,
        "prompts": prompts,
        "lengths": list(map(len, lists)),
        "owner": asdict(asked.owner),
        "salt": asked.cache_salt,
        "adapter": None if asked.adapter is None else asked.adapter.handle,
        "priority": asked.priority,
        "moves": asked.moves,
        "to": list(asked.to),
    }
    return document, b"".join(array("I", tokens).tobytes() for tokens in lists)


def _error_of(told: Mapping[str, Any]) -> ServingError:
    kind: type[ServingError] = getattr(errors, told["kind"], EngineFailed)
    if issubclass(kind, RequestError):
        return kind(told["message"], param=told.get("param"), retry_after_s=told.get("retry_after_s"))
    return kind(told["message"])
