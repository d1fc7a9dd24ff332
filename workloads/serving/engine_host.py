"""The engine's process: what the front asks for by frames (`frames.py`), and its routes (`engine_routes.py`).

A CALL is answered; what it names is a method of `EngineHost`. A request of a client is a group of prompts: `open` begins it and
`end` ends it, whatever became of it. Adapters are held for the front until it releases them.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from array import array
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

from busbar.workloads.serving.adapters import Adapter
from busbar.workloads.serving.delta import Delta
from busbar.workloads.serving.engine import Engine
from busbar.workloads.serving.engine_routes import EngineRoutes
from busbar.workloads.serving.errors import BadRequest, EngineFailed, RequestError, ServingError
from busbar.workloads.serving.fairness import Owner
from busbar.workloads.serving.frames import Frame, Frames, Kind, confirmed, frame, step_frames
from busbar.workloads.serving.history import History
from busbar.workloads.serving.loader import Loaded
from busbar.workloads.serving.migrate_out import Movable
from busbar.workloads.serving.params_wire import from_document, grammar_of
from busbar.workloads.serving.sampling import SamplingParams
from busbar.workloads.serving.sender import Sender
from busbar.workloads.serving.sequence import Pooling
from busbar.workloads.serving.settings import ServerSettings

log = logging.getLogger(__name__)
BEAT_S = 0.5
"""So often the engine tells its state, so that the front sees a step, or a process, that hangs."""
READ_BYTES = 2**20


@dataclass(eq=False)
class Group:
    """A client's request."""

    ended: bool = False
    requests: dict[str, bool] = field(default_factory=dict)
    """By id, whether its reader confirms."""
    stack: ExitStack = field(default_factory=ExitStack)
    """Left at its end."""


@dataclass(frozen=True)
class Prompt:
    """One prompt of a request, as the front sends it."""

    id: str
    tokens: list[int]
    params: SamplingParams
    had: list[int] | None
    """Of an answer that began on another replica the tokens so far."""
    confirms: bool
    pooling: Pooling | None


