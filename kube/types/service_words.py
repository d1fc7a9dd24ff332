"""What a service's status says of its scaling and its adapters, and its spec of who may use it, in words for people: the
same in the command line and in the portal."""

from __future__ import annotations

from collections.abc import Mapping

from busbar.kube.types.lost_work import Loss, LostWork
from busbar.kube.types.service_access import Access, AllowedTenant
from busbar.kube.types.service_status import (
    AdapterStatus,
    Departure,
    ModelServiceStatus,
    PoolReplicas,
    ScaledBy,
    ScalingDecision,
    ServerCrash,
    TenantRequests,
)

_BY = {
    ScaledBy.PROMISE: "the latency target",
    ScaledBy.IN_FLIGHT: "requests in flight",
    ScaledBy.EXTERNAL: "an external target",
}


def count_words(status: ModelServiceStatus) -> str:
    """How many replicas take requests, are wanted, and sleep."""
    words = f"{status.ready_replicas or 0} ready of {status.desired_replicas or 0} wanted"
    return f"{words}, {status.sleeping_replicas} sleeping" if status.sleeping_replicas else words


def level_facts(status: ModelServiceStatus) -> list[tuple[str, str]]:
    """(name, words) of the latency target, demand, capacity and costs; those that are not known are left out."""
    found = _load_facts(status)
    level, ahead = status.slo, status.forecast
    if level is not None:
        found.append(("Decided by", _BY[level.scaled_by]))
        if level.message:
            found.append(("Remark", level.message))
        kept = [
            f"{100 * share:.1f} % of {count or 0} requests in {time}"
            for share, count, time in (
                (level.attainment_recent, level.requests_recent, "5 minutes"),
                (level.attainment_hour, level.requests_hour, "an hour"),
                (level.attainment_day, level.requests_day, "a day"),
            )
            if share is not None
        ]
        if kept:
            found.append(("Target kept", ", ".join(kept)))
        times = [
            f"{words} {value:g} ms"
            for value, words in (
                (level.ttft_milliseconds, "first token"),
                (level.tpot_milliseconds, "each further one"),
            )
            if value is not None
        ]
        if times:
            found.append(("Times", f"{', '.join(times)}, at the target's percentile of a day"))
    if ahead is not None:
        words = (
            f"{ahead.now:g} requests/s now, {ahead.at_ready:g} expected in {ahead.ready_in_seconds:g} s,"
            f" nine times in ten {ahead.p90:g} or fewer"
        )
        if ahead.inside is not None:
            words += f" (so far in {100 * ahead.inside:.0f} %)"
        found.append(("Demand", words))
        if ahead.capacity is not None:
            found.append(("Capacity", f"{ahead.capacity:g} requests/s within the target by ready replicas"))
    spent = []
    if status.cost_per_million_tokens is not None:
        spent.append(f"{status.cost_per_million_tokens:g} per million tokens")
    if status.joules_per_token is not None:
        spent.append(f"{status.joules_per_token:g} J per token")
    if spent:
        found.append(("Costs", f"{', '.join(spent)}, of a day"))
    return found


def _load_facts(status: ModelServiceStatus) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    if status.tokens_per_second is not None:
        found.append(("Speed", f"{status.tokens_per_second:g} tokens/s, of a minute"))
    if status.kv_cache is not None:
        found.append(("KV cache", f"{status.kv_cache.held} of {status.kv_cache.blocks} blocks held"))
    if status.saturated_replicas:
        found.append(
            (
                "Saturated",
                f"{status.saturated_replicas} of {status.ready_replicas or 0} replicas: too slow for the time per token",
            )
        )
    return found


def access_facts(access: Access | None, status: ModelServiceStatus) -> list[tuple[str, str]]:
    """(name, words) of the tenants that a service is shared with; nothing where it is not."""
    if access is None:
        return []
    asks = {row.name: row for row in status.tenants or ()}
    return [
        ("Shared with", ", ".join(_guest_words(tenant, asks.get(tenant.name)) for tenant in access.tenants))
    ]


