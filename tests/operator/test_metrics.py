"""The operator's metrics: names that alerts and dashboards depend on, and what is shown of the pools."""

from __future__ import annotations

from tests.operator.builders import pool

from busbar.kube.types import AcceleratorPool
from busbar.kube.types.accelerator_pool import AcceleratorPoolStatus, ForeignCapacity
from busbar.operator.metrics import Metrics
from busbar.operator.power.metrics import PowerMetrics
from busbar.operator.serving.metrics import ScalingMetrics

NAMES = {
    "busbar_accelerators",
    "busbar_budget_used_ratio",
    "busbar_clock_behind_seconds",
    "busbar_energy_joules",
    "busbar_events",
    "busbar_forecast_kept_ratio",
    "busbar_forecast_promises",
    "busbar_forecast_seconds",
    "busbar_forecasts",
    "busbar_jobs",
    "busbar_lease_held",
    "busbar_operator_start_time_seconds",
    "busbar_phase_transitions",
    "busbar_plan_actions",
    "busbar_power_actuation_seconds",
    "busbar_power_board_limit_watts",
    "busbar_elastic_gives",
    "busbar_mix_solve_seconds",
    "busbar_power_board_watts",
    "busbar_power_capped_seconds",
    "busbar_power_domain_watts",
    "busbar_power_lease_watts",
    "busbar_power_meter_error_ratio",
    "busbar_power_slowdown_ratio",
    "busbar_power_nodes",
    "busbar_power_overrun_seconds",
    "busbar_power_preemptions",
    "busbar_power_telemetry_age_seconds",
    "busbar_power_unlimited_nodes",
    "busbar_quarantined_speeds",
    "busbar_queue_depth",
    "busbar_reconciles",
    "busbar_refused_plans",
    "busbar_scheduling_round_seconds",
    "busbar_service_capacity_rps",
    "busbar_service_demand_rps",
    "busbar_service_lost_replicas",
    "busbar_service_reaction_seconds",
    "busbar_service_replicas",
    "busbar_service_scale_decisions",
    "busbar_service_slo_ratio",
    "busbar_waiting_jobs",
    "busbar_watch_age_seconds",
    "busbar_workload_polls",
    "busbar_writes",
}


def seen(name: str, accelerator: str, **status: object) -> AcceleratorPool:
    found = pool(name, accelerator=accelerator)
    return found.model_copy(update={"status": AcceleratorPoolStatus.model_validate(status)})


def shown(metrics: Metrics, accelerator: str) -> list[float | None]:
    return [
        metrics.registry.get_sample_value("busbar_accelerators", {"accelerator": accelerator, "state": state})
        for state in ("capacity", "allocated", "held_elsewhere")
    ]


def test_the_names_of_the_metrics() -> None:
    registry = Metrics().registry
    PowerMetrics(registry)
    ScalingMetrics(registry)
    assert {family.name for family in registry.collect()} == NAMES


def test_pools_are_summed_by_type_and_not_named() -> None:
    metrics = Metrics()
    foreign = ForeignCapacity(accelerators=2, pods=1)
    metrics.show_pools(
        [
            seen("a", "H100", capacity=8, allocated=3),
            seen("b", "H100", capacity=6, allocated=0, held_elsewhere=foreign),
            seen("c", "L4", capacity=0),
            pool("new", accelerator="V100"),
        ]
    )
    assert shown(metrics, "H100") == [14, 3, 2]
    assert shown(metrics, "L4") == [0, 0, 0]
    assert shown(metrics, "V100") == [None, None, None]


def test_a_type_whose_pools_are_gone_is_shown_no_longer() -> None:
    metrics = Metrics()
    metrics.show_pools([seen("a", "H100", capacity=8)])
    metrics.show_pools([])
    assert shown(metrics, "H100") == [None, None, None]