class EngineHost:
    """Serves one front."""

    def __init__(
        self, settings: ServerSettings, load: Callable[[], Loaded], sock: socket.socket, secret: str
    ) -> None:
        """In the event loop of the process. `sock` leads to the front."""
        loop = asyncio.get_running_loop()
        sock.setblocking(False)
        self.over = asyncio.Event()
        """The front has said that it ends, or is gone."""
        self.dismissed = False
        """It has said so."""
        self.changed = asyncio.Event()
        self._socket = sock
        self._loop = loop
        self._frames = Frames()
        self._sender = Sender(sock, loop, self.over.set)
        self.engine = Engine(load, loop, self._on_change, deliver=self._deliver)
        self.routes = EngineRoutes(settings, self.engine, secret)
        self._groups: dict[int, Group] = {}
        self._adapters: dict[int, Adapter] = {}
        self._handles = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._calls: Mapping[str, Callable[[Mapping[str, Any], bytes], Awaitable[object]]] = {
            "open": self._open,
            "grammar": self._grammar,
            "adapter": self._adapter,
            "model": self._model,
            "status": self._status,
            "leave": self._leave,
            "sync": self._sync,
        }
        self._told: Mapping[str, Callable[[Mapping[str, Any]], None]] = {
            "end": self._end,
            "release": self._release,
            "drain": lambda told: self.routes.start_drain(),
            "cut": lambda told: self.engine.cut(told["reason"]),
            "rejected": lambda told: self.routes.count_rejected(told["reason"]),
            "stop": self._stop,
        }
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """The front hears of the engine, which begins to load."""
        self._loop.add_reader(self._socket, self._read)
        self._beat()
        self.engine.start()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self._socket)
        self._sender.close()
        self._socket.close()

    def tell_state(self) -> None:
        engine, loaded, failure = self.engine, self.engine.loaded, self.engine.failure
        document: dict[str, Any] = {
            "state": engine.state.value,
            "sleep": int(engine.sleep_level),
            "running": engine.running,
            "step_s": engine.step_seconds,
            "stall_s": self.routes.stall_s,
        }
        if loaded is not None:
            limits = loaded.core.context_limits
            document |= {"identity": loaded.identity, "limits": asdict(limits)}
        if failure is not None:
            known = (
                failure
                if isinstance(failure, ServingError)
                else EngineFailed(f"{type(failure).__name__}: {failure}")
            )
            document["failure"] = {"kind": type(known).__name__, "message": str(known)}
        self._sender.send(frame(Kind.STATE, document))

    # -- inside -------------------------------------------------------------------------------

    def _beat(self) -> None:
        self.tell_state()
        self._timer = self._loop.call_later(BEAT_S, self._beat)

    def _on_change(self) -> None:
        self.tell_state()
        self.changed.set()

    def _deliver(self, deltas: list[Delta]) -> None:
        """From any thread."""
        self._sender.send(step_frames(deltas, self.engine.running))

    def _read(self) -> None:
        try:
            data = self._socket.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(self._socket)
            self.over.set()
            return
        for found in self._frames.feed(data):
            self._take(found)

    def _take(self, found: Frame) -> None:
        if found.kind is Kind.CONFIRM:
            self.engine.confirm(
                [(str(number), count, finish) for number, count, finish in confirmed(found.tail)]
            )
            return
        document = found.document
        if found.kind is Kind.TELL:
            self._told[document["name"]](document)
            return
        if document["name"] == "open":
            self._groups[document["group"]] = Group()
        task = asyncio.create_task(self._answer(document, found.tail))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, document: Mapping[str, Any], tail: bytes) -> None:
        reply: dict[str, Any] = {"id": document["id"]}
        try:
            reply["result"] = await self._calls[document["name"]](document, tail)
        except RequestError as error:
            reply["error"] = {
                "kind": type(error).__name__,
                "message": str(error),
                "param": error.param,
                "retry_after_s": error.retry_after_s,
            }
        except Exception:
            log.exception("a command of the front failed")
            told = "the server failed on this request; its log says why"
            reply["error"] = {"kind": "EngineFailed", "message": told}
        self._sender.send(frame(Kind.REPLY, reply))

    def _loaded(self) -> Loaded:
        if self.engine.loaded is None:
            raise self.engine.unavailable()
        return self.engine.loaded

    # -- calls --------------------------------------------------------------------------------

    async def _open(self, asked: Mapping[str, Any], tail: bytes) -> None:
        group, core = self._groups.get(asked["group"]), self._loaded().core
        if group is None:
            return  # its client has left meanwhile
        try:
            prompts = _prompts(asked, tail)
            histories: dict[str, History] = {}
            for each in prompts:
                if each.params.grammar is not None:  # compiled already, if not long ago
                    await core.grammars.get(each.params.grammar)
                if each.had is not None:
                    found = await asyncio.to_thread(core.replay, each.tokens, each.params, each.had)
                    if core.rules.is_over(found, each.params):
                        raise BadRequest("these tokens end the answer already", param="choices")
                    histories[each.id] = found
            if not group.ended:
                self._enter(group, asked, prompts, histories)
        except BaseException:
            self._end({"group": asked["group"]})
            raise

    def _enter(
        self,
        group: Group,
        asked: Mapping[str, Any],
        prompts: list[Prompt],
        histories: Mapping[str, History],
    ) -> None:
        owner, salt = Owner(**asked["owner"]), asked["salt"]
        adapter = None if asked["adapter"] is None else self._adapters[asked["adapter"]]
        for each in prompts:
            if each.pooling is not None:
                self.engine.open_embedding(each.id, each.tokens, each.pooling, owner, salt, adapter)
            else:
                self.engine.open(
                    each.id,
                    each.tokens,
                    each.params,
                    owner,
                    salt,
                    histories.get(each.id),
                    adapter,
                    asked["priority"],
                    each.confirms,
                )
            group.requests[each.id] = each.confirms
        if asked["moves"] and prompts:
            begun = [[*each.tokens, *(each.had or ())] for each in prompts]
            explains = any(each.params.prompt_logprobs is not None for each in prompts)
            stream = Movable(asked["title"], list(group.requests), owner, salt, adapter, explains, begun)
            group.stack.enter_context(self.routes.departures.offered(stream))
            if asked["to"]:
                group.stack.enter_context(self.routes.departures.handed_over(stream, asked["to"]))

    async def _grammar(self, asked: Mapping[str, Any], tail: bytes) -> None:
        await self._loaded().core.grammars.get(grammar_of(asked["grammar"]))

    async def _adapter(self, asked: Mapping[str, Any], tail: bytes) -> Mapping[str, Any]:
        """An adapter, in memory and held until it is released."""
        async with self.routes.models.chosen(asked["model"]) as adapter:
            if adapter is None:
                raise self.engine.unavailable()
            adapter.hold()
        handle = next(self._handles)
        self._adapters[handle] = adapter
        return {"handle": handle, "digest": adapter.digest}

    async def _model(self, asked: Mapping[str, Any], tail: bytes) -> None:
        self.routes.models.adapter_name(asked["model"])

    async def _status(self, asked: Mapping[str, Any], tail: bytes) -> Mapping[str, Any]:
        copied, recomputed = self.routes.left
        return {
            "status": self.routes.status().model_dump(mode="json", by_alias=True),
            "copied": copied,
            "recomputed": recomputed,
        }

    async def _leave(self, asked: Mapping[str, Any], tail: bytes) -> None:
        self.routes.leave(asked["peers"])

    async def _sync(self, asked: Mapping[str, Any], tail: bytes) -> None:
        """What the engine's state is now has been told before the answer."""
        self.tell_state()

    # -- what it is told ----------------------------------------------------------------------

    def _end(self, told: Mapping[str, Any]) -> None:
        group = self._groups.pop(told["group"], None)
        if group is None:
            return
        group.ended = True
        for request_id, confirms in group.requests.items():
            self.engine.close(request_id, confirms)
        group.stack.close()

    def _release(self, told: Mapping[str, Any]) -> None:
        self._adapters.pop(told["handle"]).release()

    def _stop(self, told: Mapping[str, Any]) -> None:
        self.dismissed = True
        self.over.set()


def _prompts(asked: Mapping[str, Any], tail: bytes) -> list[Prompt]:
    """The prompts of an `open`: their tokens are in the tail, one list after another."""
    numbers, at = array("I", tail), 0
    lists: list[list[int]] = []
    for length in asked["lengths"]:
        lists.append(numbers[at : at + length].tolist())
        at += length
    return [
        Prompt(
            str(each["number"]),
            lists[each["prompt"]],
            from_document(each["params"]),
            None if each["had"] is None else lists[each["had"]],
            each["confirms"],
            None if each["pooling"] is None else Pooling(each["pooling"]),
        )
        for each in asked["prompts"]
    ]
