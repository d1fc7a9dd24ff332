"""One replica of a model server, step by step: continuous batching with chunked prompts.

A step decodes one token of each running sequence and processes a chunk of the first waiting prompts, sized so that
the step keeps within the TPOT target. Its duration is the step model's. A request waits until its whole context fits
the KV cache beside the others', and is refused where it never does. Steps without prompts are taken in one jump up to the next end of a sequence, so the
cost of a simulation grows with requests, not with steps.

A request that leaves a replica keeps what was generated: the next one computes the prompt and those tokens anew, or gets
their keys and values (`adopt`), and goes on behind the last token.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass, field

from ..autoscale.shares import prompts_wait_s
from ..autoscale.step_model import MAX_CHUNK_TOKENS, Slo, StepModel
from ..fit.chunks import CHUNK_STEP_FRACTION


@dataclass(slots=True)
class Request:
    """One request and what became of it."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    bucket: int = 0
    first_token_s: float = math.inf
    end_s: float = math.inf
    done_tokens: int = 0
    """Of its context, computed where it is."""
    generated: int = 0
    """Tokens of its answer that other replicas have made."""
    work_s: float = 0.0
    refused: bool = False
    """The replica has no room for its context, ever."""

    @property
    def context_tokens(self) -> int:
        """What must be computed before its next token."""
        return self.prompt_tokens + self.generated

    @property
    def left_tokens(self) -> int:
        return self.output_tokens - self.generated

    def within(self, slo: Slo) -> bool:
        """Both targets are met."""
        if self.first_token_s - self.arrival_s > slo.ttft_s:
            return False
        steps = self.output_tokens - 1
        return steps <= 0 or (self.end_s - self.first_token_s) / steps <= slo.tpot_s


