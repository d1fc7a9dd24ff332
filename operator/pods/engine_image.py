"""Whether a run's pods are the platform's own engine, by the digest of the image that their containers run.

A speed is shared between tenants only where the platform's engine reported it. Members cannot write what is compared:
the pod's ``spec.image`` is the operator's (the policy ``busbar-pod-writes``), ``containerStatuses[].imageID`` the
kubelet's. A run passes when all its pods name the configured image, all have one digest, and that digest is accepted:
one of ``workloads.acceptedDigests``, or the one in the configured reference; where neither is given, any digest is.
The result is in ``status.admission.image``: made when all pods run, and withdrawn for good if a container is later
seen under another digest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from busbar.kube.types.training_status import CheckedImage
from busbar.operator.watch.projections import Pod

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True)
class EngineImage:
    """The platform's own image, as the operator is configured."""

    reference: str
    accepted: tuple[str, ...] = ()

    @property
    def digests(self) -> frozenset[str]:
        """The accepted digests; empty: any."""
        return frozenset((*self.accepted, digest_of(self.reference))) - {""}


def digest_of(image: str) -> str:
    """The digest at the end of a reference or an imageID; empty where there is none.

    Runtimes write ``repository@sha256:…``, with a scheme before it or not, or the bare digest of an image that was
    loaded rather than pulled.
    """
    found = image.rpartition("@")[2].rpartition("//")[2]
    return found if _DIGEST.fullmatch(found) else ""


def check(before: CheckedImage | None, pods: Iterable[Pod], engine: EngineImage) -> CheckedImage:
    """Checks the pods of one run.

    Args:
        before: the result of the last check; an image that was refused stays refused.
        pods: all pods of the run.
    """
    pods = tuple(pods)
    if before is None or not before.digest:
        return _first(pods, engine)
    if not before.verified:
        return before
    # Only the digest is compared again: the configured image changes with the operator's release, a run's does not.
    for pod in pods:
        digest = digest_of(pod.image_id)
        if digest and digest != before.digest:
            text = f"Pod {pod.key.name} went on with another image, {digest}."
            return before.model_copy(update={"verified": False, "message": text})
    return before


def _first(pods: tuple[Pod, ...], engine: EngineImage) -> CheckedImage:
    digests = {digest_of(pod.image_id) for pod in pods}
    digest = min(digests) if len(digests) == 1 else ""
    if "" in digests or not digests:
        return CheckedImage(verified=False, message="The node names no digest of the image that runs.")
    foreign = next((pod for pod in pods if pod.image != engine.reference), None)
    if foreign is not None:
        text = f"Pod {foreign.key.name} runs {foreign.image[:300]}, not the platform's image."
    elif not digest:
        text = "The pods run images of different digests."
    elif engine.digests and digest not in engine.digests:
        text = "The image that runs has a digest that is not accepted."
    else:
        return CheckedImage(verified=True, digest=digest)
    return CheckedImage(verified=False, digest=digest or max(digests), message=text)
