"""What two replicas tell each other when a stream moves from one to the other with its keys and values.

    source                                    destination
    POST /migrate/begin   model, layout, tokens  →  a ticket, and how many blocks are there already
    POST /migrate/blocks  full blocks            →  written where nobody computes        (stage after stage, decoding on)
    POST /migrate/commit  the last blocks        →  named, so that whoever goes on finds them
    POST /migrate/abort                          →  forgotten, where the stream stays, or moves without its blocks
    the stream ends with `leaving` and the destination's address; the gateway posts /resume there

All of it needs the bearer for inference; `POST /migrate`, which makes a replica do this, that for commands. A replica of the
role prefill does it by itself: it begins when it begins to compute a prompt, and sends the prompt's blocks while it
computes the rest. Until the stream ends the source can go on alone, and afterwards any replica
can: a destination that lost what it got computes it anew. So either side may die at any message, a ticket that nobody
uses expires, and no token is computed for a client by two replicas.

Bodies with blocks are a header in JSON behind its length in four bytes, then the blocks (`KvCache.read`).
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from pydantic import Field, NonNegativeInt

from busbar.kube.contracts.wire import WireModel
from busbar.workloads.serving.errors import BadRequest
from busbar.workloads.serving.loader import Loaded

LAST_STAGE_BLOCKS = 4
"""Blocks that are copied while the stream stands still, at most, for each of its answers; at its first token PART_BLOCKS,
because the next step of a replica that computes prompts takes longer than sending these."""
PART_BLOCKS = 16
"""Blocks of one answer in one message, at most."""
HEADER_LIMIT_BYTES = 16 * 2**20
MOST_TOKENS = 2**20


class SequenceHead(WireModel):
    """One answer of a stream."""

    tokens: list[NonNegativeInt] = Field(min_length=1, max_length=MOST_TOKENS)
    """Prompt, and what was sampled so far."""


class Begin(WireModel):
    """Body of `POST /migrate/begin`."""

    sender: str
    """The source's name for its process."""
    identity: str
    """Of the model's files."""
    layout: str
    """Of a block and its content."""
    tenant: str = ""
    cache_salt: str = ""
    adapter: str = ""
    adapter_digest: str = ""
    sequences: list[SequenceHead] = Field(min_length=1, max_length=256)


class Begun(WireModel):
    """Its answer."""

    ticket: str = ""
    """Empty: blocks of the source are of no use here, and the stream goes on by computing them anew."""
    have: list[int] = Field(default_factory=list)
    """Of each sequence the first blocks that need not be sent."""
    token_seconds: float | None = None
    """What a prompt token costs here."""


class Blocks(WireModel):
    """Header of `POST /migrate/blocks`: full blocks of one sequence."""

    ticket: str
    sequence: NonNegativeInt
    first: NonNegativeInt
    count: NonNegativeInt = Field(le=PART_BLOCKS)


class LastBlocks(WireModel):
    """Of one sequence: all that was not sent yet."""

    tokens: list[NonNegativeInt] = Field(min_length=1, max_length=MOST_TOKENS)
    first: NonNegativeInt
    count: NonNegativeInt = Field(le=PART_BLOCKS)


class Abort(WireModel):
    """Body of `POST /migrate/abort`."""

    ticket: str


class Commit(WireModel):
    """Header of `POST /migrate/commit`: the blocks of all sequences follow, one after the other."""

    ticket: str
    sequences: list[LastBlocks]


class Done(WireModel):
    """What has become of one stream, in the answer of `POST /migrate`."""

    request: str
    outcome: str
    """copied, recomputed (it moved without its blocks) or stayed."""
    why: str = ""
    stages: int = 0
    blocks: int = 0
    """Sent in all."""
    last_blocks: int = 0
    stall_seconds: float = 0.0
    """For which the source held it: last stage and commit."""


def layout_of(loaded: Loaded) -> str:
    """Equal for two replicas whose blocks mean the same."""
    cache, decoder = loaded.core.runner.cache, loaded.core.runner.decoder
    shape = cache.shape
    text = f"{shape.layers}/{shape.kv_heads}/{shape.head_dim}/{shape.block_tokens}/{shape.stored}"
    if decoder.stored_key_scale is None:
        return text
    scale = decoder.stored_key_scale.float().cpu().contiguous()
    return f"{text}/{hashlib.blake2b(scale.numpy().tobytes(), digest_size=8).hexdigest()}"


def framed(header: WireModel, data: bytes | bytearray = b"") -> bytes:
    """A body with blocks."""
    text = json.dumps(header.to_wire(), separators=(",", ":")).encode()
    return len(text).to_bytes(4, "big") + text + data


def header_of(text: bytes) -> Any:
    """Raises BadRequest."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the header is not JSON: {error}") from error
