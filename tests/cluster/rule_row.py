"""A row of the tables of rules (`rule_rows.py`): a manifest that breaks only one rule, and its neighbour.

`change` and `neighbour` say what is different from the accepted manifest, as {path: value}; `...` removes the
field, and an empty change is the accepted manifest itself. A row with `before` is an update: the accepted manifest
with `before` is stored, and the change is applied to it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.cluster.manifests import JSON

Change = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One rule (by the path of its model and its message), and the two manifests."""

    base: Callable[[], JSON]
    at: str
    says: str
    change: Change
    neighbour: Change = field(default_factory=dict)
    before: Change | None = None
    blames: str = ""
    """The field that the refusal names; default `at` without its brackets."""

    @property
    def kind(self) -> str:
        return str(self.base()["kind"])

    @property
    def is_not_built(self) -> bool:
        """Whether the rule refuses a field whatever its value."""
        return self.says.endswith(" yet")

    @property
    def id(self) -> str:
        return f"{self.kind} {self.at or 'name'}: {self.says}"

    def stored(self) -> JSON:
        """The stored manifest before an update, as changes of the accepted one."""
        return edited(self.base(), self.before or {})

    def bad(self) -> JSON:
        return edited(self.stored(), self.change)

    def good(self) -> JSON:
        return edited(self.stored(), self.neighbour)


def edited(document: JSON, change: Change) -> JSON:
    """A copy with these paths set or removed; a step in digits is an item of a list."""
    copied = copy.deepcopy(document)
    for path, value in change.items():
        steps: list[Any] = [int(step) if step.isdigit() else step for step in path.split("/")]
        node: Any = copied
        for step in steps[:-1]:
            node = node[step]
        if value is ...:
            del node[steps[-1]]
        else:
            node[steps[-1]] = value
    return copied


SUSPENDED: Change = {"spec/suspend": True}
RUNNING: Change = {}
FIXED = "cannot change after creation"
WHILE_SUSPENDED = "can change only while spec.suspend is true"
