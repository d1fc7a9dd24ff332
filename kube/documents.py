"""YAML and JSON as people write them, read alike by the command line, the engines and the API.

YAML is limited to what JSON can express, as in kubectl: dates stay text and `1e-4` is a number. A name that stands twice in one
object is refused, because all but the last value would be lost unseen.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

import yaml

_FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)
"""Also without a dot or the exponent's sign, which YAML 1.1 wants."""
LONGEST_SHOWN = 80
"""Characters of what somebody sent that an error message shows: longer than the model ids of most registries."""


def shown(sent: object) -> str:
    """What somebody sent, a text in quotes, for a message that it must not fill."""
    if isinstance(sent, str):
        return repr(sent) if len(sent) <= LONGEST_SHOWN else f"{sent[:LONGEST_SHOWN]!r}…"
    text = repr(sent)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}…"


class DocumentError(ValueError):
    """The text is no YAML or JSON, or says something that would be lost; the message says where and why."""

    def __init__(self, message: str, field: str | None = None) -> None:
        """`field` is the name that stands twice in a JSON object, cut to `LONGEST_SHOWN`."""
        super().__init__(message)
        self.field = field


class _Loader(yaml.SafeLoader):
    """YAML 1.1 without dates, and without equal names in one object."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"{key.value!r} is there twice in one object; name it once",
                    problem_mark=key.start_mark,
                )
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else id(key))
        return node


class _AliasFreeLoader(_Loader):
    """Without aliases, so that a short text cannot expand to a huge object."""

    def compose_node(self, parent: Any, index: int) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases (*name) are not taken here; write it out")
        return super().compose_node(parent, index)


_REPLACED = ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:float")
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _REPLACED]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(rf"(?:{_FLOAT.pattern})\Z"), list("-+0123456789.")
)


def documents_of_yaml(text: str, *, aliases: bool = True) -> list[Any]:
    """The documents of a YAML text that are not empty, as JSON values. Raises DocumentError.

    Args:
        aliases: whether `*name` may stand for what is written elsewhere in the text.
    """
    try:
        found = list(yaml.load_all(text, _Loader if aliases else _AliasFreeLoader))
        return [json.loads(json.dumps(one, allow_nan=False)) for one in found if one is not None]
    except yaml.YAMLError as error:
        raise DocumentError(str(error)) from error
    except RecursionError as error:
        raise DocumentError("it is nested too deeply, or stands for itself") from error
    except (TypeError, ValueError) as error:
        raise DocumentError(f"it says what JSON cannot: {error}") from error


def value_of_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises DocumentError."""
    try:
        return json.loads(text, object_pairs_hook=_unrepeated, parse_constant=_no_number, parse_float=_finite)
    except RecursionError as error:
        raise DocumentError("it is nested too deeply") from error
    except DocumentError:
        raise
    except ValueError as error:
        raise DocumentError(str(error)) from error


def _unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        name = twice[:LONGEST_SHOWN]
        raise DocumentError(f"{name!r} is there twice in one object; name it once", name)
    return found


def _no_number(text: str) -> NoReturn:
    raise DocumentError(f"{text} is no number of JSON")


def _finite(text: str) -> float:
    found = float(text)
    return found if math.isfinite(found) else _no_number(text[:LONGEST_SHOWN])
