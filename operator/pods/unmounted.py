"""Why pods that have their node do not run yet, as far as they tell.

A container that waits says why. Before it there are the pod's volumes and its network: while its node prepares these, the pod
has no condition but that it is not ready for its containers, and a ConfigMap or a Secret that does not exist keeps it so. What
the node says then is in events only, so after a while the names of what the pod mounts are told in their place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from datetime import datetime, timedelta

from busbar.kube.types import TrainingJob
from busbar.operator.pods.volume_claims import claims_of_job
from busbar.operator.watch.projections import Pod

MOUNTED_WITHIN_S = 20.0
"""A pod whose node prepares it for longer says so; a claim's disk may take some seconds to be attached."""


def why_not_started(pods: Iterable[Pod], now: datetime, mounts: Collection[str]) -> str:
    """Of the first pod that tells it; empty: nothing is wrong yet.

    Args:
        mounts: what each of the pods mounts, by kind and name.
    """
    pods = tuple(pods)
    told = next((pod.problem for pod in pods if pod.problem), "")
    if told:
        return told
    limit = timedelta(seconds=MOUNTED_WITHIN_S)
    late = [p for p in pods if p.unmounted_since is not None and now - p.unmounted_since >= limit]
    if not late:
        return ""
    pod = min(late, key=lambda pod: (pod.rank, pod.key))
    text = f"The volumes or the network of pod {pod.key.name} are not ready on {pod.node}."
    if mounts:
        text += f" It mounts {', '.join(mounts)}: one that does not exist keeps it waiting."
    return f"{text} `kubectl describe pod -n {pod.key.namespace} {pod.key.name}` shows what its node says."


def mounts_of_job(job: TrainingJob) -> list[str]:
    """What each of the job's pods mounts, by kind and name."""
    volumes = (job.spec.template.volumes or ()) if job.spec.template is not None else ()
    named = [
        f"{kind} {name}"
        for volume in volumes
        for kind, name in (("ConfigMap", volume.config_map), ("Secret", volume.secret))
        if name
    ]
    return named + mounts_of_claims(claims_of_job(job))


def mounts_of_claims(claims: Iterable[str]) -> list[str]:
    """The same of claims alone."""
    return [f"PersistentVolumeClaim {name}" for name in claims]
