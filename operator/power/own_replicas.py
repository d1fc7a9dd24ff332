"""Which replicas run the platform's own engine, and where they were placed; looked at once for each image and place."""

from __future__ import annotations

from busbar.operator.pods.engine_image import EngineImage, check
from busbar.operator.pods.manifests import KIND_SERVICE
from busbar.operator.pods.replica_place import place_of
from busbar.operator.watch.projections import Pod
from busbar.scheduler import Placement

MOST = 16_384
"""Images and places that are kept; then they are looked at anew."""


class OwnReplicas:
    """Remembers what was found."""

    def __init__(self, engine: EngineImage) -> None:
        self._engine = engine
        self._places: dict[tuple[str, str, str], Placement | None] = {}

    def place(self, pod: Pod) -> Placement | None:
        """None: it is no replica of our engine, or its image was not checked."""
        if pod.kind != KIND_SERVICE:
            return None
        key = pod.image, pod.image_id, pod.placement
        if key not in self._places:
            if len(self._places) >= MOST:
                self._places.clear()
            verified = check(None, (pod,), self._engine).verified
            self._places[key] = place_of(pod) if verified else None
        return self._places[key]
