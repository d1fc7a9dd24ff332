"""The bounds of our schemas as one line each, and manifests that are just beyond and just within each of them.

`bounds.txt` is the frozen list. A bound that disappears from a schema makes its line's test fail, because the
manifest beyond it is no longer refused in the bound's own words; a bound that appears without a line fails another
test. `python -m tests.cluster.bounds` prints the list that the schemas have now.

A line is `kind path keyword limit`; in a path, `[]` is an item of a list and `{}` a value of a map.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.manifests import BASES, JSON
from tools.generate_crds import crd

from busbar.kube.types import KINDS
from busbar.kube.types.rules import NEVER

FROZEN = Path(__file__).with_name("bounds.txt")
NUMERIC = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
KEYWORDS = (
    "pattern",
    "enum",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
)
UNFIT = " !unfit "
"""A string that no pattern and no enumeration of our schemas accepts."""


@dataclass(frozen=True)
class Bound:
    """One bound; `limit` is the JSON text of its value."""

    kind: str
    path: str
    keyword: str
    limit: str

    def __str__(self) -> str:
        return f"{self.kind} {self.path} {self.keyword} {self.limit}"

    @classmethod
    def parse(cls, line: str) -> Bound:
        kind, path, keyword, limit = line.split(" ", 3)
        return cls(kind, path, keyword, limit)


def schema_of(kind: str) -> JSON:
    """The structural schema of a kind."""
    schema: JSON = crd(KINDS[kind])["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema


def bounds_of(kind: str) -> Iterator[Bound]:
    """All bounds of a kind's spec."""

    def walk(node: JSON, path: str) -> Iterator[Bound]:
        if any(rule["rule"] == NEVER for rule in node.get("x-kubernetes-validations", ())):
            return  # no manifest with this field is accepted
        for keyword in KEYWORDS:
            if keyword in node:
                yield Bound(kind, path, keyword, json.dumps(node[keyword]))
        for low in ("minimum", "maximum"):
            if low in node:
                exclusive = "exclusive" + low.capitalize()
                yield Bound(kind, path, exclusive if node.get(exclusive) else low, json.dumps(node[low]))
        if node.get("x-kubernetes-list-type") in ("set", "map"):
            yield Bound(kind, path, "unique", json.dumps(node.get("x-kubernetes-list-map-keys", [])))
        for name in node.get("required", ()):
            yield Bound(kind, f"{path}.{name}", "required", "true")
        for name, child in node.get("properties", {}).items():
            yield from walk(child, f"{path}.{name}")
        if "items" in node:
            yield from walk(node["items"], f"{path}[]")
        if "additionalProperties" in node:
            yield from walk(node["additionalProperties"], f"{path}{{}}")

    yield from walk(schema_of(kind)["properties"]["spec"], "spec")


def frozen() -> list[Bound]:
    """The committed list."""
    lines = FROZEN.read_text(encoding="utf-8").splitlines()
    return [Bound.parse(line) for line in lines if line and not line.startswith("#")]


Place = list[str | int]


def locate(document: Any, path: str) -> Place | None:
    """The keys that lead to a value for this path in an accepted manifest; None when it has none."""
    steps = path.replace("[]", ".[]").replace("{}", ".{}").split(".")

    def search(node: Any, rest: list[str]) -> Place | None:
        if not rest:
            return []
        step, *more = rest
        options: list[str | int]
        if step == "[]":
            options = list(range(len(node))) if isinstance(node, list) else []
        elif step == "{}":
            options = list(node) if isinstance(node, dict) else []
        else:
            options = [step] if isinstance(node, dict) and step in node else []
        for option in options:
            found = search(node[option], more)
            if found is not None:
                return [option, *found]
        return None

    return search(document, steps)


def base_for(bound: Bound) -> tuple[JSON, Place]:
    """The accepted manifest that uses this path, and where. Raises AssertionError when none does."""
    for make in BASES[bound.kind]:
        document = make()
        place = locate(document, bound.path)
        if place is not None:
            return document, place
    raise AssertionError(
        f"no accepted manifest in manifests.py uses {bound.kind} {bound.path}; add the field"
    )