def _guest_words(tenant: AllowedTenant, asks: TenantRequests | None) -> str:
    more = [f"weight {tenant.weight:g}"] if tenant.weight != 1 else []
    if tenant.tokens_per_minute is not None:
        more.append(f"{tenant.tokens_per_minute:,} tokens/min")
    if tenant.guaranteed_kv:
        more.append(f"{100 * tenant.guaranteed_kv:g} % of the KV cache guaranteed")
    if tenant.max_kv is not None:
        more.append(f"at most {100 * tenant.max_kv:g} % of the KV cache")
    if asks is not None and asks.kv_blocks is not None:
        more.append(f"{asks.kv_blocks} of {asks.kv_blocks_most} KV blocks")
    if asks is not None and (asks.running or asks.waiting):
        more.append(f"{asks.running} running, {asks.waiting} waiting")
    return f"{tenant.name} ({', '.join(more)})" if more else tenant.name


def adapter_facts(status: ModelServiceStatus) -> list[tuple[str, str]]:
    """(name, words) of the adapters; nothing where there are none."""
    if not status.adapters:
        return []
    return [("Adapters", ", ".join(_adapter_words(row) for row in status.adapters))]


def _adapter_words(row: AdapterStatus) -> str:
    words = f"{row.name} on {row.replicas} {'replica' if row.replicas == 1 else 'replicas'}"
    return f"{words} (refused: {row.message})" if row.message else words


def loss_facts(status: ModelServiceStatus) -> list[tuple[str, str]]:
    """(name, words) of what training lost that gave way to its replicas; nothing where none did."""
    caused = status.lost_work_caused
    if caused is None or not caused.times:
        return []
    tenants = ", ".join(f"{t.tenant} {_loss_words(t)}" for t in caused.tenants or ())
    return [
        ("Lost work caused", f"{_loss_words(caused)}, training gave way {caused.times} times ({tenants})")
    ]


def departure_words(row: Departure) -> str:
    """What became of the requests of a replica that left."""
    moved = row.copied + row.recomputed
    ways = [
        f"{count} {how}"
        for count, how in (
            (row.copied, "with their keys and values"),
            (row.recomputed, "by computing their tokens again"),
        )
        if count
    ]
    return f"{moved} of {max(moved, row.requests)} requests went on at other replicas, {', '.join(ways)}"


def crash_words(row: ServerCrash) -> str:
    """What ended a replica's server, and how often that was."""
    often = f" ({row.restarts} restarts of its server since its container began)" if row.restarts > 1 else ""
    return f"{row.cause}{often}"


def charged_words(lost: LostWork | None) -> str:
    """What of a job's lost work is charged to services, and to which; empty for none."""
    charged = (lost.charged if lost is not None else None) or ()
    return ", ".join(
        f"{_loss_words(entry)} to {entry.namespace}/{entry.name} of tenant {entry.tenant}"
        for entry in charged
    )


def _loss_words(loss: Loss) -> str:
    cost = f" ({loss.cost:.2f})" if loss.cost else ""
    return f"{loss.accelerator_seconds / 3600:.3g} accelerator-hours{cost}"


def pool_words(row: PoolReplicas) -> str:
    """One pool's replicas."""
    words = f"{row.replicas} on {row.pool}"
    more = []
    if row.desired is not None and row.desired != row.replicas:
        more.append(f"{row.desired} wanted")
    if row.ready is not None and row.ready != row.replicas:
        more.append(f"{row.ready} ready")
    if row.starting:
        more.append(f"{row.starting} starting")
    if row.sleeping:
        more.append(f"{row.sleeping} sleeping")
    if row.requests_per_second is not None:
        guess = " by prediction" if row.predicted else ""
        more.append(f"{row.requests_per_second:g} requests/s each{guess}")
    if row.mode is not None and row.mode != "resident":
        more.append(f"engine mode {row.mode}")
    if row.power_cap_percent is not None:
        more.append(f"boards limited to {row.power_cap_percent} %")
    if row.cost_per_hour is not None:
        more.append(f"{row.cost_per_hour:g}/h each")
    if row.watts is not None:
        more.append(f"{row.watts:g} W together")
    return f"{words} ({', '.join(more)})" if more else words


def change_words(entry: ScalingDecision) -> str:
    """The numbers of one change: from how many to how many, in which pools, and for which load."""
    before, after = entry.previous_pools or {}, entry.desired_pools or {}
    words = f"{entry.previous} → {entry.desired}"
    if len({*before, *after}) > 1:
        words = f"{entry.previous}{_pools(before)} → {entry.desired}{_pools(after)}"
    if entry.requests_per_second is not None:
        words += f" for {entry.requests_per_second:.3g} requests/s"
    return words


def _pools(pools: Mapping[str, int]) -> str:
    return f" ({', '.join(f'{name} {count}' for name, count in sorted(pools.items()))})" if pools else ""
