"""A JSON schema, checked before it is compiled: its size, faults of its keywords by their place, and whether any finite
value fits it. Pure Python.

A schema like `{"$ref": "#"}`, or an object that requires another of its own kind, has no finite value: an answer
under it would never end. The grammar compiler does not see that, so this module does, by the least fixpoint of
"has a finite value" over the schema's parts. What it does not know (a foreign `$ref`, say) it takes for finite; the
compiler refuses what it cannot compile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from busbar.kube.documents import shown
from busbar.workloads.serving.errors import BadRequest

MAX_PARTS = 5_000
"""Objects and lists of a schema; compiling this many takes under a second."""
MAX_PASSES = 50
"""Rounds of the fixpoint; each one follows a reference back, so this is the depth of references in circles."""
_SIMPLE_TYPES = frozenset({"null", "boolean", "integer", "number", "string"})
_TYPES = sorted(_SIMPLE_TYPES | {"array", "object"})
_CHOICES = ("anyOf", "enum", "oneOf")
"""Keywords whose list says what a value may be; nothing fits an empty one."""
_ONE_SCHEMA = frozenset(
    [
        "additionalProperties",
        "contains",
        "else",
        "if",
        "items",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
    ]
)
_LIST_OF_SCHEMAS = frozenset(("allOf", "anyOf", "items", "oneOf", "prefixItems"))
_SCHEMAS_BY_NAME = frozenset(["$defs", "definitions", "dependentSchemas", "patternProperties", "properties"])


def check_schema(schema: object, param: str) -> int:
    """How many parts a schema has. Raises BadRequest for one that is too large or wrong, or that no finite value fits."""
    if not isinstance(schema, dict | bool):
        raise BadRequest(f"{param} must be a JSON schema: an object, not {shown(schema)}", param=param)
    parts = _parts(schema)
    if len(parts) > MAX_PARTS:
        raise BadRequest(f"{param} has more than {MAX_PARTS} parts; simplify the schema", param=param)
    _refuse_faults(schema, param)
    finite: set[int] = set()
    for _ in range(MAX_PASSES):
        before = len(finite)
        for part in reversed(parts):
            if id(part) not in finite and _is_finite(part, schema, finite):
                finite.add(id(part))
        if isinstance(schema, bool) or id(schema) in finite:
            return len(parts)
        if len(finite) == before:
            break
    raise BadRequest(
        f"no finite value fits {param}: it requires itself without end. Make a recursive property optional, or give "
        "it an alternative",
        param=param,
    )


def _parts(schema: object) -> list[object]:
    """Every object and list of a schema, a part before those inside it, up to one more than may be."""
    found: list[object] = []
    todo = [schema]
    while todo and len(found) <= MAX_PARTS:
        part = todo.pop()
        if isinstance(part, dict | list):
            found.append(part)
            todo += part.values() if isinstance(part, dict) else part
    return found


def _refuse_faults(schema: object, param: str) -> None:
    """Raises BadRequest for the first keyword that means nothing, with its place."""
    todo = [("", schema)]
    while todo:
        place, part = todo.pop()
        fault = _fault(part)
        if fault:
            where = f" at {shown(place)}" if place else ""
            raise BadRequest(f"{param} is wrong{where}: {fault}", param=param)
        todo += reversed(list(_schemas_in(place, part)))


def _fault(part: object) -> str:
    """What is wrong with a schema, without those inside it; empty: nothing is known to be."""
    if isinstance(part, bool):
        return ""
    if not isinstance(part, dict):
        return f"a schema is an object, true or false, and this is {shown(part)}"
    types = part.get("type", "object")
    names = types if isinstance(types, list) else [types]
    if not names or any(name not in _TYPES for name in names):
        return f"type is {shown(types)}; write {', '.join(_TYPES)}, or a list of several of them"
    empty = [name for name in _CHOICES if part.get(name) == []]
    return f"{empty[0]} is an empty list, which no value fits; name what may be" if empty else ""


def _schemas_in(place: str, part: object) -> Iterator[tuple[str, object]]:
    """The schemas directly inside of one, each with its place. Values of `const`, `enum`, `default` are none."""
    for keyword, value in part.items() if isinstance(part, dict) else ():
        inside = f"{place}/{keyword}"
        if keyword in _SCHEMAS_BY_NAME and isinstance(value, dict):
            yield from ((f"{inside}/{name}", one) for name, one in value.items())
        elif keyword in _LIST_OF_SCHEMAS and isinstance(value, list):
            yield from ((f"{inside}/{number}", one) for number, one in enumerate(value))
        elif keyword in _ONE_SCHEMA:
            yield inside, value


def _is_finite(part: object, root: object, finite: set[int]) -> bool:
    """Whether a part certainly has a finite value, by what is known of the others."""
    if not isinstance(part, dict):
        return True
    return all(_conditions(part, root, finite))


def _conditions(part: Mapping[str, object], root: object, finite: set[int]) -> Iterator[bool]:
    """What must hold all together."""

    def known(schema: object) -> bool:
        return not isinstance(schema, dict) or id(schema) in finite

    reference = part.get("$ref")
    if isinstance(reference, str):
        yield known(_target(reference, root))
    every = part.get("allOf")
    if isinstance(every, list):
        yield all(map(known, every))
    for name in ("anyOf", "oneOf"):
        choices = part.get(name)
        if isinstance(choices, list):
            yield any(map(known, choices))
    if "const" in part or "enum" in part:
        return
    types = part.get("type")
    names = types if isinstance(types, list) else [types]
    if types is None or not _SIMPLE_TYPES.isdisjoint(name for name in names if isinstance(name, str)):
        return
    shapes = {"object": _needed_by_object, "array": _needed_by_array}
    yield any(name not in shapes or all(map(known, shapes[name](part))) for name in map(str, names))


def _needed_by_object(part: Mapping[str, object]) -> list[object]:
    """Schemas that every such object has a value of."""
    properties, required = part.get("properties"), part.get("required")
    given = properties if isinstance(properties, dict) else {}
    names = required if isinstance(required, list) else []
    others = part.get("additionalProperties")
    return [given.get(name, others) if isinstance(name, str) else None for name in names]


def _needed_by_array(part: Mapping[str, object]) -> list[object]:
    least = part.get("minItems")
    count = least if isinstance(least, int) else 0
    first = part.get("prefixItems")
    given = first if isinstance(first, list) else []
    return [*given[:count], *([part.get("items")] if count > len(given) else [])]


def _target(reference: str, root: object) -> object:
    """What a reference inside of the schema means; None for any other, which the compiler looks at."""
    if reference == "#":
        return root
    if not reference.startswith("#/"):
        return None
    found = root
    for step in reference[2:].split("/"):
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isascii() and name.isdigit() and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, dict):
            found = found.get(name)
        else:
            return None
    return found
