"""Kopf logs in, watches our kinds, and passes each event on. It stores nothing.

Only ``on.event`` handlers are used: no create, update or delete handlers (they keep the last spec in an
annotation), no timers, no index (it can deadlock with a worker limit), no finalizers (they block deletion
while the operator is down), no events of its own.

It runs in a thread with an event loop of its own, and passes each object to the operator's loop: at its end Kopf
cancels every task of its loop that it does not know, it installs signal handlers, and a long plan must not delay
its watches. The thread only reads, so it needs no lease check.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import kopf

from busbar.kube.client import Object
from busbar.kube.exec_plugin import Credential
from busbar.kube.login import Login
from busbar.kube.resources import (
    ACCELERATOR_POOLS,
    GROUP,
    MODEL_SERVICES,
    PERFORMANCE_PROFILES,
    POWER_DOMAINS,
    TENANTS,
    TRAINING_JOBS,
    VERSION,
    Resource,
)
from busbar.operator.errors import ShellEnded
from busbar.operator.settings import Settings

log = logging.getLogger(__name__)

AGAIN_S = (1.0, 30.0)
"""Pauses before Kopf is started again: the first, and the longest."""
WORKED_S = 60.0
"""A run of this length has worked: the next pause is the first again."""

KINDS: tuple[Resource, ...] = (
    TRAINING_JOBS,
    MODEL_SERVICES,
    ACCELERATOR_POOLS,
    TENANTS,
    PERFORMANCE_PROFILES,
    POWER_DOMAINS,
)


def kopf_settings(settings: Settings) -> kopf.OperatorSettings:
    """Kopf's settings, each with the trap that it avoids."""
    made = kopf.OperatorSettings()
    made.posting.enabled = False  # events go through our own queue
    made.scanning.disabled = True  # one list and one watch per kind, no watching of CRDs and namespaces
    made.peering.standalone = True  # the Lease decides who works
    made.watching.server_timeout = 240  # the server ends a dead watch
    made.watching.connect_timeout = 5
    made.watching.inactivity_timeout = settings.watch_inactivity_s
    made.networking.request_timeout = 15  # the default is five minutes
    made.networking.connect_timeout = 5
    made.networking.enforce_retry_after = True
    made.networking.error_backoffs = (0.1, 0.2, 0.5, 1, 2, 5, 10)  # the default begins with whole seconds
    made.queueing.worker_limit = 32
    # A worker keeps its slot this long after its queue is empty: the default of 5 s caps 32 workers at 6 objects/s.
    made.queueing.idle_timeout = 0.2
    made.process.ultimate_exiting_timeout = None  # it would SIGKILL this process; the kubelet does that
    made.persistence.diffbase_storage = _NoDifferences()
    return made


class _NoDifferences(kopf.DiffBaseStorage):
    """Kopf copies each object to say what changed in it since it was handled; handlers of events do not ask."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        """Nothing of an object is compared."""
        return kopf.BodyEssence()

    def fetch(self, **_: Any) -> kopf.BodyEssence | None:
        """Nothing was kept."""
        return None

    def store(self, **_: Any) -> None:
        """Keeps nothing."""


class KopfShell:
    """An embedded Kopf operator in a thread of its own; ``on_event`` is called in the caller's loop."""

    def __init__(
        self,
        login: Login,
        settings: Settings,
        on_event: Callable[[Resource, str | None, Object], None],
    ) -> None:
        self._login, self._settings = login, settings
        self._on_event = on_event
        self._heard: deque[tuple[Resource, str | None, Object]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    async def run(self) -> None:
        """Runs until cancelled. Kopf gives up after some refusals in a row, and is started again."""
        pause_s = AGAIN_S[0]
        while True:
            began = time.monotonic()
            try:
                await self._run_once()
            except ShellEnded as error:
                log.warning("%s; started again in %.0f s", error, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = AGAIN_S[0] if time.monotonic() - began > WORKED_S else min(2 * pause_s, AGAIN_S[1])

    async def _run_once(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._heard.clear()  # a thread whose loop was gone may have left something
        ended: asyncio.Future[BaseException | None] = self._loop.create_future()
        stop = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(stop, ended), name="kopf", daemon=True)
        self._thread.start()
        try:
            error = await ended
            raise ShellEnded(f"the watches of our kinds ended: {error!r}") from error
        finally:
            stop.set()

    def join(self, timeout_s: float) -> None:
        """Waits for the thread after ``run`` has ended. It blocks: do not call it in the event loop."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _work(self, stop: threading.Event, ended: asyncio.Future[BaseException | None]) -> None:
        error: BaseException | None = None
        try:
            asyncio.run(
                kopf.operator(
                    registry=self._registry(),
                    settings=kopf_settings(self._settings),
                    standalone=True,
                    clusterwide=True,
                    stop_flag=stop,
                )
            )
        except BaseException as raised:  # the end of the thread must be reported, whatever caused it
            error = raised
        self._call_in_loop(lambda: None if ended.done() else ended.set_result(error))

    def _call_in_loop(self, call: Callable[[], object]) -> None:
        """Calls a function in the caller's loop, if that loop still runs."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call)

    def _pass_on(self) -> None:
        """Passes on what Kopf has heard, in its order; an error costs one event only."""
        assert self._loop is not None
        while self._heard:
            self._loop.call_soon(self._on_event, *self._heard.popleft())

    def _registry(self) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()
        login = self._login
        last: Credential | None = None

        class Connection(kopf.ConnectionInfo):
            """Our own TLS settings: Kopf's have no name for the server other than its host's."""

            def as_ssl_context(self) -> ssl.SSLContext:
                return login.ssl_context() or super().as_ssl_context()

        @kopf.on.login(registry=registry)  # type: ignore[untyped-decorator, unused-ignore]
        async def log_in(**_: Any) -> kopf.ConnectionInfo:
            """Kopf asks at its start, when a credential has expired, and when the API server refused it."""
            nonlocal last
            if last is not None and login.plugin is not None:
                login.plugin.refuse(last)
            last = await asyncio.to_thread(login.credential)
            return Connection(
                server=login.server,
                token=last.token,
                certificate_data=last.client_cert_pem.encode() if last.client_cert_pem else None,
                private_key_data=last.client_key_pem.encode() if last.client_key_pem else None,
                expiration=last.expires_at,
                proxy_url=login.proxy_url,
                default_namespace=login.namespace,
            )

        for resource in KINDS:
            self._listen(registry, resource)
        return registry

    def _listen(self, registry: kopf.OperatorRegistry, resource: Resource) -> None:
        async def heard(event: kopf.RawEvent, **_: Any) -> None:
            self._heard.append((resource, event["type"], dict(event["object"])))
            if len(self._heard) == 1:  # else the loop has been woken and has not looked yet
                self._call_in_loop(self._pass_on)

        kopf.on.event(GROUP, VERSION, resource.plural, registry=registry, id=f"saw-{resource.plural}")(heard)
