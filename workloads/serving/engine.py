"""The engine's thread, and the bridge between it and the event loop of its process.

Loop → thread: commands (submit, read, cancel) through one queue, drained between steps. Thread → front: all deltas of a step
in one call of `deliver`, from the thread itself, so that a step's tokens are on their way before the next one begins. The
thread sleeps when nothing runs. If a step raises, every open stream ends with an error and the engine
is `Failed`: the process exits and is started again, rather than serving from an unknown state.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from busbar.workloads.serving.core import EngineCore
from busbar.workloads.serving.delta import Delta
from busbar.workloads.serving.errors import Busy, EngineFailed, Overloaded, ServingError
from busbar.workloads.serving.fairness import NOBODY, Owner
from busbar.workloads.serving.history import History
from busbar.workloads.serving.sampling import SamplingParams
from busbar.workloads.serving.sequence import Pooling
from busbar.workloads.serving.sleeping import SleepLevel, fall_asleep, wake

if TYPE_CHECKING:
    from busbar.workloads.serving.adapters import Adapter
    from busbar.workloads.serving.loader import Loaded

T = TypeVar("T")
log = logging.getLogger(__name__)
ENGINE_THREAD = "engine"
"""The thread's name."""


class EngineState(StrEnum):
    LOADING = "Loading"
    READY = "Ready"
    SLEEPING = "Sleeping"
    WAKING = "Waking"
    FAILED = "Failed"
    STOPPED = "Stopped"


def unavailable(state: EngineState) -> Overloaded:
    """Why a request cannot be taken in a state that is not READY."""
    if state is EngineState.LOADING:
        return Overloaded("the model is still loading; try again shortly", retry_after_s=2)
    if state in (EngineState.SLEEPING, EngineState.WAKING):
        word = "asleep" if state is EngineState.SLEEPING else "waking up"
        return Overloaded(f"this replica is {word}; POST /wake_up wakes it", retry_after_s=2)
    return Overloaded(f"the engine is {state.value.lower()}; this replica is going down")


