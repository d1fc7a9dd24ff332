"""The front of a replica: OpenAI routes, probes and drain, on one aiohttp loop in a process of its own.

    GET  /health /ready                                                        open to all
    GET  /v1/models /v1/models/{id}                                            the bearer for inference
    POST /v1/completions /v1/chat/completions /v1/responses /v1/embeddings     the same
    POST /tokenize /detokenize /resume                                         the same
    GET  /status /metrics /load /version /is_sleeping                          the bearer for reading
    POST /drain /sleep /wake_up /v1/load_lora_adapter /v1/unload_lora_adapter  the bearer for commands
    POST /kv_shares /adapters                                                  the same
    POST /migrate /migrate/begin /migrate/blocks /migrate/commit               the same

`busbar serve` takes one bearer for all of them, or none: then all are open. What is about the engine, and not about text, is
passed on to its process (`passing.py`, `engine_routes.py`).

A drain refuses new work with 503 and Retry-After and lets running requests end; /ready says 503 from
its first moment while /health stays well.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

from aiohttp import web

from busbar.kube.contracts.bearers import is_allowed
from busbar.kube.contracts.streams import (
    DIGEST_HEADER,
    RESUME_PATH,
    TERMS_HEADER,
    StreamTerms,
)
from busbar.kube.contracts.workload import DrainReport, ReplicaRole
from busbar.workloads.serving import embeddings, responses_request
from busbar.workloads.serving.admission import Standing, refusal_of
from busbar.workloads.serving.engine import EngineState, unavailable
from busbar.workloads.serving.engine_link import Asked as AskedOfEngine
from busbar.workloads.serving.engine_link import ChosenAdapter, EngineLink
from busbar.workloads.serving.errors import BadRequest, Busy, EngineFailed, RequestError, Unauthorized
from busbar.workloads.serving.fairness import NOBODY, Owner
from busbar.workloads.serving.generation import (
    Job,
    collect,
    encode_prompt,
    envelope,
    prepare,
    prompts_of,
    send_stream,
)
from busbar.workloads.serving.http_request import (
    REQUEST_ID_HEADER,
    answer_to,
    owner_of,
    read_json,
    refusal,
    request_id_of,
)
from busbar.workloads.serving.migrate_out import peers_in
from busbar.workloads.serving.model_names import ModelNames
from busbar.workloads.serving.openai_request import (
    PARSERS,
    parse_detokenize,
    parse_tokenize,
)
from busbar.workloads.serving.openai_response import Answer, Choice
from busbar.workloads.serving.passing import EnginePassage
from busbar.workloads.serving.resume import Asked, parse_resume, read_terms, stream_digest, take_over
from busbar.workloads.serving.settings import ServerSettings
from busbar.workloads.serving.text_model import TextModel

log = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
VERSION = "0.1.0"
STREAMING = web.RequestKey("streaming", bool)
"""The answer to this request has begun."""


class Server:
    """Routes and state of one replica."""

    def __init__(self, settings: ServerSettings, link: EngineLink, passage: EnginePassage) -> None:
        self.settings = settings
        self.link = link
        self.model: TextModel | None = None
        """Until it is read nothing is taken."""
        self.draining = False
        self._at_drain = 0
        """Requests when the drain began."""
        self.heard = asyncio.Event()
        """Set while whoever reads `/status` has read the last of it, or nobody does."""
        self.heard.set()
        self.quiet = asyncio.Event()
        """Set while no generation request is in a handler."""
        self.quiet.set()
        self._generating = 0
        self._numbers = itertools.count()
        self._names = ModelNames(settings, link)
        self._passage = passage

    def application(self) -> web.Application:
        app = web.Application(client_max_size=self.settings.max_body_bytes, middlewares=[self._guard])
        app.add_routes(
            [
                web.get("/health", self.health),
                web.get("/ready", self.ready),
                web.get("/status", self.status),
                web.get("/version", self.version),
                web.get("/load", self.load),
                web.post("/drain", self.drain),
                web.post("/sleep", self.sleep),
                *(web.post(path, self.generate) for path in PARSERS),
                web.post(responses_request.PATH, self.respond),
                web.post(embeddings.PATH, self.embed),
                web.post(RESUME_PATH, self.resume),
                web.post("/tokenize", self.tokenize),
                web.post("/detokenize", self.detokenize),
                *self._passage.routes(),
            ]
        )
        app.on_cleanup.append(self._passage.close)
        return app

    def start_drain(self) -> None:
        """From now on new requests are refused. Cannot be undone."""
        if not self.draining:
            self.draining = True
            self._at_drain = self._generating
            self.link.tell("drain")
            log.info("draining, %d requests are running", self._generating)

    # -- handlers -----------------------------------------------------------------------------

    async def health(self, request: web.Request) -> web.Response:
        dead = self.link.stalled or self.link.state in (EngineState.FAILED, EngineState.STOPPED)
        return web.json_response({"state": self._state_word}, status=503 if dead else 200)

    async def ready(self, request: web.Request) -> web.Response:
        ready = self._is_ready
        return web.json_response(
            {"ready": ready, "draining": self.draining, "state": self._state_word},
            status=200 if ready else 503,
        )

    async def status(self, request: web.Request) -> web.Response:
        told = await self.serving_status()
        over = told["drain"] is not None and not (self._generating or told["running"] or told["waiting"])
        (self.heard.set if over else self.heard.clear)()
        return web.json_response(told)

    async def has_moved_streams(self) -> bool:
        """Whether others have taken streams since the drain began."""
        told = None if self.link.lost.is_set() else await self.link.call("status")
        return told is not None and bool(told["copied"] + told["recomputed"])

    async def serving_status(self) -> Mapping[str, Any]:
        """What the operator reads (`ServingStatus`): the engine's, and what the front knows."""
        told, drain = await self.link.call("status"), None
        if self.draining:
            left = {"copied": told["copied"], "recomputed": told["recomputed"]}
            drain = DrainReport(requests=self._at_drain, **left).model_dump(mode="json", by_alias=True)
        return {
            **told["status"],
            "ready": self._is_ready,
            "draining": self.draining,
            "drain": drain,
        }

    async def version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": VERSION, "engine": "busbar"})

    async def drain(self, request: web.Request) -> web.Response:
        """Streams move to the `peers` of the body, if there are any; whatever else runs ends here."""
        peers = peers_in(await read_json(request)) if request.can_read_body else []
        self.start_drain()
        if peers and self.settings.bearers is not None:
            await self.link.call("leave", {"peers": peers})
        return web.json_response({"draining": True, "running": self._generating})

    async def sleep(self, request: web.Request) -> web.StreamResponse:
        """The engine knows whether its requests run; of those that it does not have yet only the front knows."""
        if self._generating and not self.draining:
            raise Busy(f"{self._generating} requests run; a replica sleeps only when nothing runs")
        return await self._passage.hand_on(request)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, lambda sent: (PARSERS[request.path](sent), None))

    async def respond(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, lambda sent: (responses_request.parse_responses(sent), None))

    async def resume(self, request: web.Request) -> web.StreamResponse:
        """Goes on with a stream that another replica began."""
        if self.settings.bearers is None:
            raise Unauthorized("only a caller with a bearer may resume a stream, and this server has none")
        return await self._generate(request, parse_resume)

    async def embed(self, request: web.Request) -> web.Response:
        request_id = request_id_of(request)
        with self._in_hand():
            body = embeddings.parse_embeddings(await read_json(request))
            async with self._names.chosen(body.model) as adapter:
                owner = self._owner(request)
                texts = await embeddings.tokens_of(body, self._text_model(), owner.tenant)
                name = f"{request_id}/{next(self._numbers)}"
                vectors = await embeddings.vectors_of(self.link, name, texts, body, owner, adapter)
            answer = await asyncio.to_thread(embeddings.answer, body, texts, vectors)
            return web.json_response(answer, headers={REQUEST_ID_HEADER: request_id})

    async def tokenize(self, request: web.Request) -> web.Response:
        model = self._text_model()
        body = parse_tokenize(await read_json(request))
        await self._names.check(body.model or self.settings.model_id)
        tokens = await encode_prompt(body, model)
        answer: dict[str, object] = {
            "count": len(tokens),
            "max_model_len": model.limits.model,
            "tokens": tokens,
        }
        if body.with_texts:
            answer["token_strs"] = [model.tokenizer.id_to_token(token) for token in tokens]
        return web.json_response(answer)

    async def detokenize(self, request: web.Request) -> web.Response:
        model = self._text_model()
        name, tokens = parse_detokenize(await read_json(request))
        await self._names.check(name or self.settings.model_id)
        bad = next((t for t in tokens if t >= model.width), None)
        if bad is not None:
            raise BadRequest(f"token {bad} is not in the model's vocabulary", param="tokens")
        text = model.tokenizer.decode(tokens, skip_special_tokens=False)
        return web.json_response({"prompt": text})

    async def load(self, request: web.Request) -> web.Response:
        """vLLM's name for the number of requests in hand."""
        return web.json_response({"server_load": self._generating})

    # -- inside -------------------------------------------------------------------------------

    async def _generate(self, request: web.Request, parse: Callable[[object], Asked]) -> web.StreamResponse:
        request_id, began = request_id_of(request), time.monotonic()
        with self._in_hand():
            asked = parse(await read_json(request))
            async with self._names.chosen(asked[0].wanted.model) as adapter:
                response, jobs = await self._answer(request, request_id, asked, adapter)
            log.info(
                "request done",
                extra={
                    "request": request_id,
                    "path": request.path,
                    "prompt_tokens": sum(j.choice.prompt_tokens for j in jobs),
                    "completion_tokens": sum(j.choice.completion_tokens for j in jobs),
                    "seconds": round(time.monotonic() - began, 4),
                },
            )
            return response

    async def _answer(
        self, request: web.Request, request_id: str, asked: Asked, adapter: ChosenAdapter | None
    ) -> tuple[web.StreamResponse, list[Job]]:
        body, resumed = asked
        model, terms = self._text_model(), self._terms(request)
        owner, wanted = self._owner(request), body.wanted
        with responses_request.names_of(body):
            resumes = resumed is not None
            jobs = await prepare(body, request_id, model, terms, owner.tenant, resumed=resumes)
        answer = envelope(body, request_id, body.wanted.model, model, terms)
        headers = {REQUEST_ID_HEADER: request_id}
        if terms is not None:
            headers[DIGEST_HEADER] = stream_digest(model.identity, jobs, adapter)
        if resumed is not None:
            await take_over(resumed, jobs, model, headers.get(DIGEST_HEADER, ""), answer)
        moves = wanted.stream and terms is not None and terms.moves
        opening = AskedOfEngine(
            f"{request_id}/{next(self._numbers)}",
            prompts_of(jobs),
            owner,
            wanted.cache_salt,
            adapter,
            wanted.priority,
            moves,
            terms.hand_over if moves and terms is not None and self._hands_over(terms, jobs) else (),
        )
        async with self.link.opened(opening) as streams:
            if not wanted.stream:
                await collect(self.link, streams, jobs)
                return await self._whole(answer, [job.choice for job in jobs], headers), jobs
            events = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
            response = web.StreamResponse(headers={**headers, **events})
            request[STREAMING] = True
            with contextlib.suppress(ConnectionError):  # the client has left
                await response.prepare(request)
                await send_stream(response, self.link, streams, jobs, answer)
                await response.write_eof()
            return response, jobs

    def _hands_over(self, terms: StreamTerms, jobs: list[Job]) -> bool:
        """An answer of one token is whole before it could go on elsewhere."""
        is_long = any(job.params.max_tokens > 1 for job in jobs)
        return self.settings.role is ReplicaRole.PREFILL and bool(terms.hand_over) and is_long

    async def _whole(self, answer: Answer, choices: list[Choice], headers: dict[str, str]) -> web.Response:
        def text() -> str:
            return json.dumps(answer.whole(choices))

        is_long = any(choice.prompt_logprobs is not None for choice in choices)
        sent = await asyncio.to_thread(text) if is_long else text()
        return web.json_response(text=sent, headers=headers)

    @contextlib.contextmanager
    def _in_hand(self) -> Iterator[None]:
        """Around a request for the engine: from its first line on, also while its body arrives, a drain waits for it."""
        self._admit()  # before anything else: a replica that leaves says 503 to all, so that clients try others
        self._generating += 1
        self.quiet.clear()
        try:
            yield
        finally:
            self._generating -= 1
            if self._generating == 0:
                self.quiet.set()

    def _owner(self, request: web.Request) -> Owner:
        """Nobody without a bearer, because anybody could set the gateway's headers."""
        return NOBODY if self.settings.bearers is None else owner_of(request)

    def _terms(self, request: web.Request) -> StreamTerms | None:
        """What the gateway has decided for this request; without a bearer nobody could be believed."""
        sent = request.headers.get(TERMS_HEADER)
        if sent is None or self.settings.bearers is None:
            return None
        return read_terms(sent)

    @property
    def _is_ready(self) -> bool:
        standing = self._standing
        return refusal_of(dataclasses.replace(standing, waiting=0)) is None

    @property
    def _standing(self) -> Standing:
        link, state = self.link, self.link.state
        if self.model is None and state is EngineState.READY:
            state = EngineState.LOADING
        stalled_s = link.stall_s if link.stalled else None
        return Standing(state, self.draining, stalled_s, link.waiting, self.settings.max_waiting)

    @property
    def _state_word(self) -> str:
        return "Stalled" if self.link.stalled else self._standing.state.value

    def _text_model(self) -> TextModel:
        """With the engine's limits of this moment."""
        if self.model is None or not self.link.limits.model:
            raise unavailable(self._standing.state)
        self.model.limits, self.model.identity = self.link.limits, self.link.identity
        return self.model

    def _admit(self) -> None:
        found = refusal_of(self._standing)
        if found is None:
            return
        reason, error = found
        if reason:
            self.link.tell("rejected", reason=reason)
        raise error

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Bearer first, then the handler; every refusal becomes OpenAI's error JSON."""
        try:
            bearers = self.settings.bearers
            header = request.headers.get("Authorization")
            if bearers is not None and not is_allowed(request.path, header, bearers):
                raise Unauthorized(
                    f"{request.path} wants the workload's bearer for this kind of call in the Authorization header"
                )
            return await handler(request)
        except (RequestError, web.HTTPException) as error:
            return refusal(error, request, self.settings.max_body_bytes)
        except Exception as error:
            if request.get(STREAMING):
                raise  # the answer has begun, so the connection is cut to show the failure
            if isinstance(error, RecursionError):
                return answer_to(BadRequest("the body is nested too deeply"))
            log.exception("a handler failed")
            return answer_to(EngineFailed("the server failed on this request; its log says why"))
