"""One generation request from parsed body to answer: encode, check, run, stream or collect.

Everything here runs in the front: what the engine gets is tokens (`engine_link.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from aiohttp import web

from busbar.kube.contracts.streams import StreamTerms, UsageShown
from busbar.workloads.serving.answer_text import AnswerText
from busbar.workloads.serving.calling import reader_of, render, with_tools
from busbar.workloads.serving.delta import Delta
from busbar.workloads.serving.engine_link import EngineLink, Prompt, Stream
from busbar.workloads.serving.errors import BadRequest, EngineFailed, EngineLeaving, RequestError
from busbar.workloads.serving.openai_request import (
    MAX_PROMPTS,
    ChatBody,
    CompletionBody,
    TokenizeBody,
    Wanted,
)
from busbar.workloads.serving.openai_response import Answer, Choice
from busbar.workloads.serving.responses_answer import ResponsesAnswer
from busbar.workloads.serving.responses_request import ResponsesBody
from busbar.workloads.serving.sampling import SamplingParams
from busbar.workloads.serving.text_model import TextModel

COMPLETION_MAX_TOKENS = 16
MOST_PROMPT_LOGPROBS = 100_000
"""Numbers in an answer; they have about 80 bytes each."""
LONG_TEXT = 20_000
"""Texts longer than this are tokenised in a worker thread, so that streams go on meanwhile."""


@dataclass
class Job:
    """One prompt of a request."""

    prompt: list[int]
    params: SamplingParams
    choice: Choice
    text: AnswerText
    had: list[int] | None = None
    """Of one that began on another replica the tokens so far."""

    @property
    def may_end_early(self) -> bool:
        """Whether what its tokens say may end it."""
        return bool(self.params.stop) or self.choice.reader is not None

    def take(self, delta: Delta) -> None:
        """Raises what an engine that failed, or leaves, says instead of a token."""
        self.choice.take(delta, *self.text.take(sound(delta)))


async def prepare(
    body: CompletionBody | ChatBody,
    request_id: str,
    model: TextModel,
    terms: StreamTerms | None = None,
    tenant: str = "",
    *,
    resumed: bool = False,
) -> list[Job]:
    """Tokens and final sampling parameters of every prompt; BadRequest when one cannot run. A `resumed` one was taken by
    another replica, maybe under other quotas of the KV cache."""
    wanted = body.wanted
    _check_tokens(wanted.params, model.width)
    if wanted.allowed_token_ids is not None or wanted.bad_words:
        asked = await asyncio.to_thread(
            model.rules.constrained, wanted.params, wanted.allowed_token_ids, wanted.bad_words
        )
        wanted = replace(wanted, params=asked)
    if wanted.grammar is not None:
        await model.check_grammar(wanted.grammar)
        wanted = replace(wanted, params=replace(wanted.params, grammar=wanted.grammar))

    prompts: list[list[int]] = []
    if isinstance(body, ChatBody):
        text = render(body, model)
        if body.tools is not None:
            wanted = replace(wanted, params=await with_tools(wanted.params, body.tools, model))
        prompts.append(await encode(model, text, special=model.template.is_default))
    else:
        for prompt in body.prompts:
            tokens = list(prompt) if isinstance(prompt, tuple) else await encode(model, prompt, special=True)
            bad = next((t for t in tokens if t >= model.width), None)
            if bad is not None:
                raise BadRequest(f"token {bad} is not in the model's vocabulary", param="prompt")
            prompts.append(tokens)
    if wanted.n * len(prompts) > MAX_PROMPTS:
        raise BadRequest(f"n times the prompts must be at most {MAX_PROMPTS}", param="n")
    _check_prompt_logprobs(wanted, prompts)
    jobs: list[Job] = []
    for ids in prompts:
        room = model.limits.limit(tenant) - len(ids)
        default = max(1, room if isinstance(body, ChatBody) else min(room, COMPLETION_MAX_TOKENS))
        params = replace(wanted.params, max_tokens=wanted.max_tokens or default)
        model.limits.check(len(ids), params.max_tokens, "" if resumed else tenant)
        for number in range(wanted.n):
            # A prompt counts once, and equal seeds would give n times the same answer.
            seed = None if terms is None else terms.seed + len(jobs)
            if params.seed is not None:
                seed = params.seed + number
            choice = Choice(len(jobs), 0 if number else len(ids), counts_prompt=not number)
            if isinstance(body, ChatBody) and body.tools is not None:
                choice.reader = reader_of(body.tools, model, f"{request_id}/{choice.index}")
            told = None if number else params.prompt_logprobs  # of a prompt once
            own = replace(params, seed=seed, prompt_logprobs=told)
            jobs.append(Job(ids, own, choice, model.text_of(own)))
    return jobs


async def encode(model: TextModel, text: str, special: bool, param: str = "prompt") -> list[int]:
    """Tokens of a text; BadRequest when it is no text or far too long."""
    if len(text) > 64 * model.limits.model:
        raise BadRequest(f"the {param} of {len(text)} characters is too long for this model", param=param)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(f"the text is not valid Unicode: {error.reason}", param=param) from error
    tokenizer = model.tokenizer
    if len(text) > LONG_TEXT:
        coded = await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=special)
    else:
        coded = tokenizer.encode(text, add_special_tokens=special)
    ids: list[int] = coded.ids
    return ids


async def encode_prompt(body: TokenizeBody, model: TextModel) -> list[int]:
    """The tokens that a request with this prompt, or these messages, would begin with."""
    if body.prompt is not None:
        return await encode(model, body.prompt, special=body.special is not False)
    text = render(body, model)
    special = model.template.is_default if body.special is None else body.special
    return await encode(model, text, special=special)


def prompts_of(jobs: list[Job]) -> list[Prompt]:
    """What is asked of the engine: of the jobs that have not ended."""
    return [
        Prompt(job.prompt, job.params, job.had, job.may_end_early)
        for job in jobs
        if job.choice.finish is None
    ]


async def collect(link: EngineLink, streams: list[Stream], jobs: list[Job]) -> None:
    """Reads every stream into its job's choice until that has ended."""
    for stream, job in zip(streams, jobs, strict=True):
        while job.choice.finish is None:
            await _read(link, stream, job)


