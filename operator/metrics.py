"""The operator's own numbers, in one registry that ``/metrics`` serves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from busbar.kube.types import AcceleratorPool, Tenant
from busbar.kube.types.budget import used_ratios


class Metrics:
    """The metrics. Their names never change: dashboards and tests depend on them."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self.reconciles = Counter(
            "busbar_reconciles_total", "Reconciles by kind and result", ["kind", "result"], registry=registry
        )
        self.transitions = Counter(
            "busbar_phase_transitions_total",
            "Phase changes by kind, phase and reason",
            ["kind", "phase", "reason"],
            registry=registry,
        )
        self.writes = Counter(
            "busbar_writes_total",
            "Writes by verb, resource and result",
            ["verb", "resource", "result"],
            registry=registry,
        )
        self.events = Counter(
            "busbar_events_total", "Kubernetes events by what became of them", ["result"], registry=registry
        )
        self.rounds = Histogram(
            "busbar_scheduling_round_seconds",
            "Time of one scheduling round, snapshot to plan",
            buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10),
            registry=registry,
        )
        self.actions = Counter(
            "busbar_plan_actions_total",
            "Actions of plans by kind and result",
            ["kind", "result"],
            registry=registry,
        )
        self.gives = Counter(
            "busbar_elastic_gives_total",
            "Training jobs that gave accelerators to replicas of services, by what became of them",
            ["became"],
            registry=registry,
        )
        self.refused_plans = Counter(
            "busbar_refused_plans_total",
            "Plans that the independent checker refused; nothing of them was carried out",
            registry=registry,
        )
        self.jobs = Gauge("busbar_jobs", "Objects by kind and phase", ["kind", "phase"], registry=registry)
        self.waiting = Gauge(
            "busbar_waiting_jobs", "Jobs that wait, by reason", ["reason"], registry=registry
        )
        self.quarantined = Gauge(
            "busbar_quarantined_speeds",
            "Jobs (or records of ended ones) whose reported speeds are not believed, by reason",
            ["reason"],
            registry=registry,
        )
        self.forecasts = Counter(
            "busbar_forecasts_total",
            "Forecasts of starts: made, none (it starts now, or never), late (not found in time)",
            ["result"],
            registry=registry,
        )
        self.forecast_time = Histogram(
            "busbar_forecast_seconds",
            "Time of one batch of forecasts, outside the operator's own process",
            buckets=(0.3, 1, 3, 10, 30, 100),
            registry=registry,
        )
        self.promises = Gauge(
            "busbar_forecast_promises",
            "First forecasts of a wait whose quantile's moment has passed, as far as they are remembered",
            ["quantile"],
            registry=registry,
        )
        self.kept_promises = Gauge(
            "busbar_forecast_kept_ratio",
            "Share of these whose job had started by then: the quantile itself would be perfect",
            ["quantile"],
            registry=registry,
        )
        self.queue = Gauge("busbar_queue_depth", "Keys that wait for a reconcile", registry=registry)
        self.watch_age = Gauge(
            "busbar_watch_age_seconds",
            "Time since a watch last said anything",
            ["resource"],
            registry=registry,
        )
        self.polls = Counter(
            "busbar_workload_polls_total", "Reads of workload ports by result", ["result"], registry=registry
        )
        self.leader = Gauge("busbar_lease_held", "1 while this process holds the lease", registry=registry)
        self.started = Gauge(
            "busbar_operator_start_time_seconds",
            "Unix time at which this process started",
            registry=registry,
        )
        self.clock_behind = Gauge(
            "busbar_clock_behind_seconds",
            "How far the machine's clock is ahead of the time that the operator goes by; a step is followed slowly",
            registry=registry,
        )
        self.accelerators = Gauge(
            "busbar_accelerators",
            "Accelerators of the pools' ready nodes by type: capacity (for jobs), allocated (by jobs, part of the "
            "capacity), held_elsewhere (by pods of no job, not part of it)",
            ["accelerator", "state"],
            registry=registry,
        )

        self.budgets = Gauge(
            "busbar_budget_used_ratio",
            "Part of a tenant's budget that is used, of the period in which it is most; resource: acceleratorHours, "
            "cost, kilowattHours",
            ["tenant", "resource"],
            registry=registry,
        )

    def show_budgets(self, tenants: Iterable[Tenant]) -> None:
        """Sets what the tenants' statuses say of their budgets."""
        self.budgets.clear()
        for tenant in tenants:
            uses = tenant.status.budgets if tenant.status is not None else None
            for resource, ratio in used_ratios(tenant.spec.budgets or (), uses or ()).items():
                self.budgets.labels(tenant.metadata.name, resource).set(ratio)

    def show_pools(self, pools: Iterable[AcceleratorPool]) -> None:
        """Sets what the pools' statuses say, summed by type of accelerator.

        Pools are not named: anybody who reaches the port may read it, and a pool may be some tenants' own.
        """
        found: defaultdict[tuple[str, str], float] = defaultdict(float)
        for pool in pools:
            status = pool.status
            if status is None or status.capacity is None:
                continue  # nothing is known of it yet
            held = status.held_elsewhere
            found[pool.spec.accelerator, "capacity"] += status.capacity
            found[pool.spec.accelerator, "allocated"] += status.allocated or 0.0
            found[pool.spec.accelerator, "held_elsewhere"] += held.accelerators if held is not None else 0.0
        self.accelerators.clear()
        for labels, amount in found.items():
            self.accelerators.labels(*labels).set(amount)
