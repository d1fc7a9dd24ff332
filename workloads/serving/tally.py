"""Counts tokens and requests in the metrics, each token once its reader wants it.

A reader that may end its answer by itself (at a stop string) hears of a token one step late, so tokens may come that nobody
wants. Such a reader confirms what it has taken, and no other token is counted. Requests of other readers count at once.
"""

from __future__ import annotations

from busbar.workloads.serving.live import Live
from busbar.workloads.serving.metrics import Metrics


class Tally:
    """Of one engine core."""

    def __init__(self, metrics: Metrics) -> None:
        self.tokens_total = 0
        self._metrics = metrics
        self._unread: dict[str, Live] = {}
        """Ended, and not read to the end by readers that confirm."""

    def token(self, live: Live, now: float) -> None:
        """A request has one more token."""
        metrics = self._metrics
        if not live.confirms:
            self._count(live, live.sampled)
        if live.first_s is None:
            live.first_s = now
            if not live.sequence.resumed:
                metrics.prompt_tokens.inc(live.sequence.prompt_len)
                metrics.ttft.observe(now - live.arrived_s)
        elif live.last_s is not None:
            metrics.itl.observe(now - live.last_s)
        live.last_s = now

    def ended(self, live: Live, finish: str, now: float) -> None:
        """A request has ended."""
        live.finish, live.ended_s = finish, now
        if live.confirms and finish != "abort":
            self._unread[live.id] = live
        else:
            self._settle(live, live.sampled)

    def read(self, request_id: str, live: Live | None, taken: int, finish: str | None) -> None:
        """As `EngineCore.read`; `live` is the request while it has not ended."""
        ended = self._unread.get(request_id)
        if finish is None:
            found = ended or live
            if found is not None:
                self._count(found, taken)
        elif ended is not None:
            del self._unread[request_id]
            if finish == "abort":
                taken = ended.sampled
            else:
                ended.finish = finish
            self._settle(ended, taken)

    def close(self) -> None:
        """Nobody reads on."""
        for live in self._unread.values():
            self._settle(live, live.sampled)
        self._unread.clear()

    def _settle(self, live: Live, taken: int) -> None:
        assert live.finish is not None
        self._count(live, taken)
        self._metrics.finished(live.finish)
        if live.finish != "abort":
            live.observe(self._metrics, live.ended_s)

    def _count(self, live: Live, sampled: int) -> None:
        """Completion tokens of a request, up to so many."""
        more = sampled - live.counted
        if more <= 0:
            return
        live.counted = sampled
        self.tokens_total += more
        self._metrics.generation_tokens.inc(more)
        if live.sequence.adapter is not None:
            self._metrics.adapter_tokens(live.sequence.adapter.name, more)
