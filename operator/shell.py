"""Kopf as the shell: it logs in, watches our four kinds, and tells us of each event. It stores nothing.

Only ``on.event`` handlers are used: no create, update or delete handlers (they keep the last spec in an
annotation), no timers, no index (it can deadlock with a worker limit), no finalizers (they hang deletion
while we are down), no events of its own. Its per-object workers hand the object to our caches and return.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import kopf

from busbar.kube.client import Object
from busbar.kube.login import Login
from busbar.kube.resources import (
    ACCELERATOR_POOLS,
    GROUP,
    MODEL_SERVICES,
    TENANTS,
    TRAINING_JOBS,
    VERSION,
    Resource,
)
from busbar.operator.settings import Settings

KINDS: tuple[Resource, ...] = (TRAINING_JOBS, MODEL_SERVICES, ACCELERATOR_POOLS, TENANTS)


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
    made.queueing.worker_limit = 32
    # A worker keeps its slot this long after its queue is empty: the default of 5 s caps 32 workers at 6 objects/s.
    made.queueing.idle_timeout = 0.2
    made.process.ultimate_exiting_timeout = 10
    return made


class Shell:
    """An embedded Kopf operator in the caller's loop."""

    def __init__(
        self,
        login: Login,
        settings: Settings,
        on_event: Callable[[Resource, str | None, Object], None],
    ) -> None:
        self._login, self._settings = login, settings
        self._on_event = on_event
        self.heard_at: dict[str, float] = {}
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Until cancelled or stopped."""
        await kopf.operator(
            registry=self._registry(),
            settings=kopf_settings(self._settings),
            standalone=True,
            clusterwide=True,
            stop_flag=self._stop,
        )

    def stop(self) -> None:
        self._stop.set()

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
            self.heard_at[resource.kind] = time.monotonic()
            self._on_event(resource, event["type"], dict(event["object"]))

        kopf.on.event(GROUP, VERSION, resource.plural, registry=registry, id=f"saw-{resource.plural}")(heard)
