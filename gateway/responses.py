"""Streams of /v1/responses: named events, of which the last holds the usage.

The client gets every event as the engine wrote it. Nothing is asked of the engine for counting: our own tells its
tokens in side lines as in the other routes, and of others each delta counts as one token until the last event.
Events of our engine are kept back until the side line behind them has come, and those that finish the answer until its last
event has: so what a client has is always what some tokens say, and another replica can go on behind it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from busbar.gateway.errors import BadRequest, BadUpstream
from busbar.gateway.sse import DONE, Meter, Wish, payload
from busbar.kube.contracts.streams import SIDE_LINE

PATH = "/v1/responses"
STORED = {
    "store": "leave it out, or make it false",
    "background": "leave it out, or make it false: an answer comes in the call that asks for it",
    "previous_response_id": "send the earlier items again in `input`",
    "conversation": "send the earlier items again in `input`",
}
"""Fields that need a store, and what to do instead. Whatever one replica stored, another would not know, and the tokens
of an answer that nobody waits for would not be counted."""
_ENDS = ("response.completed", "response.incomplete")
_FAILURES = ("response.failed", "error")
_OPENING = b"event: response.created\n", b"event: response.in_progress\n"
_LAST = tuple(f"event: {kind}\n".encode() for kind in (*_ENDS, *_FAILURES))
_NOTHING = b":"


def check(document: Mapping[str, object]) -> None:
    """Raises BadRequest for a request that no replica may get."""
    for name, instead in STORED.items():
        if document.get(name) not in (None, False):
            raise BadRequest(f"`{name}` is not served: nothing is stored here; {instead}.", param=name)


class ResponsesMeter(Meter):
    """Counts the tokens of one stream of this route."""

    def __init__(self, tokens_limit: int = 0) -> None:
        super().__init__(Wish(), tokens_limit)
        self._held: list[bytes] = []
        self._finish: bytes | None = None
        """The side line of the held events that finish the answer."""

    def event(self, event: bytes) -> bytes | None:
        """The event as the client gets it (with its blank line), None when it is not for the client."""
        return self._in_groups(event) if self.holds else self._alone(event)

    def go_on(self) -> None:
        """Forget what was held back of a replica that ended: another one says it again."""
        self._held, self._finish = [], None

    def _in_groups(self, event: bytes) -> bytes | None:
        text, mark, side = event.rpartition(SIDE_LINE)
        if not mark:
            self._held.append(event + b"\n\n")
            if event.startswith(_OPENING):
                return self._pass_on()
            if event.startswith(_LAST):
                if self._finish is not None:
                    self._sided(b"", self._finish)
                self._look(payload(event) or b"")
                return self._pass_on()
            return None
        if not side.startswith(b"! ") and text != _NOTHING:
            self._held.append(text + b"\n\n")
        if side.split(b" ")[1:2] == [b"1"]:
            self._finish = side
            return None
        self._sided(b"", side)
        return self._pass_on() if self.cut is None else None

    def _pass_on(self) -> bytes | None:
        shown, self._held, self._finish = self._held, [], None
        self.events += len(shown)
        return b"".join(shown) or None

    def _alone(self, event: bytes) -> bytes | None:
        text, mark, side = event.rpartition(SIDE_LINE)
        if mark:
            shown = self._sided(text, side)
            self.events += shown is not None
            return shown
        data = payload(event)
        if data is None:
            return event + b"\n\n"
        if data.strip() == DONE:
            return None  # the other routes end with it; here it would hide that the last event is missing
        self.events += 1
        self._look(data)
        return event + b"\n\n"

    def broken(self, document: dict[str, dict[str, str | None]]) -> bytes:
        """This route's own error event, numbered behind what was passed on."""
        told = {name: document["error"][name] for name in ("code", "message", "param")}
        error = {"type": "error", "sequence_number": self.events, **told}
        text = json.dumps(error, separators=(",", ":"), ensure_ascii=False)
        return f"event: error\ndata: {text}\n\n".encode()

    def _look(self, data: bytes) -> None:
        try:
            document = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise BadUpstream("The model server sent an event that is not JSON.") from error
        if not isinstance(document, dict):
            raise BadUpstream("The model server sent an event that is not a JSON object.")
        kind, response = document.get("type"), document.get("response")
        if isinstance(kind, str) and kind.endswith(".delta"):
            self.begun = True
            self.completion_tokens += not self._told
        self.failed = kind in _FAILURES or (kind is None and "error" in document)
        self.done = kind in _ENDS
        if not self.failed and not self.done:
            return
        self.begun = True
        if isinstance(response, dict):
            self._count_usage(response.get("usage"))
