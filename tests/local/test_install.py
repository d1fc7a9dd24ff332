"""Installing on a cluster that has only just started."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from busbar.local.errors import StartError
from busbar.local.install import apply_patiently
from busbar.local.kubectl import Kubectl, Object

NOT_YET = "denied request: failed to configure policy: failed to find resource referenced by paramKind"
NO_KIND = 'unable to recognize no matches for kind "Tenant" in version "busbar.dev/v1alpha1"'


class Scripted(Kubectl):
    """Answers applies with these errors, one after the other, and then accepts."""

    def __init__(self, *complaints: str) -> None:
        super().__init__(Path("nowhere"))
        object.__setattr__(self, "complaints", list(complaints))
        object.__setattr__(self, "applied", [])

    complaints: list[str]
    applied: list[Object]

    def apply(self, objects: Iterable[Object], *, owner: str = "busbar-local") -> None:
        if self.complaints:
            raise StartError(self.complaints.pop(0))
        self.applied.extend(objects)


def test_kinds_that_are_not_served_yet_are_waited_for() -> None:
    kubectl = Scripted(NO_KIND, NOT_YET)
    apply_patiently(kubectl, [{"kind": "Tenant"}], pause_s=0)
    assert kubectl.applied == [{"kind": "Tenant"}]


def test_another_refusal_is_told_at_once() -> None:
    kubectl = Scripted("tenants.busbar.dev is forbidden: no such quota", NOT_YET)
    with pytest.raises(StartError, match="no such quota"):
        apply_patiently(kubectl, [{"kind": "Tenant"}], pause_s=0)
    assert kubectl.complaints == [NOT_YET]
