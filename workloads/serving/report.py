"""This engine's cell for the performance table: what it is, what it holds, how fast it was."""

from __future__ import annotations

import hashlib
from dataclasses import asdict

from busbar.kube.contracts.report import ServingReport
from busbar.kube.contracts.workload import PhaseSteps, StepSums, TenantBlocks
from busbar.scheduler.fit.online import Speed
from busbar.workloads.serving.expert_stream import ExpertStreamedLayers
from busbar.workloads.serving.loader import Loaded
from busbar.workloads.serving.scheduler import Scheduler
from busbar.workloads.serving.settings import ServerSettings
from busbar.workloads.serving.stream import StreamedLayers
from busbar.workloads.serving.weightcodes import FORMS
from busbar.workloads.serving.weights import Layers


def workload_class(loaded: Loaded) -> str:
    """A readable name and a hash over architecture, dimensions, dtype, context length and what is kept in codes."""
    arch = loaded.arch
    dtype = str(loaded.dtype).removeprefix("torch.")
    identity = (
        f"{arch.family}/{arch.vocab_size}/{arch.hidden}/{arch.intermediate}/{arch.layers}/"
        f"{arch.heads}/{arch.kv_heads}/{arch.head_dim}/{dtype}/{loaded.core.max_model_len}"
    )
    if (routing := arch.routing) is not None:
        identity += f"/{routing.experts}/{routing.per_token}"
    form, coded = loaded.core.runner.cache.shape.form, loaded.weights_stored != dtype
    if form is not None or coded:
        kept = loaded.weights_stored + ("" if form is None else f"-kv-{form.name}")
        identity, dtype = f"{identity}/{kept}", kept
    digest = hashlib.sha256(identity.encode()).hexdigest()[:10]
    return f"serve-{arch.family}-{_short(arch.parameter_count)}-{dtype}-{digest}"


def table_report(loaded: Loaded, settings: ServerSettings) -> ServingReport:
    """Null where nothing was measured yet."""
    core = loaded.core
    shape = core.runner.cache.shape
    document = {
        "class": workload_class(loaded),
        "accelerator": settings.accelerator,
        "mode": _mode(loaded),
        "parameters": loaded.arch.parameter_count,
        "activeParameters": loaded.arch.active_parameter_count,
        "weightsStored": loaded.weights_stored,
        "weightBytes": loaded.weight_bytes,
        "kvStored": shape.stored,
        "kvBytes": loaded.kv_bytes,
        "kvBytesPerToken": shape.block_bytes // shape.block_tokens,
        "kvBlockTokens": shape.block_tokens,
        "maxModelLen": core.max_model_len,
        "preemptions": core.scheduler.preemption_count,
        "attention": loaded.attention,
        "batchInvariant": loaded.batch_invariant,
        "loadSeconds": round(loaded.load_s, 3),
        "guessedTokens": 0 if core.speculation is None else core.speculation.proposed_total,
        "guessedRight": 0 if core.speculation is None else core.speculation.accepted_total,
        **_drafted(loaded),
        **core.speed.report(),
        **_streamed(loaded),
    }
    return ServingReport.model_validate(document)


def _mode(loaded: Loaded) -> str:
    """The engine mode, as in `pod.MODES`."""
    if loaded.streaming is not None:
        return "stream"
    return loaded.weights_stored if loaded.weights_stored in FORMS else "resident"


def _drafted(loaded: Loaded) -> dict[str, object]:
    found, speculation = loaded.draft, loaded.core.speculation
    if found is None or speculation is None or speculation.drafts is None:
        return {}
    drafts = speculation.drafts
    return {
        "draftWeightBytes": found.weight_bytes,
        "draftKvBytes": found.kv_bytes,
        "draftedTokens": drafts.proposed_total,
        "draftedRight": drafts.accepted_total,
        "draftSeconds": drafts.model.seconds,
    }


def _streamed(loaded: Loaded) -> dict[str, object]:
    streaming, layers = loaded.streaming, loaded.core.runner.decoder.weights.layers
    if streaming is None:
        return {}
    rate = None  # asleep without weights
    if isinstance(layers, (StreamedLayers, ExpertStreamedLayers)):
        rate = layers.rate
    return {
        **_experts(loaded, layers),
        "streamedBytes": streaming.plan.pass_bytes,
        "streamSeconds": streaming.pass_s,
        "streamBytesPerSecond": None if rate is None else rate.lately,
        "streamIsSlow": rate is not None and rate.slow,
    }


def _experts(loaded: Loaded, layers: Layers) -> dict[str, object]:
    streaming = loaded.streaming
    if streaming is None or not isinstance(layers, ExpertStreamedLayers):
        return {}
    counts = layers.cache.counts
    return {
        "expertPlaces": streaming.plan.places,
        "expertQueries": counts.queries,
        "expertHits": counts.hits,
        "expertPrefetches": counts.prefetches,
        "expertPrefetchHits": counts.prefetch_hits,
        "expertReadBytes": counts.read_bytes,
    }


def phase_steps(speed: Speed) -> PhaseSteps:
    """What the steps of each phase were made of, and took. Any thread may ask."""
    prefill, decode = (StepSums.model_validate(asdict(of)) for of in (speed.prefill, speed.decode))
    return PhaseSteps(prefill=prefill, decode=decode)


def tenant_blocks(scheduler: Scheduler) -> list[TenantBlocks]:
    """Of each tenant with a quota: the KV blocks that it holds, that it always gets, and that it may hold."""
    quotas, held = scheduler.quotas, scheduler.pool.held
    return [
        TenantBlocks(
            tenant=name, held=held.get(name, 0), guaranteed=quotas.guaranteed(name), most=quotas.most(name)
        )
        for name in quotas.tenants
    ]


def _short(count: int) -> str:
    for size, letter in ((10**9, "b"), (10**6, "m"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.1f}{letter}".replace(".0", "")
    return str(count)
