"""The HTTP face: OpenAI routes, probes, metrics, status and drain, on one aiohttp loop.

    GET  /health /ready                                                        open to all
    GET  /v1/models /v1/models/{id}                                            the bearer for inference
    POST /v1/completions /v1/chat/completions /v1/responses /v1/embeddings     the same
    POST /tokenize /detokenize /resume                                         the same
    GET  /status /metrics /load /version /is_sleeping                          the bearer for reading
    POST /drain /sleep /wake_up /v1/load_lora_adapter /v1/unload_lora_adapter  the bearer for commands
    POST /kv_shares /adapters                                                  the same
    POST /migrate /migrate/begin /migrate/blocks /migrate/commit               the same

`busbar serve` takes one bearer for all of them, or none: then all are open.

A drain refuses new work with 503 and Retry-After and lets running requests end; /ready says 503 from
its first moment while /health stays well.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack

from aiohttp import web

from busbar.kube.contracts.bearers import is_allowed
from busbar.kube.contracts.streams import (
    DIGEST_HEADER,
    RESUME_PATH,
    TERMS_HEADER,
    StreamTerms,
)
from busbar.kube.contracts.workload import MIGRATE_PATH, DrainReport, ReplicaRole, ServingStatus
from busbar.workloads.serving import embeddings, responses_request
from busbar.workloads.serving.adapter_route import AdapterRoute
from busbar.workloads.serving.adapters import Adapter
from busbar.workloads.serving.engine import Engine, EngineState, Stream
from busbar.workloads.serving.errors import (
    BadRequest,
    Busy,
    EngineFailed,
    Overloaded,
    RequestError,
    Unauthorized,
)
from busbar.workloads.serving.fairness import NOBODY, Owner
from busbar.workloads.serving.generation import (
    Job,
    collect,
    encode_prompt,
    envelope,
    opened,
    prepare,
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
from busbar.workloads.serving.kv_shares import KvShareRoute
from busbar.workloads.serving.loader import Loaded
from busbar.workloads.serving.migrate_in import Arrivals
from busbar.workloads.serving.migrate_out import Departures, Movable, peers_in
from busbar.workloads.serving.openai_request import (
    PARSERS,
    parse_detokenize,
    parse_tokenize,
)
from busbar.workloads.serving.openai_response import Answer, Choice
from busbar.workloads.serving.report import phase_steps, table_report, tenant_blocks
from busbar.workloads.serving.resume import Asked, parse_resume, read_terms, stream_digest, take_over
from busbar.workloads.serving.served_models import LOAD_PATH, UNLOAD_PATH, ServedModels
from busbar.workloads.serving.settings import ServerSettings
from busbar.workloads.serving.sleep_routes import SleepRoutes

log = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
VERSION = "0.1.0"
STALLED_PASSES = 4
"""Times that weights are streamed in full: a step that takes longer is assumed to hang."""
STREAMING = web.RequestKey("streaming", bool)
"""The answer to this request has begun."""


class Server:
    """Routes and state of one server."""

    def __init__(self, settings: ServerSettings, engine: Engine) -> None:
        self.settings = settings
        self.engine = engine
        self.draining = False
        self._at_drain = DrainReport(requests=0)
        """What there was, and what had left before, when the drain began."""
        self.heard = asyncio.Event()
        """Set while whoever reads `/status` has read the last of it, or nobody does."""
        self.heard.set()
        self.quiet = asyncio.Event()
        """Set while no generation request is in a handler."""
        self.quiet.set()
        self._generating = 0
        self._numbers = itertools.count()
        self._models = ServedModels(settings, engine, int(time.time()))
        self._kv_shares = KvShareRoute(engine, settings)
        self._adapters = AdapterRoute(engine, settings.spec_adapters, self._models)
        name = uuid.uuid4().hex
        self.departures = Departures(engine, name, settings, self._count_migration)
        self.arrivals = Arrivals(engine, name, settings.model_id, self._models, self._taking)
        self._leaving: asyncio.Task[None] | None = None

    def application(self) -> web.Application:
        app = web.Application(client_max_size=self.settings.max_body_bytes, middlewares=[self._guard])
        app.add_routes(
            [
                web.get("/health", self.health),
                web.get("/ready", self.ready),
                web.get("/status", self.status),
                web.get("/metrics", self.metrics),
                web.get("/version", self.version),
                web.post("/drain", self.drain),
                *SleepRoutes(self.engine, self._check_quiet).routes(),
                *self._kv_shares.routes(),
                *self._adapters.routes(),
                web.post(MIGRATE_PATH, self.departures.migrate),
                *self.arrivals.routes(),
                web.post(LOAD_PATH, self.load_adapter),
                web.post(UNLOAD_PATH, self.unload_adapter),
                web.get("/v1/models", self.models),
                web.get("/v1/models/{id:.+}", self.model),
                *(web.post(path, self.generate) for path in PARSERS),
                web.post(responses_request.PATH, self.respond),
                web.post(embeddings.PATH, self.embed),
                web.post(RESUME_PATH, self.resume),
                web.post("/tokenize", self.tokenize),
                web.post("/detokenize", self.detokenize),
                web.get("/load", self.load),
            ]
        )
        app.on_cleanup.extend((self._stop_leaving, self._adapters.stop))
        return app

    def start_drain(self) -> None:
        """From now on new requests are refused. Cannot be undone."""
        if not self.draining:
            self.draining = True
            left = self.departures
            self._at_drain = DrainReport(
                requests=self._generating, copied=left.copied, recomputed=left.recomputed
            )
            log.info("draining, %d requests are running", self._generating)

    # -- handlers -----------------------------------------------------------------------------

    async def health(self, request: web.Request) -> web.Response:
        dead = self._stalled or self.engine.state in (EngineState.FAILED, EngineState.STOPPED)
        return web.json_response({"state": self._state_word}, status=503 if dead else 200)

    async def ready(self, request: web.Request) -> web.Response:
        ready = self._is_ready
        return web.json_response(
            {"ready": ready, "draining": self.draining, "state": self._state_word},
            status=200 if ready else 503,
        )

    async def status(self, request: web.Request) -> web.Response:
        told = self.serving_status()
        over = told.drain is not None and not (self._generating or told.running or told.waiting)
        (self.heard.set if over else self.heard.clear)()
        return web.json_response(told.model_dump(mode="json", by_alias=True))

    @property
    def has_moved_streams(self) -> bool:
        """Whether others have taken streams since the drain began."""
        report = self._drain_report()
        return report is not None and bool(report.copied + report.recomputed)

    def _drain_report(self) -> DrainReport | None:
        if not self.draining:
            return None
        now, before = self.departures, self._at_drain
        return before.model_copy(
            update={
                "copied": now.copied - before.copied,
                "recomputed": now.recomputed - before.recomputed,
            }
        )

    def serving_status(self) -> ServingStatus:
        """What the operator reads."""
        loaded = self.engine.loaded
        status = ServingStatus(
            ready=self._is_ready,
            draining=self.draining,
            model_id=self.settings.model_id,
            role=self.settings.role,
            running=max(self.engine.running, self.departures.leaving_now),
            waiting=self.engine.waiting,
            drain=self._drain_report(),
        )
        if loaded is None:
            return status
        core = loaded.core
        return self._adapters.told(self._kv_shares.told(status)).model_copy(
            update={
                "kv_blocks_total": core.scheduler.pool.total,
                "kv_blocks_free": core.scheduler.pool.free,
                "kv_tenants": tenant_blocks(core.scheduler),
                "requests_total": core.requests_total,
                "tokens_total": core.tally.tokens_total,
                "adapters": self._models.reports(loaded),
                "saturated": core.saturated,
                "sleep_level": int(self.engine.sleep_level),
                "phase_seconds": core.phase_seconds,
                "phase_steps": phase_steps(core.speed),
                "report": table_report(loaded, self.settings),
            }
        )

    async def metrics(self, request: web.Request) -> web.Response:
        core = self._loaded().core
        self._models.tell_metrics(core, time.time())
        core.metrics.sleeping(self.engine.sleep_level)
        core.metrics.phases(core.phase_seconds.model_dump())
        text = core.metrics.render()
        return web.Response(body=text, headers={"Content-Type": "text/plain; version=1.0.0; charset=utf-8"})

    async def version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": VERSION, "engine": "busbar"})

    async def drain(self, request: web.Request) -> web.Response:
        """Streams move to the `peers` of the body, if there are any; whatever else runs ends here."""
        peers = peers_in(await read_json(request)) if request.can_read_body else []
        self.start_drain()
        if peers and self.settings.bearers is not None and self._leaving is None:
            self._leaving = asyncio.create_task(self.departures.leave(peers))
        return web.json_response({"draining": True, "running": self._generating})

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": self._models.cards()})

    async def model(self, request: web.Request) -> web.Response:
        return web.json_response(self._models.card(self._models.adapter_name(request.match_info["id"])))

    async def load_adapter(self, request: web.Request) -> web.Response:
        if self.engine.sleep_level:
            raise self.engine.unavailable()
        return web.json_response(await self._models.load(await read_json(request)))

    async def unload_adapter(self, request: web.Request) -> web.Response:
        return web.json_response(await self._models.unload(await read_json(request)))

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
            async with self._models.chosen(body.model) as adapter:
                owner = self._owner(request)
                texts = await embeddings.tokens_of(body, self._loaded(), owner.tenant)
                name = f"{request_id}/{next(self._numbers)}"
                vectors = await embeddings.vectors_of(self.engine, name, texts, body, owner, adapter)
            answer = await asyncio.to_thread(embeddings.answer, body, texts, vectors)
            return web.json_response(answer, headers={REQUEST_ID_HEADER: request_id})

    async def tokenize(self, request: web.Request) -> web.Response:
        loaded = self._loaded()
        body = parse_tokenize(await read_json(request))
        self._models.adapter_name(body.model or self.settings.model_id)
        tokens = await encode_prompt(body, loaded)
        answer: dict[str, object] = {
            "count": len(tokens),
            "max_model_len": loaded.core.max_model_len,
            "tokens": tokens,
        }
        if body.with_texts:
            answer["token_strs"] = [loaded.core.tokenizer.id_to_token(token) for token in tokens]
        return web.json_response(answer)

    async def detokenize(self, request: web.Request) -> web.Response:
        loaded = self._loaded()
        model, tokens = parse_detokenize(await read_json(request))
        self._models.adapter_name(model or self.settings.model_id)
        bad = next((t for t in tokens if t >= loaded.arch.vocab_size), None)
        if bad is not None:
            raise BadRequest(f"token {bad} is not in the model's vocabulary", param="tokens")
        text = loaded.core.tokenizer.decode(tokens, skip_special_tokens=False)
        return web.json_response({"prompt": text})

    async def load(self, request: web.Request) -> web.Response:
        """vLLM's name for the number of requests in hand."""
        return web.json_response({"server_load": self._generating})

    # -- inside -------------------------------------------------------------------------------

    async def _generate(self, request: web.Request, parse: Callable[[object], Asked]) -> web.StreamResponse:
        request_id, began = request_id_of(request), time.monotonic()
        with self._in_hand():
            asked = parse(await read_json(request))
            async with self._models.chosen(asked[0].wanted.model) as adapter:
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
        self, request: web.Request, request_id: str, asked: Asked, adapter: Adapter | None
    ) -> tuple[web.StreamResponse, list[Job]]:
        body, resumed = asked
        loaded, terms = self._loaded(), self._terms(request)
        owner, wanted = self._owner(request), body.wanted
        with responses_request.names_of(body):
            resumes = resumed is not None
            jobs = await prepare(body, request_id, loaded, terms, owner.tenant, resumed=resumes)
        answer = envelope(body, request_id, body.wanted.model, loaded, terms)
        headers = {REQUEST_ID_HEADER: request_id}
        if terms is not None:
            headers[DIGEST_HEADER] = stream_digest(loaded.identity, jobs, adapter)
        if resumed is not None:
            await take_over(resumed, jobs, loaded, headers.get(DIGEST_HEADER, ""), answer)
        name = f"{request_id}/{next(self._numbers)}"
        async with AsyncExitStack() as stack:
            streams = await stack.enter_async_context(
                opened(self.engine, name, jobs, owner, wanted.cache_salt, adapter, wanted.priority)
            )
            if wanted.stream and DIGEST_HEADER in headers and terms is not None and terms.moves:
                stream = _movable(name, streams, jobs, owner, wanted.cache_salt, adapter)
                stack.enter_context(self.departures.offered(stream))
                if self._hands_over(terms, jobs):
                    stack.enter_context(self.departures.handed_over(stream, terms.hand_over))
            if not wanted.stream:
                await collect(self.engine, streams, jobs)
                return await self._whole(answer, [job.choice for job in jobs], headers), jobs
            events = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
            response = web.StreamResponse(headers={**headers, **events})
            request[STREAMING] = True
            await response.prepare(request)
            with contextlib.suppress(ConnectionError):  # the client has left
                await send_stream(response, self.engine, streams, jobs, answer)
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

    def _check_quiet(self) -> None:
        """Raises Busy where the replica may not sleep."""
        if self.draining:
            raise Busy("this replica is draining, and ends")
        if self._generating:
            raise Busy(f"{self._generating} requests run; a replica sleeps only when nothing runs")
        if self.arrivals.open:
            raise Busy(f"{self.arrivals.open} streams are on their way here, or have just come")

    def _taking(self) -> Loaded:
        """The model, where requests are taken. Raises Overloaded."""
        self._admit()
        return self._loaded()

    def _count_migration(self, outcome: str) -> None:
        if self.engine.loaded is not None:
            self.engine.loaded.core.metrics.migrated(outcome)

    async def _stop_leaving(self, _: web.Application) -> None:
        if self._leaving is not None:
            self._leaving.cancel()
        await self.departures.close()

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
        return self.engine.state is EngineState.READY and not self.draining and not self._stalled

    @property
    def _stalled(self) -> bool:
        return self.engine.step_seconds > self._stall_s

    @property
    def _stall_s(self) -> float:
        """Longer where streamed weights make every step long."""
        loaded = self.engine.loaded
        if loaded is None or loaded.streaming is None:
            return self.settings.stall_s
        return max(self.settings.stall_s, STALLED_PASSES * loaded.streaming.pass_s)

    @property
    def _state_word(self) -> str:
        return "Stalled" if self._stalled else self.engine.state.value

    def _loaded(self) -> Loaded:
        if self.engine.loaded is None:
            raise self.engine.unavailable()
        return self.engine.loaded

    def _admit(self) -> None:
        reason, error = None, None
        if self.draining:
            reason = "draining"
            error = Overloaded("this replica is draining; send the request again", retry_after_s=1)
        elif self.engine.state is not EngineState.READY:
            raise self.engine.unavailable()
        elif self._stalled:
            reason = "stalled"
            error = Overloaded(f"no step has ended for {self._stall_s:.0f} s; ask another replica")
        elif self.engine.waiting >= self.settings.max_waiting:
            reason = "queue_full"
            error = Overloaded(
                f"{self.engine.waiting} requests wait already; try again shortly", retry_after_s=2
            )
        if error is not None and reason is not None:
            if self.engine.loaded is not None:
                self.engine.loaded.core.metrics.rejected(reason)
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
        except Exception:
            if request.get(STREAMING):
                raise  # the answer has begun, so the connection is cut to show the failure
            log.exception("a handler failed")
            return answer_to(EngineFailed("the server failed on this request; its log says why"))


def _movable(
    name: str, streams: list[Stream], jobs: list[Job], owner: Owner, cache_salt: str, adapter: Adapter | None
) -> Movable:
    begun = [
        [*job.prompt, *(job.history.tokens if job.history is not None else ())]
        for job in jobs
        if job.choice.finish is None
    ]
    explains = jobs[0].params.prompt_logprobs is not None
    return Movable(name, streams, owner, cache_salt, adapter, explains, begun)
