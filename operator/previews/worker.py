"""Previews are computed in a process of their own that stays: people wait for them, and starting Python takes longer
than planning.

    operator ── length, pickled PreviewQuestion ──► python -m busbar.operator.previews.worker
             ◄── one JSON line: the answer ── one JSON line: the forecast of a draft that waits, or null

One question at a time; so many wait for their turn, and more are told to come back. A child that is late, fails or
dies is replaced for the next question. It reads nothing but its questions.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import math
import os
import pickle
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import BinaryIO, TextIO

from busbar.kube.contracts.preview import PreviewAnswer
from busbar.kube.types import ModelService
from busbar.operator.errors import Busy, PreviewFailed
from busbar.operator.forecasts.forecaster import Forecaster
from busbar.operator.forecasts.worker import Answer, answers, read_answer
from busbar.operator.previews.preview import (
    Calibration,
    Hold,
    PreviewQuestion,
    answer,
    held_by_claims,
    held_by_model,
    held_by_tenant,
    if_suspended,
    with_engine_mode,
    with_forecast,
)
from busbar.operator.previews.replicas import held_at_zero, of_replicas, offered, with_target
from busbar.operator.scheduling.snapshot import DRAFT, ClusterObjects, Draft, build, with_draft
from busbar.operator.steady_clock import utc_now
from busbar.scheduler import Policy, Snapshot

HEAD = 8
"""Bytes of a question's length."""
NICE = 5
LIMIT_S = 9.0
"""The API waits ten seconds for an answer."""
SPARE_S = 0.3
"""A forecast is given up so long before: the plan's answer is worth having without it."""
MOST_WAITING = 8
LINE_LIMIT = 2**20
WARM_S = 120.0
"""So long after a preview the process is sent the snapshots of new rounds."""


