"""Cross-field rules, each in a form for the API server and one for Python.

A union ("exactly one of engine and template"), an order (`minPods <= maxPods`) or an immutability cannot be
expressed by the type of one field. Each is a `Rule`: a CEL expression in the CRD, an error message, and an equivalent
Python predicate for manifests that no API server checks (`busbar train job.yaml`). A transition rule compares with
the old object, so it has no predicate.

A field that nothing reads yet is `not_built`: the API server refuses it with a sentence. The models still read it,
because an object that was stored before the refusal must stay readable and changeable.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

NEVER = "false"
"""The CEL expression of a field that is always refused."""


@dataclass(frozen=True)
class Rule:
    """A condition on one model; `message` is shown when it is false."""

    cel: str
    message: str
    holds: Callable[[Any], bool] | None = None
    field_path: str | None = None
    """Path below the model that the error names, e.g. `.engine`; default the model itself."""

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


def not_built(message: str) -> dict[str, Any]:
    """`json_schema_extra` of a field that nothing reads yet: it is refused, and `message` says what to do.

    The rule is on the field itself, so the API server does not check it again when another field changes in an object
    that has the field already.
    """
    return {"x-kubernetes-validations": [Rule(NEVER, message).to_schema()]}


def refusal_of(schema_extra: Any) -> str | None:
    """The sentence of a field that is `not_built`; None for all others."""
    rules = schema_extra.get("x-kubernetes-validations", ()) if isinstance(schema_extra, dict) else ()
    return next((str(rule["message"]) for rule in rules if rule["rule"] == NEVER), None)


def refusals(model: BaseModel, path: str = "") -> list[tuple[str, str]]:
    """(path, sentence) of each field in the model that is set and not built."""
    found: list[tuple[str, str]] = []
    for name, info in type(model).model_fields.items():
        value, here = getattr(model, name), f"{path}.{info.alias or name}".lstrip(".")
        sentence = refusal_of(info.json_schema_extra)
        if sentence is not None and value is not None:
            found.append((here, sentence))
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, BaseModel):
                found += refusals(item, here)
    return found


def _by_alias(model: Any, alias: str) -> Any:
    for name, info in type(model).model_fields.items():
        if (info.alias or name) == alias:
            return getattr(model, name)
    raise AttributeError(f"{type(model).__name__} has no field {alias}")
