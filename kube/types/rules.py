"""One cross-field rule, said once for the API server and once for Python.

A union ("exactly one of engine and template"), an order (`minPods <= maxPods`) or an immutability cannot be
expressed by the type of one field. Each is a `Rule`: a CEL expression that the CRD carries, a sentence for
whoever broke it, and a Python predicate that says the same for manifests which never meet an API server
(`busbar train job.yaml`, previews). A transition rule compares with the old object, so it has no predicate.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rule:
    """What must hold of one model; `message` is the sentence shown when it does not."""

    cel: str
    message: str
    holds: Callable[[Any], bool] | None = None
    field_path: str | None = None
    """Path below the model that the error points at, e.g. `.engine`; default the model itself."""

    def to_schema(self) -> dict[str, str]:
        """The rule as one item of `x-kubernetes-validations`."""
        item = {"rule": self.cel, "message": self.message}
        if self.field_path is not None:
            item["fieldPath"] = self.field_path
        return item


def exactly_one_of(*fields: str, message: str) -> Rule:
    """A union: exactly one of the (camelCase) fields is present."""
    return Rule(
        cel=f"[{', '.join(f'has(self.{name})' for name in fields)}].exists_one(present, present)",
        message=message,
        holds=lambda model: sum(_by_alias(model, name) is not None for name in fields) == 1,
    )


def at_most_one_of(*fields: str, message: str) -> Rule:
    """A union that may be left out: at most one of the (camelCase) fields is present."""
    return Rule(
        cel=f"[{', '.join(f'has(self.{name})' for name in fields)}].filter(present, present).size() <= 1",
        message=message,
        holds=lambda model: sum(_by_alias(model, name) is not None for name in fields) <= 1,
    )


def immutable(field: str, *, required: bool = False, while_running: bool = False) -> Rule:
    """A field that keeps its first value; with `while_running`, one that may change under `suspend: true`."""
    unchanged = f"self.{field} == oldSelf.{field}"
    if not required:
        unchanged = f"has(self.{field}) == has(oldSelf.{field}) && (!has(self.{field}) || {unchanged})"
    if while_running:
        return Rule(
            cel=f"oldSelf.suspend || ({unchanged})",
            message=f"spec.{field} can change only while spec.suspend is true; suspend the object first",
        )
    return Rule(
        cel=unchanged, message=f"spec.{field} cannot change after creation; make a new object instead"
    )


def _by_alias(model: Any, alias: str) -> Any:
    for name, info in type(model).model_fields.items():
        if (info.alias or name) == alias:
            return getattr(model, name)
    raise AttributeError(f"{type(model).__name__} has no field {alias}")
