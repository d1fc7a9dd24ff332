"""What a caller may know of measured speeds.

Admins see PerformanceProfiles whole. A member sees those of the workload classes that a job of theirs has, on the
accelerators of pools that they may use: the cells and what people stated. Evidence, conduct and counts of doubted
reports are about other tenants' jobs, even without names, and stay with the admins.
"""

from __future__ import annotations

from collections.abc import Collection

from busbar.api.kubernetes import Object

SHOWN_OF_STATUS = ("observedGeneration", "conditions", "lastUpdated")
HIDDEN_OF_CELLS = ("quarantined",)


def classes_of(jobs: Collection[Object]) -> set[str]:
    """The workload classes of jobs, as the operator wrote them down."""
    return {str((job.get("status") or {}).get("workloadClass") or "") for job in jobs} - {""}


def profile_for_member(profile: Object, accelerators: Collection[str]) -> Object:
    """The part of a profile that a member may read."""
    meta = {
        key: profile["metadata"][key]
        for key in ("name", "uid", "creationTimestamp")
        if key in profile["metadata"]
    }
    spec, status = dict(profile["spec"]), profile.get("status") or {}
    if "cells" in spec:
        spec["cells"] = _on(spec["cells"], accelerators)
    cells = [
        {key: value for key, value in cell.items() if key not in HIDDEN_OF_CELLS}
        for cell in _on(status.get("cells") or [], accelerators)
    ]
    shown = {key: status[key] for key in SHOWN_OF_STATUS if key in status}
    measured = sum(cell.get("source") == "Measured" for cell in cells)
    shown["conditions"] = [{**c, "message": ""} for c in shown.get("conditions") or []]
    known = {**shown, "places": len(cells), "measured": measured, "cells": cells} if status else {}
    return {**profile, "metadata": meta, "spec": spec, "status": known}


def _on(cells: list[Object], accelerators: Collection[str]) -> list[Object]:
    return [cell for cell in cells if cell.get("accelerator") in accelerators]
