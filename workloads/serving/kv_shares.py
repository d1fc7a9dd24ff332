"""POST /kv_shares: other shares of the KV cache for tenants, while requests run.

The operator sends all shares of the service's spec whenever they are others than those that this replica was asked for
last (`ServingStatus.kv_shares`). Those of the command line stay beside them. Shares that cannot be kept change nothing;
why is in the answer and in /status until others are asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from aiohttp import web
from pydantic import ValidationError

from busbar.kube.contracts.workload import KV_SHARES_PATH, KvShare, KvShares, ServingStatus
from busbar.workloads.serving.engine import Engine
from busbar.workloads.serving.errors import BadRequest, SettingsError
from busbar.workloads.serving.http_request import read_json
from busbar.workloads.serving.quota import Quota
from busbar.workloads.serving.settings import ServerSettings

log = logging.getLogger(__name__)


class KvShareRoute:
    """Of one server: what it was asked for, and whether it could."""

    def __init__(self, engine: Engine, settings: ServerSettings) -> None:
        self._engine = engine
        self._fixed = dict(settings.fixed_kv_quotas)
        self._asked = [
            KvShare(tenant=tenant, guaranteed=quota.guaranteed, most=quota.most)
            for tenant, quota in settings.engine.kv_quotas
            if tenant not in self._fixed
        ]
        self._refused = ""

    def routes(self) -> list[web.RouteDef]:
        return [web.post(KV_SHARES_PATH, self.change)]

    def told(self, status: ServingStatus) -> ServingStatus:
        """With what this replica was asked for."""
        return status.model_copy(update={"kv_shares": self._asked, "kv_shares_refused": self._refused})

    async def change(self, request: web.Request) -> web.Response:
        asked = _shares(await read_json(request))
        try:
            quotas = self._quotas(asked)
            await self._engine.in_turn(lambda core: core.change_quotas(quotas))
        except SettingsError as error:
            self._refused = str(error)
            log.warning("shares of the KV cache stay as they were: %s", error)
        else:
            self._refused = ""
            log.info("shares of the KV cache changed, %d tenants have one", len(quotas))
        self._asked = asked
        return web.json_response({"refused": self._refused})

    def _quotas(self, asked: Iterable[KvShare]) -> dict[str, Quota]:
        quotas = {each.tenant: Quota(each.guaranteed, each.most) for each in asked}
        twice = next((tenant for tenant in quotas if tenant in self._fixed), None)
        if twice is not None:
            raise SettingsError(f"tenant {twice!r} has a KV quota on the command line already; give one")
        return quotas | self._fixed


def _shares(body: object) -> list[KvShare]:
    try:
        found = KvShares.model_validate(body).tenants
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise BadRequest(
            f'{where}: {first["msg"]}; send {{"tenants": [{{"tenant", "guaranteed", "most"}}]}}'
        ) from error
    names = [each.tenant for each in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise BadRequest(f"tenant {twice!r} is named twice")
    return found
