"""One generation request from parsed body to answer: encode, check, run, stream or collect.

Whatever way a request ends (done, error, the client gone), its streams are closed, and closing frees
the engine's blocks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from aiohttp import web

from busbar.workloads.serving.engine import Engine, Stream
from busbar.workloads.serving.errors import BadRequest, EngineFailed, RequestError
from busbar.workloads.serving.loader import Loaded
from busbar.workloads.serving.openai_request import ChatBody, CompletionBody, Wanted
from busbar.workloads.serving.openai_response import DONE, Answer, Choice, error_body, sse, usage
from busbar.workloads.serving.sampling import SamplingParams

COMPLETION_MAX_TOKENS = 16
LONG_TEXT = 20_000
"""Texts longer than this are tokenised in a worker thread, so that streams go on meanwhile."""


@dataclass
class Job:
    """One prompt of a request."""

    prompt: list[int]
    params: SamplingParams
    choice: Choice


async def prepare(body: CompletionBody | ChatBody, loaded: Loaded) -> list[Job]:
    """Tokens and final sampling parameters of every prompt; BadRequest when one cannot run."""
    tokenizer, core, wanted = loaded.core.tokenizer, loaded.core, body.wanted
    _check_tokens(wanted.params, loaded.arch.vocab_size)

    async def encode(text: str, special: bool) -> list[int]:
        if len(text) > 64 * core.max_model_len:
            raise BadRequest(
                f"the prompt of {len(text)} characters is too long for this model", param="prompt"
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise BadRequest(f"the text is not valid Unicode: {error.reason}", param="prompt") from error
        if len(text) > LONG_TEXT:
            coded = await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=special)
        else:
            coded = tokenizer.encode(text, add_special_tokens=special)
        ids: list[int] = coded.ids
        return ids

    prompts: list[list[int]] = []
    if isinstance(body, ChatBody):
        text = loaded.template.render(body.messages, **body.template_arguments)
        prompts.append(await encode(text, special=loaded.template.is_default))
    else:
        for prompt in body.prompts:
            tokens = list(prompt) if isinstance(prompt, tuple) else await encode(prompt, special=True)
            bad = next((t for t in tokens if t >= loaded.arch.vocab_size), None)
            if bad is not None:
                raise BadRequest(f"token {bad} is not in the model's vocabulary", param="prompt")
            prompts.append(tokens)
    jobs = []
    for index, ids in enumerate(prompts):
        room = core.max_model_len - len(ids)
        default = max(1, room if isinstance(body, ChatBody) else min(room, COMPLETION_MAX_TOKENS))
        params = replace(wanted.params, max_tokens=wanted.max_tokens or default)
        core.admissible(len(ids), params.max_tokens)
        jobs.append(Job(ids, params, Choice(index, len(ids))))
    return jobs


@asynccontextmanager
async def opened(engine: Engine, name: str, jobs: list[Job]) -> AsyncIterator[list[Stream]]:
    """The jobs' streams, closed at the end. `name` is unique in this process."""
    streams: list[Stream] = []
    try:
        for job in jobs:
            streams.append(engine.open(f"{name}.{job.choice.index}", job.prompt, job.params))
        yield streams
    finally:
        for stream in streams:
            engine.close(stream)


async def collect(streams: list[Stream], jobs: list[Job]) -> None:
    """Reads every stream to its end into its job's choice."""
    for stream, job in zip(streams, jobs, strict=True):
        while job.choice.finish is None:
            delta = await stream.next()
            if delta.error is not None:
                raise EngineFailed(delta.error)
            job.choice.take(delta)


async def send_stream(
    response: web.StreamResponse, streams: list[Stream], jobs: list[Job], answer: Answer, wanted: Wanted
) -> None:
    """Server-sent events until every choice has ended; an error in the middle is an event too."""
    if answer.chat:
        for job in jobs:
            await response.write(answer.first_chunk(job.choice))
    try:
        await _send_all(response, streams, jobs, answer, wanted)
    except RequestError as error:
        await response.write(sse(error_body(error)))
    else:
        if wanted.include_usage:
            await response.write(answer.usage_chunk([job.choice for job in jobs]))
    await response.write(DONE)


def envelope(body: CompletionBody | ChatBody, request_id: str, model: str, loaded: Loaded) -> Answer:
    chat = isinstance(body, ChatBody)
    tokenizer = loaded.core.tokenizer

    def token_text(token: int) -> str:
        text: str = tokenizer.decode([token], skip_special_tokens=False)
        return text

    return Answer(
        id=f"{'chatcmpl' if chat else 'cmpl'}-{request_id}",
        created=int(time.time()),
        model=model,
        chat=chat,
        token_text=token_text,
        wants_logprobs=body.wanted.params.logprobs is not None,
    )


async def _send_all(
    response: web.StreamResponse, streams: list[Stream], jobs: list[Job], answer: Answer, wanted: Wanted
) -> None:
    def so_far() -> dict[str, int] | None:
        return usage([job.choice for job in jobs]) if wanted.continuous_usage else None

    try:
        async with asyncio.TaskGroup() as group:
            for stream, job in zip(streams, jobs, strict=True):
                group.create_task(_send_choice(response, stream, job, answer, so_far))
    except BaseExceptionGroup as errors:
        raise _first(errors) from errors


async def _send_choice(
    response: web.StreamResponse,
    stream: Stream,
    job: Job,
    answer: Answer,
    so_far: Callable[[], dict[str, int] | None],
) -> None:
    while job.choice.finish is None:
        delta = await stream.next()
        if delta.error is not None:
            raise EngineFailed(delta.error)
        job.choice.take(delta)
        if job.choice.has_news:
            await response.write(answer.chunk(job.choice, so_far()))


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _check_tokens(params: SamplingParams, vocab_size: int) -> None:
    for token, _ in params.logit_bias:
        if token >= vocab_size:
            raise BadRequest(f"token {token} is not in the model's vocabulary", param="logit_bias")
    if any(token >= vocab_size for token in params.stop_token_ids):
        raise BadRequest("a stop token is not in the model's vocabulary", param="stop_token_ids")
