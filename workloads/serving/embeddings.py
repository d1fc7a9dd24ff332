"""/v1/embeddings: texts to vectors of length 1, from the hidden states of the served model.

The texts go through the ordinary queue, a few at a time, so that a long list neither fills the queue nor delays
streams more than the prompts of other requests do.
"""

from __future__ import annotations

import asyncio
import base64
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from busbar.kube.documents import shown
from busbar.workloads.serving.engine_link import Asked, ChosenAdapter, EngineLink, Prompt
from busbar.workloads.serving.errors import BadRequest
from busbar.workloads.serving.fairness import Owner
from busbar.workloads.serving.generation import encode, first_error, sound
from busbar.workloads.serving.openai_fields import known_fields
from busbar.workloads.serving.openai_request import parse_prompts, parse_salt
from busbar.workloads.serving.sequence import Pooling
from busbar.workloads.serving.text_model import TextModel

PATH = "/v1/embeddings"
MAX_INPUTS = 2048
MAX_TOKENS = 300_000
"""Of all texts of a request; both are OpenAI's limits."""
AT_ONCE = 16
"""Texts of a request that are in the engine at the same time."""
FIELDS = frozenset({"model", "input", "encoding_format", "dimensions", "pooling", "cache_salt"})


@dataclass(frozen=True)
class EmbeddingBody:
    model: str
    inputs: tuple[str | tuple[int, ...], ...]
    base64: bool
    dimensions: int | None
    """The first so many numbers of each vector, made length 1 again; None: all."""
    pooling: Pooling
    cache_salt: str


def parse_embeddings(body: object) -> EmbeddingBody:
    """Raises BadRequest naming the field."""
    fields = known_fields(body, FIELDS)
    model, form = fields.get("model"), fields.get("encoding_format", "float")
    if not isinstance(model, str) or not model:
        raise BadRequest("model must name a model; GET /v1/models lists them", param="model")
    if form not in ("float", "base64"):
        raise BadRequest(
            f"encoding_format must be float or base64, not {shown(form)}", param="encoding_format"
        )
    dimensions = fields.get("dimensions")
    if dimensions is not None and (
        isinstance(dimensions, bool) or not isinstance(dimensions, int) or dimensions < 1
    ):
        raise BadRequest(
            f"dimensions must be a whole number from 1, not {shown(dimensions)}", param="dimensions"
        )
    pooling = fields.get("pooling", "last")
    if not isinstance(pooling, str) or pooling not in list(Pooling):
        raise BadRequest(f"pooling must be last or mean, not {shown(pooling)}", param="pooling")
    inputs = parse_prompts(fields.get("input"), "input", MAX_INPUTS)
    return EmbeddingBody(model, inputs, form == "base64", dimensions, Pooling(pooling), parse_salt(fields))


async def tokens_of(body: EmbeddingBody, model: TextModel, tenant: str = "") -> list[list[int]]:
    """The tokens of each text. Raises BadRequest for one that is empty or too long."""
    width, most = model.hidden, model.limits.limit(tenant)
    if body.dimensions is not None and body.dimensions > width:
        raise BadRequest(
            f"dimensions is {body.dimensions}; this model's vectors have {width}", param="dimensions"
        )
    found: list[list[int]] = []
    total = 0
    for place, text in enumerate(body.inputs):
        where = "input" if len(body.inputs) == 1 else f"input[{place}]"
        ids = list(text) if isinstance(text, tuple) else await encode(model, text, special=True, param=where)
        if not ids or len(ids) > most:
            raise BadRequest(f"{where} has {len(ids)} tokens; 1 to {most} are served", param=where)
        bad = next((token for token in ids if token >= model.width), None)
        if bad is not None:
            raise BadRequest(f"{where}: token {bad} is not in the model's vocabulary", param=where)
        total += len(ids)
        if total > MAX_TOKENS:
            raise BadRequest(f"the texts have more than {MAX_TOKENS} tokens; send fewer", param="input")
        found.append(ids)
        await asyncio.sleep(0)  # other requests' turn
    return found


async def vectors_of(
    link: EngineLink,
    name: str,
    texts: Sequence[list[int]],
    body: EmbeddingBody,
    owner: Owner,
    adapter: ChosenAdapter | None,
) -> list[tuple[float, ...]]:
    """The engine's vector of each text. `name` is unique in this process."""
    found: list[tuple[float, ...]] = [()] * len(texts)
    places = asyncio.Semaphore(AT_ONCE)

    async def one(index: int) -> None:
        async with places:
            prompt = Prompt(texts[index], pooling=body.pooling)
            asked = Asked(f"{name}.{index}", [prompt], owner, body.cache_salt, adapter)
            async with link.opened(asked) as (stream,):
                found[index] = sound(await stream.next()).vector or ()

    try:
        async with asyncio.TaskGroup() as group:
            for index in range(len(texts)):
                group.create_task(one(index))
    except BaseExceptionGroup as errors:
        raise first_error(errors) from errors
    return found


def answer(
    body: EmbeddingBody, texts: Sequence[list[int]], vectors: Sequence[tuple[float, ...]]
) -> Mapping[str, Any]:
    count = sum(map(len, texts))
    data = []
    for index, vector in enumerate(vectors):
        numbers = _unit(vector[: body.dimensions])
        value = _base64(numbers) if body.base64 else numbers
        data.append({"object": "embedding", "index": index, "embedding": value})
    return {
        "object": "list",
        "data": data,
        "model": body.model,
        "usage": {"prompt_tokens": count, "total_tokens": count},
    }


def _unit(vector: Sequence[float]) -> list[float]:
    length = math.hypot(*vector)
    return [number / length for number in vector] if length else list(vector)


def _base64(numbers: Sequence[float]) -> str:
    """Little-endian float32, as OpenAI's clients read it."""
    return base64.b64encode(struct.pack(f"<{len(numbers)}f", *numbers)).decode()