class Engine:
    """Loads a model in its own thread and runs it there. All public methods are for the loop."""

    def __init__(
        self,
        load: Callable[[], Loaded],
        loop: asyncio.AbstractEventLoop,
        on_change: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        deliver: Callable[[list[Delta]], None] = lambda deltas: None,
    ) -> None:
        """`deliver` gets the deltas of a step; any thread may call it, the engine's mostly."""
        self.state = EngineState.LOADING
        self.loaded: Loaded | None = None
        self.failure: BaseException | None = None
        self.sleep_level = SleepLevel.AWAKE
        self._load = load
        self._loop = loop
        self._on_change = on_change
        self._clock = clock
        self._deliver = deliver
        self._open: dict[str, None] = {}
        """Requests whose end has not been delivered."""
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._watched: list[Callable[[], bool]] = []
        self._stopping = threading.Event()
        self._turn_began: float | None = None
        self._thread = threading.Thread(target=self._run, name=ENGINE_THREAD, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, wait_s: float = 10.0) -> None:
        """Ends the thread after the step that runs. Open streams end with an error."""
        self._stopping.set()
        self._inbox.put(lambda: None)
        if self._thread.is_alive():
            self._thread.join(wait_s)

    @property
    def running(self) -> int:
        return len(self.loaded.core.scheduler.running) if self.loaded else 0

    @property
    def waiting(self) -> int:
        return max(0, len(self._open) - self.running)

    @property
    def step_seconds(self) -> float:
        """How long the thread has been busy with its present step, and the commands before it; 0 where it waits, and
        while it wakes the engine, which takes as long as it takes."""
        began = self._turn_began
        return (
            0.0 if began is None or self.state is not EngineState.READY else max(0.0, self._clock() - began)
        )

    def open(
        self,
        request_id: str,
        prompt: list[int],
        params: SamplingParams,
        owner: Owner = NOBODY,
        cache_salt: str = "",
        history: History | None = None,
        adapter: Adapter | None = None,
        priority: int = 0,
        confirms: bool = False,
    ) -> None:
        """Hands a request to the thread; see `EngineCore.submit`. Raises Overloaded where the engine is not ready."""
        self._enter(
            request_id,
            lambda core, arrived: core.submit(
                request_id, prompt, params, arrived, owner, cache_salt, history, adapter, priority, confirms
            ),
            adapter,
        )

    def open_embedding(
        self,
        request_id: str,
        tokens: list[int],
        pooling: Pooling,
        owner: Owner = NOBODY,
        cache_salt: str = "",
        adapter: Adapter | None = None,
    ) -> None:
        """As `open`, for a text that is to become a vector; see `EngineCore.embed`."""
        self._enter(
            request_id,
            lambda core, arrived: core.embed(
                request_id, tokens, pooling, arrived, owner, cache_salt, adapter
            ),
            adapter,
        )

    def confirm(self, taken: Sequence[tuple[str, int, str | None]]) -> None:
        """Of requests that confirm how many completion tokens their readers have taken, and how the answers end with them
        (stop, length, abort); see `EngineCore.read`."""
        for request_id, _, finish in taken:
            if finish is not None:
                self._open.pop(request_id, None)

        def read(core: EngineCore) -> None:
            for each in taken:
                core.read(*each)

        self.post(read)

    def close(self, request_id: str, confirms: bool = False) -> None:
        """Nobody reads on: cancels the request if it still runs. Otherwise no effect."""
        is_open = request_id in self._open
        self._open.pop(request_id, None)
        if confirms:
            self.confirm([(request_id, 0, "abort")])
        elif is_open:
            self.post(lambda core: core.cancel(request_id))

    def cut(self, reason: str) -> None:
        """Ends every open stream with an error (the drain's time is over)."""
        if self.loaded is not None:
            core = self.loaded.core
            self._inbox.put(lambda: self._fail_streams(core.abandon(), reason, leaving=True))

    async def in_turn(self, work: Callable[[EngineCore], T]) -> T:
        """What `work` gives, run in the thread between two steps; its exceptions are raised here. Raises Overloaded
        where the engine is not ready."""
        if self.state is not EngineState.READY or self.loaded is None:
            raise self.unavailable()
        core, done = self.loaded.core, self._loop.create_future()

        def tell(result: T | None, error: Exception | None) -> None:
            if not done.done():  # its caller may be gone
                if error is not None:
                    done.set_exception(error)
                else:
                    done.set_result(result)

        def command() -> None:
            try:
                result = work(core)
            except Exception as error:
                self._to_loop(partial(tell, None, error))
            else:
                self._to_loop(partial(tell, result, None))

        self._inbox.put(command)
        found: T = await done
        return found

    async def when(self, work: Callable[[EngineCore], T | None], undo: Callable[[T], None]) -> T:
        """As `in_turn`, but run again after each step as long as `work` gives None. `undo` gets the result that comes when the
        caller was cancelled meanwhile."""
        if self.state is not EngineState.READY or self.loaded is None:
            raise self.unavailable()
        core, done = self.loaded.core, self._loop.create_future()

        def tell(result: T | None, error: Exception | None) -> None:
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)

        def is_over() -> bool:
            try:
                result = work(core)
            except Exception as error:
                self._to_loop(partial(tell, None, error))
                return True
            if result is not None:
                self._to_loop(partial(tell, result, None))
            return result is not None

        def command() -> None:
            if not is_over():
                self._watched.append(is_over)

        self._inbox.put(command)
        try:
            found: T = await asyncio.shield(done)
        except asyncio.CancelledError:
            done.add_done_callback(lambda it: None if it.exception() else undo(it.result()))
            raise
        return found

    def post(self, work: Callable[[EngineCore], object]) -> None:
        """As `in_turn`, where nobody waits for it; it must not fail."""
        if self.loaded is not None:
            core = self.loaded.core
            self._inbox.put(lambda: (work(core), None)[1])

    async def hand_over(self, request_ids: list[str], to: str, held: bool) -> bool:
        """Ends streams that go on at another replica; whether any was left to end. Of `held` ones the thread makes no
        more tokens, so nobody waits for it."""

        def work(core: EngineCore) -> list[str]:
            return [each for each in request_ids if core.cancel(each)]

        if held:
            ended = [each for each in request_ids if each in self._open]
            self.post(work)
        else:
            ended = await self.in_turn(work)
        reason = "the stream goes on at another replica"
        self._tell([Delta(each, finish="error", error=reason, leaving=True, moved_to=to) for each in ended])
        return bool(ended)

    async def sleep(self, level: SleepLevel) -> None:
        """Gives memory back; from now on requests are refused. Harmless at the same level. Raises Busy while requests
        are open and from level 2 to 1, Overloaded where the engine is neither ready nor asleep."""
        if self.state not in (EngineState.READY, EngineState.SLEEPING) or self.loaded is None:
            raise self.unavailable()
        if self._open:
            raise Busy(f"{len(self._open)} requests run; a replica sleeps only when nothing runs")
        if level < self.sleep_level:
            raise Busy(f"it sleeps at level {self.sleep_level} already, with less in memory; wake it first")
        if level == self.sleep_level:
            return
        loaded, self.state, self.sleep_level = self.loaded, EngineState.SLEEPING, level
        await self._in_thread(lambda: fall_asleep(loaded, level))

    async def wake_up(self) -> None:
        """Takes the memory again; returns when requests are taken. Harmless where it is awake. Raises Overloaded where
        the engine is neither ready nor asleep, EngineFailed where it cannot wake: the process ends then."""
        if self.state is EngineState.READY:
            return
        if self.state is not EngineState.SLEEPING or self.loaded is None:
            raise self.unavailable()
        loaded, self.state = self.loaded, EngineState.WAKING

        def work() -> None:
            wake(loaded)
            self.sleep_level = SleepLevel.AWAKE
            self._become(EngineState.READY)

        await self._in_thread(work)

    async def _in_thread(self, work: Callable[[], None]) -> None:
        """Runs a command in the engine's thread, where a failure is the engine's. Raises EngineFailed."""
        done: asyncio.Future[None] = self._loop.create_future()

        def tell(error: BaseException | None) -> None:
            if not done.done():  # its caller may be gone
                if error is None:
                    done.set_result(None)
                else:
                    done.set_exception(EngineFailed(f"the engine failed: {error}"))

        def command() -> None:
            try:
                work()
            except BaseException as error:
                self._become(EngineState.FAILED)  # before its caller is told
                self._to_loop(partial(tell, error))
                raise
            self._to_loop(partial(tell, None))

        self._inbox.put(command)
        await done

    def _enter(
        self, request_id: str, submit: Callable[[EngineCore, float], None], adapter: Adapter | None
    ) -> None:
        if self.state is not EngineState.READY or self.loaded is None:
            raise self.unavailable()
        if request_id in self._open:
            raise ValueError(f"request id {request_id} is in use")
        core, arrived = self.loaded.core, self._clock()
        self._open[request_id] = None
        if adapter is not None:
            adapter.hold()  # until the core ends the request
        self._inbox.put(lambda: submit(core, arrived))

    def unavailable(self) -> Overloaded:
        """Why a request cannot be taken now."""
        return unavailable(self.state)

    # -- in the thread ------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self.loaded = self._load()
            self._become(EngineState.READY)
            self._serve(self.loaded)
            self._become(EngineState.STOPPED)
        except BaseException as error:
            self.failure = error
            if not isinstance(error, ServingError):
                log.exception("the engine failed")
            self.state = EngineState.FAILED
            if self.loaded is not None:
                ids = self.loaded.core.abandon()
                self._fail_streams(ids, "the engine failed; the request may be sent again")
            self._become(EngineState.FAILED)  # who hears of it has heard of the streams' ends

    def _serve(self, loaded: Loaded) -> None:
        core = loaded.core
        while not self._stopping.is_set():
            command = self._inbox.get() if core.idle else None
            self._turn_began = self._clock()
            if command is not None:
                command()
            while True:
                try:
                    command = self._inbox.get_nowait()
                except queue.Empty:
                    break
                command()
            if not core.idle:
                self._tell(core.step())
            if self._watched:
                self._watched = [is_over for is_over in self._watched if not is_over()]
            self._turn_began = None
        self._fail_streams(core.abandon(), "the server is shutting down", leaving=True)

    def _become(self, state: EngineState) -> None:
        self.state = state
        self._to_loop(self._on_change)

    def _fail_streams(self, ids: list[str], reason: str, leaving: bool = False) -> None:
        self._tell([Delta(i, finish="error", error=reason, leaving=leaving) for i in ids])

    def _tell(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            if delta.finish is not None:
                self._open.pop(delta.request_id, None)
        if deltas:
            self._deliver(deltas)

    def _to_loop(self, call: Callable[[], None]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call)
