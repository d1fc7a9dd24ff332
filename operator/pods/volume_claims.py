"""The PersistentVolumeClaims that pods mount, and which of them do not exist.

Kubernetes keeps a pod whose claim is missing waiting, with its place, for ever. So a job or a replica whose claim does not
exist is in no plan (reason `ClaimMissing`): it takes no accelerators and stops nobody for them. What is bound or not is
the volume plugin's business: a claim may well be bound only when its first pod has a node.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from busbar.kube.informer import Key
from busbar.kube.types import ModelService, TrainingJob
from busbar.kube.types.meta import claim_of
from busbar.kube.types.reasons import Reason
from busbar.kube.types.service_status import ModelServiceStatus
from busbar.kube.types.training_status import TrainingJobStatus

_SCHEME = "pvc://"


def claims_of_job(job: TrainingJob) -> tuple[str, ...]:
    """The names of the claims that each of its pods mounts, in order."""
    spec, found = job.spec, []
    if spec.output is not None:
        found += [spec.output.uri, spec.checkpoint.uri]
    if spec.engine is not None:
        engine = spec.engine
        found += [engine.data.uri, engine.model.uri]
        found += [engine.tokenizer.uri] if engine.tokenizer is not None else []
        found += [each.data.uri for each in engine.adapters or () if each.data is not None]
    own = [v.claim for v in (spec.template.volumes or ()) if v.claim] if spec.template is not None else []
    return tuple(sorted({*_named(found), *own}))


def claims_of_service(service: ModelService, model_uri: str) -> tuple[str, ...]:
    """The names of the claims that each of its replicas mounts, in order; its weights are at `model_uri`."""
    return tuple(sorted({*_named([model_uri, *(a.uri for a in service.spec.adapters or ())])}))


def missing(namespace: str, claims: Iterable[str], existing: Collection[Key]) -> str:
    """What is missing and what to do, as a sentence; empty: they all exist."""
    absent = [name for name in claims if Key(namespace, name) not in existing]
    if not absent:
        return ""
    many = len(absent) > 1
    which = (
        f"PersistentVolumeClaim{'s' if many else ''} {', '.join(absent)} {'do' if many else 'does'} not exist"
    )
    return f"{which} in namespace {namespace}; it starts when {'they are' if many else 'it is'} there."


def lacks_claims(status: TrainingJobStatus | ModelServiceStatus | None) -> bool:
    """Whether the status says that it waits for a claim: no plan counts with it until the status says otherwise."""
    return status is not None and status.reason == Reason.CLAIM_MISSING


def _named(addresses: Iterable[str | None]) -> list[str]:
    return [claim_of(address)[0] for address in addresses if address and address.startswith(_SCHEME)]