async def send_stream(
    response: web.StreamResponse, link: EngineLink, streams: list[Stream], jobs: list[Job], answer: Answer
) -> None:
    """Server-sent events until every choice has ended; an error in the middle is an event too.

    `streams` are those of the jobs that have not ended (on another replica).
    """
    choices = [job.choice for job in jobs]
    running = [job for job in jobs if job.choice.finish is None]
    opening = answer.opening(choices)
    if opening:
        await response.write(opening)
    try:
        await _send_all(response, link, streams, running, choices, answer)
    except RequestError as error:
        if isinstance(error, EngineLeaving) and error.moved_to:
            # Tokens whose text is held back: the gateway needs them, so that the stream goes on at the right place.
            for choice in choices:
                if choice.tokens and choice.finish is None:
                    await response.write(answer.chunk(choice, choices))
        await response.write(answer.failed(error, choices))
    else:
        await response.write(answer.ending(choices))


def envelope(
    body: CompletionBody | ChatBody,
    request_id: str,
    name: str,
    model: TextModel,
    terms: StreamTerms | None = None,
) -> Answer:
    """The answer's form. With `terms` the gateway says how the client wants its usage."""
    chat = isinstance(body, ChatBody)
    tokenizer = model.tokenizer

    def token_text(token: int) -> str:
        text: str = tokenizer.decode([token], skip_special_tokens=False)
        return text

    kind: Callable[..., Answer] = Answer
    prefix = "chatcmpl" if chat else "cmpl"
    if isinstance(body, ResponsesBody):
        kind, prefix = partial(ResponsesAnswer, asked=body), "resp"
    return kind(
        id=f"{prefix}-{request_id}",
        created=int(time.time()) if terms is None else terms.created,
        model=name,
        chat=chat,
        token_text=token_text,
        token_bytes=model.vocabulary.bytes_of,
        wants_logprobs=body.wanted.params.logprobs is not None,
        usage_shown=_usage_shown(body.wanted) if terms is None else terms.usage,
        for_gateway=terms is not None,
    )


def _usage_shown(wanted: Wanted) -> UsageShown:
    if not wanted.include_usage:
        return UsageShown.NONE
    return UsageShown.EACH if wanted.continuous_usage else UsageShown.LAST


async def _send_all(
    response: web.StreamResponse,
    link: EngineLink,
    streams: list[Stream],
    running: list[Job],
    choices: list[Choice],
    answer: Answer,
) -> None:
    try:
        async with asyncio.TaskGroup() as group:
            for stream, job in zip(streams, running, strict=True):
                group.create_task(_send_choice(response, link, stream, job, choices, answer))
    except BaseExceptionGroup as errors:
        raise first_error(errors) from errors


async def _send_choice(
    response: web.StreamResponse,
    link: EngineLink,
    stream: Stream,
    job: Job,
    choices: list[Choice],
    answer: Answer,
) -> None:
    choice = job.choice
    while choice.finish is None:
        await _read(link, stream, job)
        if choice.has_news:
            await response.write(answer.chunk(choice, choices))


async def _read(link: EngineLink, stream: Stream, job: Job) -> None:
    """The next tokens of a job, which goes on in the engine where its choice wants no more of it."""
    job.take(await stream.next())
    if stream.confirms:
        finish = job.choice.finish
        told = "stop" if finish == "tool_calls" else finish
        link.confirm(stream, job.choice.completion_tokens, told)


def sound(delta: Delta) -> Delta:
    """Raises what an engine that failed, or leaves, says instead of a token."""
    if delta.error is not None and delta.refused:
        raise BadRequest(delta.error)
    if delta.error is not None:
        raise EngineLeaving(delta.error, delta.moved_to) if delta.leaving else EngineFailed(delta.error)
    return delta


def first_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _check_prompt_logprobs(wanted: Wanted, prompts: list[list[int]]) -> None:
    count = wanted.params.prompt_logprobs
    if count is None:
        return
    numbers = wanted.n * (count + 1) * sum(map(len, prompts))
    if numbers > MOST_PROMPT_LOGPROBS:
        raise BadRequest(
            f"prompt_logprobs {count} would be {numbers} numbers for these prompts (n times tokens times one more "
            f"than prompt_logprobs); at most {MOST_PROMPT_LOGPROBS} are served. Ask for fewer, or shorten the prompt",
            param="prompt_logprobs",
        )


def _check_tokens(params: SamplingParams, vocab_size: int) -> None:
    for token, _ in params.logit_bias:
        if token >= vocab_size:
            raise BadRequest(f"token {token} is not in the model's vocabulary", param="logit_bias")
    if any(token >= vocab_size for token in params.stop_token_ids):
        raise BadRequest("a stop token is not in the model's vocabulary", param="stop_token_ids")
