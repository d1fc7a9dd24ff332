"""The services that handlers use, created in one place and passed on in the app's state."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy.exc import SQLAlchemyError

from busbar.api.access.audit import Audit
from busbar.api.access.authentication import Authenticator
from busbar.api.access.authorization import Authorizer, reviewer
from busbar.api.access.budget_leases import BudgetLeases
from busbar.api.access.forwarded import Forwarded
from busbar.api.access.keys import Keys
from busbar.api.access.sessions import Sessions
from busbar.api.access.spending import Spending
from busbar.api.access.tenancy import Tenancy
from busbar.api.access.throttle import Throttle
from busbar.api.access.token_rules import TokenRules
from busbar.api.access.token_service import TokenService
from busbar.api.access.tokens import Tokens
from busbar.api.access.wrong_bearers import WrongBearers
from busbar.api.clock import Clock, utc_now
from busbar.api.database.engine import Database
from busbar.api.kubernetes.client import KubeApi
from busbar.api.kubernetes.store import Store
from busbar.api.objects.change_stream import ChangeStream
from busbar.api.objects.cluster import Cluster
from busbar.api.objects.completions import Completions
from busbar.api.objects.objects import Objects
from busbar.api.objects.operator_client import Operator
from busbar.api.objects.overview import Overviews
from busbar.api.objects.pods import Pods
from busbar.api.objects.power import PowerViews
from busbar.api.objects.preview import Previews
from busbar.api.objects.service_load import ServiceLoads
from busbar.api.records.backup import Backup
from busbar.api.records.batches import BatchStore
from busbar.api.records.files import FileStore
from busbar.api.records.history import History
from busbar.api.records.usage import Usage
from busbar.api.records.usage_export import UsageExport
from busbar.api.records.usage_ledger import UsageLedger
from busbar.api.settings import Settings

HOUSEKEEPING_S = 3600.0

log = logging.getLogger(__name__)


@dataclass
class Services:
    """All services of a running API."""

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
    usage_ledger: UsageLedger
    budget_leases: BudgetLeases
    files: FileStore
    batches: BatchStore
    history: History
    usage: Usage
    backup: Backup
    objects: Objects
    pods: Pods
    previews: Previews
    cluster: Cluster
    overviews: Overviews
    keys: Keys
    token_service: TokenService
    login_throttle: Throttle
    forwarded: Forwarded
    completions: Completions
    change_stream: ChangeStream
    power: PowerViews
    service_loads: ServiceLoads
    operator: Operator
    clock: Clock

    async def start(self) -> list[asyncio.Task[None]]:
        """Start the watches and the history; returns the tasks, for `stop`."""
        await self.store.start()
        return [
            asyncio.create_task(_keep_going(self.history.run), name="history"),
            asyncio.create_task(self._housekeeping(), name="housekeeping"),
        ]

    async def stop(self, tasks: list[asyncio.Task[None]]) -> None:
        """Stop, and write the history that is still pending."""
        self.change_stream.close()
        await self.store.stop()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with contextlib.suppress(SQLAlchemyError, OSError):
            await self.history.flush()
            await self.history.resign()
        await self.completions.close()
        await self.operator.close()
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
                await self.budget_leases.prune()
                await self.files.prune()
                await self.batches.prune()


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
    operator: Operator,
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
    cluster = Cluster(store, tenancy, authorizer, objects, operator)
    keys = Keys(tokens, tenancy, Spending(database, clock))
    usage_ledger = UsageLedger(database, clock)
    history = History(database, store, tenancy, clock)
    wrong = WrongBearers(Throttle(settings.logins_per_minute, "wrong tokens", clock), tokens, audit)
    return Services(
        settings=settings,
        kube=kube,
        database=database,
        store=store,
        tenancy=tenancy,
        authorizer=authorizer,
        authenticator=Authenticator(reviews, tokens, sessions, wrong),
        tokens=tokens,
        sessions=sessions,
        audit=audit,
        usage_ledger=usage_ledger,
        budget_leases=BudgetLeases(database, clock),
        files=FileStore(database, clock),
        batches=BatchStore(database, clock),
        history=history,
        usage=Usage(usage_ledger, history.compute, UsageExport(database), authorizer, tenancy),
        backup=Backup(database, history, audit, clock),
        objects=objects,
        pods=Pods(kube, objects, authorizer),
        previews=Previews(objects, operator, authorizer),
        cluster=cluster,
        power=PowerViews(kube, cluster, authorizer, operator),
        service_loads=ServiceLoads(objects, operator),
        overviews=Overviews(store, objects, tenancy, authorizer, clock),
        keys=keys,
        token_service=TokenService(
            tokens,
            TokenRules.of(settings),
            Throttle(settings.token_creations_per_minute, "new tokens", clock),
            keys,
            authorizer,
            audit,
        ),
        login_throttle=Throttle(settings.logins_per_minute, "logins", clock),
        forwarded=Forwarded(settings),
        completions=Completions(settings.gateway_url, keys),
        change_stream=ChangeStream(store),
        operator=operator,
        clock=clock,
    )
