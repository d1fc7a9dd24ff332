"""What a ModelService may not ask of an engine that is not Busbar's: rules of the CRD, from the rows of `engines.py`.

Busbar's own engine keeps latency targets and parts of the KV cache itself, sleeps, hands streams over, and takes new
adapters while it runs. Other engines are not asked to, so a spec that wants it is refused.
"""

import re

from busbar.kube.types.engines import FOREIGN, ForeignEngine, ServiceEngine
from busbar.kube.types.rules import Rule

_OWN_ALONE = (
    Rule(
        cel="self.engine == 'builtin' || !has(self.access)"
        " || self.access.tenants.all(t, !has(t.guaranteedKv) && !has(t.maxKv))",
        message="guaranteedKv and maxKv of spec.access are kept by the builtin engine alone; leave them out for other"
        " engines",
        holds=lambda spec: (
            spec.engine is ServiceEngine.BUILTIN
            or spec.access is None
            or not any(t.has_kv_quota for t in spec.access.tenants)
        ),
    ),
    Rule(
        cel="!has(self.prefillReplicas) || self.engine == 'builtin'",
        message="prefillReplicas is for the builtin engine: Busbar has no other one hand streams over",
        holds=lambda spec: spec.prefill_replicas is None or spec.engine is ServiceEngine.BUILTIN,
    ),
)


def engine_rules() -> tuple[Rule, ...]:
    """Of all engines that are not ours."""
    return _OWN_ALONE + tuple(rule for row in FOREIGN.values() for rule in (*_of_each(row), *_of_lacks(row)))


def _of_each(row: ForeignEngine) -> tuple[Rule, ...]:
    name, other = row.engine.value, f"self.engine != '{row.engine.value}'"
    return (
        Rule(
            cel=f"{other} || has(self.image)",
            message=f"engine {name} needs spec.image, e.g. an image of {row.title}'s OpenAI server",
            holds=lambda spec: spec.engine is not row.engine or spec.image is not None,
        ),
        Rule(
            cel=f"{other} || !has(self.slo) || has(self.slo.ttftMilliseconds)",
            message=f"slo of engine {name} needs ttftMilliseconds: Busbar keeps its targets by the number of replicas alone",
            holds=lambda spec: (
                spec.engine is not row.engine or spec.slo is None or spec.slo.ttft_milliseconds is not None
            ),
        ),
        Rule(
            cel=f"{other} || !has(self.args) || self.args.all(a, !a.matches('{row.reserved_args}'))",
            message=f"--api-key and --config of engine {name} are set by Busbar; leave them out of spec.args",
            holds=lambda spec: (
                spec.engine is not row.engine
                or not any(re.match(row.reserved_args, arg) for arg in spec.args or ())
            ),
        ),
        Rule(
            cel=f"{other} || !has(self.scaling) || !has(self.scaling.warm) || self.scaling.warm.level == 'loaded'",
            message=f"Busbar does not use the sleep mode of engine {name}; set scaling.warm.level to loaded, or leave"
            " scaling.warm out",
            holds=lambda spec: (
                spec.engine is not row.engine
                or spec.scaling.warm is None
                or spec.scaling.warm.level == "loaded"
            ),
        ),
        Rule(
            cel=f"oldSelf.suspend || {other} || (has(self.adapters) == has(oldSelf.adapters) &&"
            " (!has(self.adapters) || self.adapters == oldSelf.adapters))",
            message=f"spec.adapters of engine {name} can change only while spec.suspend is true: they are its flags;"
            " suspend the object first",
        ),
    )


def _of_lacks(row: ForeignEngine) -> tuple[Rule, ...]:
    """What this engine alone does not take."""
    name, other = row.engine.value, f"self.engine != '{row.engine.value}'"
    found = []
    if row.kv_bytes_flag is None:
        found.append(
            Rule(
                cel=f"{other} || !has(self.kvCacheMemory)",
                message=f"kvCacheMemory is not for engine {name}, which takes no size in bytes: give {row.kv_args} in"
                " spec.args",
                holds=lambda spec: spec.engine is not row.engine or spec.kv_cache_memory is None,
            )
        )
    if not row.colon_in_model:
        found.append(
            Rule(
                cel=f"{other} || !has(self.modelId) || !self.modelId.contains(':')",
                message=f"modelId of engine {name} must have no colon: {row.title} takes what follows it for an adapter",
                holds=lambda spec: spec.engine is not row.engine or ":" not in (spec.model_id or ""),
            )
        )
    return tuple(found)
