"""Everything the handlers use, made in one place and handed over by the app's state."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy.exc import SQLAlchemyError

from busbar.api.audit import Audit
from busbar.api.authentication import Authenticator
from busbar.api.authorization import Authorizer, reviewer
from busbar.api.clock import Clock, utc_now
from busbar.api.cluster import Cluster
from busbar.api.completions import Completions
from busbar.api.database.engine import Database
from busbar.api.history import History
from busbar.api.keys import Keys
from busbar.api.kubernetes import KubeApi
from busbar.api.ledger import Ledger
from busbar.api.live import Live
from busbar.api.objects import Objects
from busbar.api.operator_client import Snapshots
from busbar.api.pods import Pods
from busbar.api.preview import Previews
from busbar.api.sessions import Sessions
from busbar.api.settings import Settings
from busbar.api.store import Store
from busbar.api.tenancy import Tenancy
from busbar.api.token_desk import TokenDesk
from busbar.api.tokens import Tokens

HOUSEKEEPING_S = 3600.0

log = logging.getLogger(__name__)


@dataclass
class Services:
    """The parts of a running API."""

    settings: Settings
    kube: KubeApi
    database: Database
    store: Store
    tenancy: Tenancy
    authorizer: Authorizer
    authenticator: Authenticator
    tokens: Tokens
    sessions: Sessions
    audit: Audit
    ledger: Ledger
    history: History
    objects: Objects
    pods: Pods
    previews: Previews
    cluster: Cluster
    keys: Keys
    desk: TokenDesk
    completions: Completions
    live: Live
    snapshots: Snapshots
    clock: Clock

    async def start(self) -> list[asyncio.Task[None]]:
        """Begin to watch and to keep history; returns the tasks, for `stop`."""
        await self.store.start()
        return [
            asyncio.create_task(_keep_going(self.history.run), name="history"),
            asyncio.create_task(self._housekeeping(), name="housekeeping"),
        ]

    async def stop(self, tasks: list[asyncio.Task[None]]) -> None:
        """Stop, writing what history still holds."""
        self.live.close()
        await self.store.stop()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with contextlib.suppress(SQLAlchemyError, OSError):
            await self.history.flush()
        await self.completions.close()
        await self.snapshots.close()
        await self.kube.close()
        await self.database.close()

    async def _housekeeping(self) -> None:
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            before = self.clock() - timedelta(days=self.settings.history_days)
            with contextlib.suppress(SQLAlchemyError, OSError):
                await self.history.prune(before)
                await self.audit.prune(before)
                await self.tokens.prune_hidden()


async def _keep_going(run: Callable[[], Awaitable[None]]) -> None:
    while True:
        try:
            await run()
        except (SQLAlchemyError, OSError, TimeoutError) as error:
            log.warning("history stopped (%s) and starts again in 5 s", type(error).__name__)
            await asyncio.sleep(5)


def build(
    settings: Settings,
    kube: KubeApi,
    snapshots: Snapshots,
    *,
    clock: Clock = utc_now,
    backoff_s: tuple[float, float] = (0.2, 30.0),
) -> Services:
    """Wire the parts together. Nothing is started and nothing is connected yet."""
    database = Database(settings.database_url)
    store = Store(kube, backoff_s=backoff_s)
    tenancy = Tenancy(store)
    reviews = reviewer(kube)
    authorizer = Authorizer(reviews, tenancy)
    tokens = Tokens(database, clock)
    sessions = Sessions(database, settings.session_secret, settings.session_hours, clock)
    audit = Audit(database, clock)
    objects = Objects(kube, store, authorizer, audit)
    keys = Keys(tokens, tenancy)
    return Services(
        settings=settings,
        kube=kube,
        database=database,
        store=store,
        tenancy=tenancy,
        authorizer=authorizer,
        authenticator=Authenticator(reviews, tokens, sessions),
        tokens=tokens,
        sessions=sessions,
        audit=audit,
        ledger=Ledger(database, clock),
        history=History(database, store, tenancy, clock),
        objects=objects,
        pods=Pods(kube, objects, authorizer),
        previews=Previews(objects, snapshots, authorizer, settings, clock),
        cluster=Cluster(store, tenancy, authorizer, objects, snapshots),
        keys=keys,
        desk=TokenDesk(tokens, keys, authorizer, audit),
        completions=Completions(settings.gateway_url, keys),
        live=Live(store),
        snapshots=snapshots,
        clock=clock,
    )