def changed(document: JSON, place: Place, value: Any) -> JSON:
    """A copy with another value there; `...` removes it."""
    copied = copy.deepcopy(document)
    node: Any = copied
    for step in place[:-1]:
        node = node[step]
    if value is ...:
        del node[place[-1]]
    else:
        node[place[-1]] = value
    return copied


def value_at(document: Any, place: Place) -> Any:
    """The value there."""
    for step in place:
        document = document[step]
    return document


def field_of(place: Place) -> str:
    """The field's path as the API server writes it."""
    text = ""
    for step in place:
        text += f"[{step}]" if isinstance(step, int) else f".{step}"
    return text.removeprefix(".")


@dataclass(frozen=True)
class Pair:
    """A refused manifest, its accepted neighbour, the words and the field of the refusal."""

    bad: JSON
    good: JSON
    words: str
    field: str


def pair_for(bound: Bound) -> Pair:
    """Manifests just beyond and just within a bound."""
    document, place = base_for(bound)
    old, limit = value_at(document, place), json.loads(bound.limit)
    bad, good, words = _values(bound, old, limit)
    # The API server names the second of two equal items.
    field = f"{field_of(place)}[{len(old)}]" if bound.keyword == "unique" else field_of(place)
    return Pair(changed(document, place, bad), changed(document, place, good), words, field)


def _values(bound: Bound, old: Any, limit: Any) -> tuple[Any, Any, str]:
    step: float = 1 if isinstance(old, int) else 0.001
    said = f"{limit:g}" if isinstance(old, float) else limit
    match bound.keyword:
        case "required":
            return ..., old, "Required value"
        case "enum":
            return UNFIT, old, "Unsupported value"
        case "pattern":
            return UNFIT, old, "should match"
        case "minimum":
            return limit - step, limit, f"should be greater than or equal to {said}"
        case "maximum":
            return limit + step, limit, f"should be less than or equal to {said}"
        case "exclusiveMinimum":
            return limit, limit + step, f"should be greater than {said}"
        case "exclusiveMaximum":
            return limit, limit - step, f"should be less than {said}"
        case "minLength":
            return "", old, "should be at least 1 chars long"
        case "maxLength":
            return _text(old, limit + 1), _text(old, limit), f"may not be more than {limit} bytes"
        case "minItems":
            return old[: limit - 1], old, f"should have at least {limit} items"
        case "maxItems":
            return (
                _items(bound, old, limit + 1),
                _items(bound, old, limit),
                f"must have at most {limit} items",
            )
        case "minProperties":
            return {}, old, f"should have at least {limit} properties"
        case "maxProperties":
            return _entries(old, limit + 1), _entries(old, limit), f"must have at most {limit} items"
        case "unique":
            return [*old, old[0]], old, "Duplicate value"
    raise AssertionError(f"no manifests are known for {bound.keyword}")


def _text(old: str, length: int) -> str:
    is_quantity = old[:1].isdigit()
    return "1".zfill(length) if is_quantity else old + "a" * (length - len(old))


def _items(bound: Bound, old: list[Any], count: int) -> list[Any]:
    if bound.path in ("spec.budgets", "spec.inference.budgets"):  # its key has only three values
        return [{**old[0], "period": period} for period in ("day", "week", "month", "month")[:count]]
    first = old[0]
    if isinstance(first, str):
        return [f"{first}{i}" for i in range(count)]
    if isinstance(first, dict):
        key = next((k for k in ("name", "accelerator") if k in first), None)
        return [{**first, key: f"{first[key]}{i}"} if key else copy.deepcopy(first) for i in range(count)]
    return [first] * count


def _entries(old: dict[str, Any], count: int) -> dict[str, Any]:
    key, value = next(iter(old.items()))
    return {f"{key}{i}": value for i in range(count)}


if __name__ == "__main__":
    print(
        "# The bounds of the specs, one each. `python -m tests.cluster.bounds` prints what the schemas have now."
    )
    for each in KINDS:
        for bound in bounds_of(each):
            print(bound)
