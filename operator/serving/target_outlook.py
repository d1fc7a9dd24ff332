"""Whether some type could keep a service's latency target before any replica has run: said in previews.

Requests are not known then, so the target is held against the shortest one, alone. Nothing was measured either: data sheets give
the least that a type could take (`scheduler/autoscale/predicted.prior`); what they rule out, no measurement will allow.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from busbar.kube.types import AcceleratorPool, ModelService
from busbar.operator.profiles.table import Workload
from busbar.operator.serving.engine_mode import engine_fit
from busbar.operator.serving.fleet_input import nearest, usable_pools
from busbar.operator.serving.replica_speed import slo_of
from busbar.scheduler.autoscale.predicted import prior
from busbar.scheduler.autoscale.step_model import Bucket, StepModel, max_rate
from busbar.scheduler.errors import ServingModelError

SHORTEST = Bucket(1, 1)
"""The request that every type answers soonest."""


def target_outlook(
    service: ModelService,
    pools: Iterable[AcceleratorPool],
    tenant: str,
    made_by: Workload | None,
) -> str:
    """A sentence where no type that the service may use can keep its target, with the one that comes nearest; empty where one may,
    or where one is not known."""
    slo = slo_of(service.spec.slo)
    if slo is None:
        return ""
    found: list[StepModel] = []
    for pool in usable_pools(service, pools, tenant):
        fit = engine_fit(service, made_by, pool)
        if fit is None:
            return ""
        with suppress(ServingModelError):  # it does not fit there
            found.append(prior(fit.model, fit.serving, fit.place))
    if not found or any(max_rate(model, SHORTEST, slo) > 0 for model in found):
        return ""
    return (
        f"No type keeps spec.slo at any load: by data sheets {nearest(found, SHORTEST)}, and the target is"
        f" {1000 * slo.ttft_s:g} ms and {1000 * slo.tpot_s:g} ms. The service will serve and not be Ready; set a target that is"
        " above these times, or a smaller model."
    )