class PreviewWorker:
    """The child, started at the first question."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        """`limit_s`: from a question to its whole answer."""
        self._limit_s = limit_s
        self._child: Process | None = None
        self._base: Snapshot | None = None
        """What the child holds."""
        self._turn = asyncio.Lock()
        self._waiting = 0

    async def ask(self, question: PreviewQuestion, forecast_s: float) -> tuple[PreviewAnswer, Answer | None]:
        """The answer; and when the draft would start, if it waits and that was found within `forecast_s`.

        Raises:
            Busy: as many are waiting for their turn as may.
            PreviewFailed: the child failed or was too slow.
        """
        if self._waiting >= MOST_WAITING:
            raise Busy("other previews are being computed; try again in a few seconds")
        self._waiting += 1
        try:
            end = asyncio.get_running_loop().time() + self._limit_s
            async with asyncio.timeout_at(end), self._turn:
                # The more wait for their turn, the less time there is for a forecast.
                return await self._ask(question, end, forecast_s / self._waiting)
        except TimeoutError as error:
            raise PreviewFailed("the plan took too long; try again") from error
        finally:
            self._waiting -= 1

    async def _ask(
        self, question: PreviewQuestion, end: float, forecast_s: float
    ) -> tuple[PreviewAnswer, Answer | None]:
        whole = False
        try:
            child = await self._running()
            base = question.base
            if base is self._base:
                question = replace(question, base=None)
            assert child.stdout is not None
            await self._send(child, question)
            self._base = base
            line = await child.stdout.readline()
            if not line:
                raise PreviewFailed("the process of the previews ended; its last words stand in the log")
            found = PreviewAnswer.model_validate_json(line)
            told: Answer | None = None
            with contextlib.suppress(TimeoutError):
                left_s = end - asyncio.get_running_loop().time() - SPARE_S
                async with asyncio.timeout(min(forecast_s, left_s)):
                    second = await child.stdout.readline()
                told = read_answer(second) if second and second != b"null\n" else None
                whole = bool(second)
            return found, told
        except ConnectionError as error:
            raise PreviewFailed("the process of the previews ended; try again") from error
        finally:
            if not whole:  # also where the caller has gone: the rest of the answer is nobody's
                await self.close()

    async def hold(self, base: Snapshot) -> None:
        """Send the snapshot of the next questions while nobody waits for an answer."""
        if self._child is None or base is self._base or self._turn.locked():
            return
        async with self._turn:
            try:
                await self._send(await self._running(), Hold(base))
                self._base = base
            except BaseException:  # also where we are stopped in the middle: half a message is none
                await self.close()
                raise

    async def _send(self, child: Process, message: PreviewQuestion | Hold) -> None:
        sent = await asyncio.to_thread(pickle.dumps, message)
        assert child.stdin is not None
        child.stdin.write(len(sent).to_bytes(HEAD) + sent)
        await child.stdin.drain()

    async def _running(self) -> Process:
        if self._child is None or self._child.returncode is not None:
            self._base = None
            self._child = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "busbar.operator.previews.worker",
                stdin=PIPE, stdout=PIPE, limit=LINE_LIMIT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )  # fmt: skip
        return self._child

    async def close(self) -> None:
        """End the child."""
        child, self._child = self._child, None
        if child is None:
            return
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
        if child.stdin is not None:
            child.stdin.close()
        await child.wait()


class Previews:
    """From a draft to its answer, on what the last round leaves behind."""

    def __init__(
        self,
        seen: Callable[[], ClusterObjects],
        last: Callable[[], Snapshot | None],
        forecaster: Forecaster,
        policy: Policy,
        forecast_s: float,
    ) -> None:
        self._seen, self._last, self._forecaster = seen, last, forecaster
        # The round's policy without the part that takes seconds.
        self._policy = replace(policy, solver=False)
        self._forecast_s = forecast_s
        self._asked_at = -math.inf
        self._sending: asyncio.Task[None] | None = None
        self.worker = PreviewWorker()

    async def close(self) -> None:
        """End the process."""
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.gather(self._sending, return_exceptions=True)
        await self.worker.close()

    def after_round(self) -> None:
        """While people ask for previews the process gets the snapshot after each round at once: they need not wait
        for it."""
        busy = self._sending is not None and not self._sending.done()
        if busy or time.monotonic() - self._asked_at > WARM_S:
            return
        snapshot = self._last()
        if snapshot is not None:
            self._sending = asyncio.get_running_loop().create_task(self._hold(snapshot))

    async def _hold(self, snapshot: Snapshot) -> None:
        with contextlib.suppress(ConnectionError):  # the next question gets another process
            await self.worker.hold(snapshot)

    async def of(self, draft: Draft, admin: bool) -> PreviewAnswer:
        """What the next round would do with the draft. Raises Busy, PreviewFailed."""
        self._asked_at = time.monotonic()
        seen, now = self._seen(), utc_now()
        held = (
            held_by_model(seen, draft)
            or held_by_tenant(seen, draft, now)
            or held_by_claims(seen, draft)
            or held_at_zero(draft)
        )
        if held is not None:
            return held
        last = self._last() or build(seen, now, half_life_s=self._policy.usage_half_life_s)
        base, jobs = with_draft(last, seen, draft, now)
        jobs, kept_back = offered(base, seen, draft, jobs, now)
        if kept_back and not jobs:
            return if_suspended(of_replicas(kept_back), draft)
        question = PreviewQuestion(
            base=base,
            drafts=jobs,
            kept_back=kept_back,
            policy=self._policy,
            now=now.timestamp(),
            key=draft.key,
            service=isinstance(draft, ModelService),
            admin=admin,
            forecast=self._forecaster.question_of(DRAFT, now),
        )
        found, told = await self.worker.ask(question, self._forecast_s)
        if found.waits:
            return if_suspended(with_forecast(found, told, self._kept(now.timestamp())), draft)
        found = with_engine_mode(found, seen, draft)
        if isinstance(draft, ModelService) and found.pool:
            found = with_target(found, seen, draft)
        return if_suspended(found, draft)

    def _kept(self, now: float) -> Calibration:
        p50, p90 = self._forecaster.kept(now)
        return Calibration(p90.promises, p50.share, p90.share)


def serve(questions: BinaryIO, out: TextIO) -> None:
    """Answers until there are no more questions."""
    base: Snapshot | None = None
    while head := questions.read(HEAD):
        question: PreviewQuestion | Hold = pickle.loads(questions.read(int.from_bytes(head)))
        base = question.base or base
        if isinstance(question, Hold):
            continue
        question = replace(question, base=base)
        found = answer(question)
        print(found.model_dump_json(by_alias=True), file=out, flush=True)
        asked = question.forecast if found.waits else None
        told = next(answers(replace(asked, snapshot=question.snapshot)), None) if asked is not None else None
        print(json.dumps(asdict(told)) if told is not None else "null", file=out, flush=True)
        gc.collect()


def main() -> None:
    """The child."""
    os.nice(NICE)
    gc.disable()  # not while somebody waits: it is done between the questions
    serve(sys.stdin.buffer, sys.stdout)


if __name__ == "__main__":
    main()
