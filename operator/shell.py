"""Kopf as the shell: it logs in, watches our kinds, and tells us of each event. It stores nothing.

Only ``on.event`` handlers are used: no create, update or delete handlers (they keep the last spec in an
annotation), no timers, no index (it can deadlock with a worker limit), no finalizers (they hang deletion
while we are down), no events of its own.

It runs in a thread with an event loop of its own, and hands each object over to ours: at its end Kopf cancels
every task of its loop that it does not know, it installs signal handlers, and a long plan of ours must not delay
its watches. The thread reads and never writes, so it needs no fence.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any

import kopf

from busbar.kube.client import Object
from busbar.kube.login import Login
from busbar.kube.resources import (
    ACCELERATOR_POOLS,
    GROUP,
    MODEL_SERVICES,
    PERFORMANCE_PROFILES,
    TENANTS,
    TRAINING_JOBS,
    VERSION,
    Resource,
)
from busbar.operator.errors import ShellEnded
from busbar.operator.settings import Settings

KINDS: tuple[Resource, ...] = (
    TRAINING_JOBS,
    MODEL_SERVICES,
    ACCELERATOR_POOLS,
    TENANTS,
    PERFORMANCE_PROFILES,
)


def kopf_settings(settings: Settings) -> kopf.OperatorSettings:
    """Kopf's settings, each with the trap that it avoids."""
    made = kopf.OperatorSettings()
    made.posting.enabled = False  # events go through our own queue
    made.scanning.disabled = True  # one list and one watch per kind, no watching of CRDs and namespaces
    made.peering.standalone = True  # the Lease decides who works
    made.watching.server_timeout = 240  # a dead watch ends by itself
    made.watching.connect_timeout = 5
    made.watching.inactivity_timeout = settings.watch_inactivity_s
    made.networking.request_timeout = 15  # the default is five minutes
    made.networking.connect_timeout = 5
    made.networking.enforce_retry_after = True
    made.networking.error_backoffs = (0.1, 0.2, 0.5, 1, 2, 5, 10)  # the default begins with whole seconds
    made.queueing.worker_limit = 32
    # A worker keeps its slot this long after its queue is empty: the default of 5 s caps 32 workers at 6 objects/s.
    made.queueing.idle_timeout = 0.2
    made.process.ultimate_exiting_timeout = None  # it would SIGKILL our process; the kubelet does that job
    return made


class Shell:
    """An embedded Kopf operator in a thread of its own; ``on_event`` is called in the caller's loop."""

    def __init__(
        self,
        login: Login,
        settings: Settings,
        on_event: Callable[[Resource, str | None, Object], None],
    ) -> None:
        self._login, self._settings = login, settings
        self._on_event = on_event
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    async def run(self) -> None:
        """Until cancelled; raises ShellEnded when Kopf ends by itself."""
        self._loop = asyncio.get_running_loop()
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
        """Waits for the thread after ``run`` has ended; blocks, so not for the event loop."""
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
        except BaseException as raised:  # the thread's end must be told, whatever ended it
            error = raised
        self._tell(lambda: None if ended.done() else ended.set_result(error))

    def _tell(self, call: Callable[[], object]) -> None:
        """Runs something in the caller's loop, while there is one."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call)

    def _registry(self) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()
        login = self._login

        @kopf.on.login(registry=registry)  # type: ignore[untyped-decorator, unused-ignore]
        async def log_in(**_: Any) -> kopf.ConnectionInfo:
            return kopf.ConnectionInfo(
                server=login.server,
                ca_data=login.ca_pem.encode() if login.ca_pem else None,
                insecure=login.insecure,
                token=login.bearer(),
                certificate_data=login.client_cert_pem.encode() if login.client_cert_pem else None,
                private_key_data=login.client_key_pem.encode() if login.client_key_pem else None,
                default_namespace=login.namespace,
            )

        for resource in KINDS:
            self._listen(registry, resource)
        return registry

    def _listen(self, registry: kopf.OperatorRegistry, resource: Resource) -> None:
        async def heard(event: kopf.RawEvent, **_: Any) -> None:
            kind, obj = event["type"], dict(event["object"])
            self._tell(lambda: self._on_event(resource, kind, obj))

        kopf.on.event(GROUP, VERSION, resource.plural, registry=registry, id=f"saw-{resource.plural}")(heard)