@dataclass(slots=True)
class Replica:
    """State of one engine; `now_s` is the end of its last step."""

    model: StepModel
    tpot_s: float
    """The promised time per token."""
    now_s: float = 0.0
    steps: int = 0
    batch: int = 0
    context: float = 0.0
    reserved: float = 0.0
    work_s: float = 0.0
    """Seconds of work of everything in flight: what the gateway compares."""
    prompt_s: float = 0.0
    """Seconds of work of the prompts that have no first token yet."""
    waiting: deque[Request] = field(default_factory=deque)
    prefill: deque[Request] = field(default_factory=deque)
    running: list[tuple[int, int, Request]] = field(default_factory=list)
    taken: int = 0
    ended: list[Request] = field(default_factory=list)
    """Finished since the caller last emptied it."""
    stopped: bool = False
    """It is dead, and takes what still comes to it without doing anything."""

    @classmethod
    def of(cls, model: StepModel, slo: Slo, now_s: float) -> Replica:
        return cls(model, slo.tpot_s, now_s)

    @property
    def in_flight(self) -> int:
        return len(self.waiting) + len(self.prefill) + self.batch

    @property
    def wait_s(self) -> float:
        """Seconds until the prompts that are here have their first tokens, while as much decodes as now."""
        model, decode_s = self.model, self.model.decode_s(self.batch, self.context)
        return prompts_wait_s(self.prompt_s, decode_s, model.d_s, MAX_CHUNK_TOKENS, self.tpot_s)

    def overdue(self, before_s: float) -> int:
        """Requests that arrived at or before then and are not begun."""
        count = 0
        for request in self.prefill:
            if request.arrival_s > before_s:
                return count
            count += request.done_tokens == 0
        for request in self.waiting:
            if request.arrival_s > before_s:
                break
            count += 1
        return count

    def take(self, request: Request, now_s: float) -> None:
        """Accept a request that arrives at `now_s`, or refuse it."""
        self.advance(now_s)
        if not self.stopped and request.prompt_tokens + request.output_tokens > self.model.kv_tokens:
            request.refused = True
            self.ended.append(request)
            return
        if not self.in_flight:
            self.now_s = max(self.now_s, now_s)
        prompt_s = self.model.prompt_s(request.context_tokens)
        self.prompt_s += prompt_s
        request.work_s = prompt_s + self._decoding_s(request)
        self.work_s += request.work_s
        self.waiting.append(request)
        self._admit()

    def _decoding_s(self, request: Request) -> float:
        context = request.context_tokens + request.left_tokens / 2
        return request.left_tokens * (self.model.b_s + self.model.c_s * context)

    def change(self, model: StepModel, now_s: float) -> None:
        """Its steps take other times from now on: its boards have another limit."""
        self.advance(now_s)
        self.model = model
        self.prompt_s = math.fsum(
            model.prompt_s(each.context_tokens) for each in (*self.waiting, *self.prefill)
        )

    def adopt(self, request: Request, now_s: float) -> None:
        """Go on with a stream of another replica, whose keys and values have come with it; it has room (`holds`)."""
        self.advance(now_s)
        if not self.in_flight:
            self.now_s = max(self.now_s, now_s)
        self.reserved += request.prompt_tokens + request.output_tokens
        request.work_s = self._decoding_s(request)
        self.work_s += request.work_s
        self._run(request, request.left_tokens)

    def holds(self, request: Request) -> bool:
        """Whether the whole context has room now, with nobody in line before it."""
        need = request.prompt_tokens + request.output_tokens
        return not self.waiting and self.reserved + need <= self.model.kv_tokens

    def give_up(self) -> list[Request]:
        """Everything in flight, behind its last token; the oldest first. Nothing is left here."""
        given = [*self.withdraw(), *self.prefill]
        self.prefill.clear()
        given += [self._taken_out(entry) for entry in self.running]
        self.running.clear()
        self.batch, self.context, self.reserved, self.work_s, self.prompt_s = 0, 0.0, 0.0, 0.0, 0.0
        for request in given:
            request.done_tokens = 0
        return sorted(given, key=lambda request: request.arrival_s)

    def withdraw(self) -> list[Request]:
        """The requests that it has not begun with, in their order; they are not here any more."""
        begun = [request for request in self.prefill if request.done_tokens > 0]
        given = [*(request for request in self.prefill if request.done_tokens == 0), *self.waiting]
        for request in self.prefill:
            if request.done_tokens == 0:
                self.reserved -= request.prompt_tokens + request.output_tokens
        for request in given:
            self.work_s -= request.work_s
            self.prompt_s -= self.model.prompt_s(request.context_tokens)
        self.prefill = deque(begun)
        self.waiting.clear()
        return given

    def hand_over(self, request: Request) -> None:
        """A running stream leaves with its keys and values."""
        entry = next(entry for entry in self.running if entry[2] is request)
        self.running.remove(entry)
        heapq.heapify(self.running)
        self._taken_out(entry)
        self.batch -= 1
        self.context -= request.context_tokens
        self.reserved -= request.prompt_tokens + request.output_tokens
        self.work_s -= request.work_s
        self._admit()

    def _taken_out(self, entry: tuple[int, int, Request]) -> Request:
        end_step, _, request = entry
        request.generated = request.output_tokens - (end_step - self.steps)
        return request

    def advance(self, until_s: float) -> None:
        """Run steps until the clock is at or past `until_s`, or nothing is left to do."""
        while self.now_s < until_s and (self.batch or self.prefill) and not self.stopped:
            if self.prefill:
                self._mixed_step()
            else:
                self._decode_steps(until_s)

    def _admit(self) -> None:
        while self.waiting:
            request = self.waiting[0]
            need = request.prompt_tokens + request.output_tokens
            if self.reserved + need > self.model.kv_tokens and self.reserved > 0:
                return
            self.reserved += need
            self.prefill.append(self.waiting.popleft())

    def _mixed_step(self) -> None:
        model, head = self.model, self.prefill[0]
        seconds = model.decode_s(self.batch, self.context)
        target_s = CHUNK_STEP_FRACTION * self.tpot_s
        chunk = model.chunk_tokens(self.batch, self.context, head.done_tokens, target_s)
        begun: list[Request] = []
        while self.prefill and chunk > 0:
            head = self.prefill[0]
            tokens = min(chunk, head.context_tokens - head.done_tokens)
            seconds += tokens * (model.d_s + model.e_s * (head.done_tokens + tokens / 2))
            head.done_tokens += tokens
            chunk -= tokens
            if head.done_tokens >= head.context_tokens:
                begun.append(self.prefill.popleft())
        self.now_s += seconds
        self._stepped(1)
        for request in begun:
            self._begin(request)

    def _begin(self, request: Request) -> None:
        request.first_token_s = min(request.first_token_s, self.now_s)
        self.prompt_s -= self.model.prompt_s(request.context_tokens)
        if request.left_tokens <= 1:
            self._end(request)
            self._admit()
            return
        self._run(request, request.left_tokens - 1)

    def _run(self, request: Request, steps: int) -> None:
        """Decode it in the next `steps` steps."""
        self.batch += 1
        self.context += request.prompt_tokens + request.output_tokens - steps
        self.taken += 1
        heapq.heappush(self.running, (self.steps + steps, self.taken, request))

    def _decode_steps(self, until_s: float) -> None:
        model = self.model
        first_s = model.decode_s(self.batch, self.context)
        growth = model.c_s * self.batch
        left = until_s - self.now_s
        # k·first + growth·k·(k-1)/2 >= left, by the root of the quadratic
        if growth > 0:
            half = first_s - growth / 2
            count = (math.sqrt(half * half + 2 * growth * left) - half) / growth
        else:
            count = left / first_s
        steps = max(1, min(math.ceil(count), self.running[0][0] - self.steps))
        self.now_s += steps * first_s + growth * steps * (steps - 1) / 2
        self._stepped(steps)

    def _stepped(self, steps: int) -> None:
        self.steps += steps
        self.context += steps * self.batch
        ended = False
        while self.running and self.running[0][0] <= self.steps:
            _, _, request = heapq.heappop(self.running)
            self.batch -= 1
            self.context -= request.prompt_tokens + request.output_tokens
            self._end(request)
            ended = True
        if ended:
            self._admit()

    def _end(self, request: Request) -> None:
        request.end_s = self.now_s
        self.reserved -= request.prompt_tokens + request.output_tokens
        self.work_s -= request.work_s
        self.ended.append(request)
