"""How a streamed answer survives its replica: what the gateway and our engine tell each other about one stream.

The gateway sends `StreamTerms` with every request, in a header that other model servers ignore. Our engine answers
with the stream's digest in a header, and ends each event that carries tokens with a side line, an SSE comment that
the gateway takes out before the event goes on to the client:

    data: {"id":...,"choices":[...]}
    :busbar INDEX ENDED PROMPT CACHED TOKEN,TOKEN,...

INDEX is the choice; ENDED is 1 with its finish reason, else 0; PROMPT and CACHED are the request's prompt tokens so
far counted and those of them that were in the prefix cache; then the ids of the tokens that this event covers. An
error event ends with `:busbar ! CAUSE` (`StreamEnd`), and behind `leaving` perhaps with the address of the replica that
has the stream's keys and values, where it goes on best. In /v1/responses the same tokens may make several events; the last
of them has the side line, and the client gets them together. Those that finish the answer it gets with the very last event, which
repeats what all others said. Tokens of which no event can tell yet come in a side line behind a bare colon.

When the replica dies, the gateway posts a `ResumeRequest` to another one. That one goes on behind the last token
that reached the gateway, with the same seed, so no token comes twice and none is missing. It refuses with 409 where
the digest, which covers the model's files and the prompt's tokens, is not its own. Only a caller with the replica's
bearer is believed; a replica without one refuses all of this.
"""

from enum import StrEnum
from typing import Any, Literal

from pydantic import Field, NonNegativeInt

from busbar.kube.contracts.wire import WireModel

TERMS_HEADER = "x-busbar-stream"
DIGEST_HEADER = "x-busbar-stream-digest"
RESUME_PATH = "/resume"
MOST_DESTINATIONS = 3
"""Replicas to which one stream may be handed over."""
SIDE_LINE = b"\n:busbar "
"""What stands between an event for the client and what it tells the gateway."""


class UsageShown(StrEnum):
    """On which chunks the client wants its usage."""

    NONE = "none"
    LAST = "last"
    EACH = "each"


class StreamEnd(StrEnum):
    """Why an engine ends a stream before its answer is whole."""

    FAILED = "failed"
    LEAVING = "leaving"
    """It shuts down, or the stream moves; the request is not to blame."""


class StreamTerms(WireModel):
    """What the gateway decides once for a request, so that every replica that works on it does the same."""

    seed: int
    """For a request without a seed of its own."""
    created: int
    """Unix time of the answer."""
    usage: UsageShown = UsageShown.NONE
    moves: bool = False
    """Whether the gateway reads an address behind `leaving`."""
    hand_over: list[str] = Field(default_factory=list, max_length=MOST_DESTINATIONS)
    """Addresses, best first: to one of them a replica of the role prefill hands the stream at its first token."""


class ResumedChoice(WireModel):
    """One choice of a stream that goes on elsewhere."""

    tokens: list[NonNegativeInt] = Field(default_factory=list, max_length=2**20)
    """Ids of all tokens that were passed on."""
    ended: bool = False
    """Its finish reason was passed on too: nothing more comes."""


class ResumeRequest(WireModel):
    """Body of `POST /resume`."""

    path: Literal["/v1/completions", "/v1/chat/completions", "/v1/responses"]
    request: dict[str, Any]
    """The body that was sent to the first replica."""
    digest: str
    cached_tokens: NonNegativeInt = 0
    events: NonNegativeInt = 0
    """Of /v1/responses: so many were passed on; the next one has this number."""
    choices: list[ResumedChoice]
