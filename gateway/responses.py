"""Streams of /v1/responses: named events, of which the last holds the usage.

The client gets every event as the engine wrote it. Nothing is asked of the engine for counting: our own tells its
tokens in side lines as in the other routes, and of others each delta counts as one token until the last event.
Such a stream is not resumed on another replica, because its later events repeat what the earlier ones said.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from busbar.gateway.errors import BadRequest, BadUpstream
from busbar.gateway.sse import DONE, Meter, Wish, payload, tokens
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


def check(document: Mapping[str, object]) -> None:
    """Raises BadRequest for a request that no replica may get."""
    for name, instead in STORED.items():
        if document.get(name) not in (None, False):
            raise BadRequest(f"`{name}` is not served: nothing is stored here; {instead}.", param=name)


class ResponsesMeter(Meter):
    """Counts the tokens of one stream of this route."""

    def __init__(self) -> None:
        super().__init__(Wish())
        self._events = 0

    def event(self, event: bytes) -> bytes | None:
        """The event as the client gets it (with its blank line), None when it is not for the client."""
        text, mark, side = event.rpartition(SIDE_LINE)
        if mark:
            shown = self._sided(text, side)
            self._events += shown is not None
            return shown
        data = payload(event)
        if data is None:
            return event + b"\n\n"
        if data.strip() == DONE:
            return None  # the other routes end with it; here it would hide that the last event is missing
        self._events += 1
        self._look(data)
        return event + b"\n\n"

    def broken(self, document: dict[str, dict[str, str | None]]) -> bytes:
        """This route's own error event, numbered behind what was passed on."""
        told = {name: document["error"][name] for name in ("code", "message", "param")}
        error = {"type": "error", "sequence_number": self._events, **told}
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
        counted = tokens(response.get("usage")) if isinstance(response, dict) else None
        if counted is not None:
            self.prompt_tokens, self.completion_tokens, self.cached_tokens = counted
