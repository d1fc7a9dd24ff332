"""Settings of a process: a frozen dataclass, read once from environment variables by ``load``.

Each field is the variable ``PREFIX + FIELD`` in upper case: ``hold_timeout_s`` of the gateway is
``BUSBAR_GATEWAY_HOLD_TIMEOUT_S``. The field's type says how its text is read, and its name ends in its unit. A field
whose type is another dataclass (``oidc: Oidc | None``) has a prefix of its own, ``PREFIX_OIDC_``, and is None while none
of those variables has a value. ``setting`` says what a type cannot: a name that several processes share, or a file that
holds the value. ``Rule`` narrows a type, for example ``Annotated[int, Rule("1 or more", lambda n: n >= 1)]``. No number
may be negative or infinite.

A variable with the prefix that names no field is refused, so that a typing error does not silently mean the default;
only what Kubernetes itself sets for a Service of that name is passed over. All mistakes are reported together, each with
the variable, its value and what is expected. What a file holds is never shown.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from busbar.kube.errors import SettingsError

TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")
_SERVICE_LINK = re.compile(r"SERVICE_HOST|SERVICE_PORT(_.*)?|PORT(_\d+_.*)?")
_UNITS = {"s": "seconds", "hours": "hours", "days": "days", "bytes": "bytes", "kib": "KiB", "mib": "MiB"}

S = TypeVar("S")


@dataclass(frozen=True)
class Rule:
    """A condition on a value, and the words that say what is expected."""

    expected: str
    holds: Callable[[Any], bool]


Port = Annotated[int, Rule("a port, 0 to 65535", lambda n: n <= 65535)]
Positive = Annotated[float, Rule("above 0", lambda n: n > 0)]
Count = Annotated[int, Rule("1 or more", lambda n: n >= 1)]
Filled = Annotated[str, Rule("not empty; leave it out for the default", bool)]
LogFormat = Literal["json", "text"]
LogLevel = Literal["debug", "info", "warning", "error"]


def setting(
    default: Any = MISSING,
    *,
    own: bool = True,
    shared: str = "",
    file: str = "",
    required: bool = False,
    secret: bool = False,
) -> Any:
    """A dataclass field that is read in another way than by its own variable alone.

    Args:
        own: whether its own variable exists. It goes before a shared one, and after a file.
        shared: a variable that several processes read; an empty one counts as not set.
        file: a variable that names a file with the value, without white space at its ends.
        required: refuse an environment without it, although the dataclass has a default.
        secret: left out of messages and of the object's text.
    """
    told = {"own": own, "shared": shared, "file": file, "required": required, "secret": secret}
    return field(default=default, repr=not secret, metadata=told)


def load(
    kind: type[S], prefix: str, environ: Mapping[str, str], defaults: Mapping[str, object] | None = None
) -> S:
    """The settings that an environment describes.

    Args:
        kind: a dataclass.
        prefix: of its variables, for example ``BUSBAR_API_``.
        environ: usually ``os.environ``.
        defaults: values of fields that are not set, before the dataclass's own defaults.

    Raises:
        SettingsError: with a sentence for each variable that is unknown, missing or wrong.
    """
    faults: list[str] = []
    given = {name for name in environ if name.startswith(prefix)}
    read = _Reading(environ, given, faults)
    values = read.values(kind, prefix, defaults or {})
    faults += _unknown(given - read.known, read.known, prefix)
    if faults:
        raise SettingsError("; ".join(faults))
    return kind(**values)


def variables(kind: type, prefix: str) -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    """The variables of a dataclass without nested ones, with the field that each one sets."""
    for item in dataclasses.fields(kind):
        if item.metadata.get("own", True):
            yield prefix + item.name.upper(), item
        for other in ("shared", "file"):
            if item.metadata.get(other):
                yield item.metadata[other], item


class _Reading:
    """One pass over an environment: collects values, faults and the names that are known."""

    def __init__(self, environ: Mapping[str, str], given: set[str], faults: list[str]) -> None:
        self.environ, self.given, self.faults = environ, given, faults
        self.known: set[str] = set()

    def values(self, kind: type, prefix: str, defaults: Mapping[str, object]) -> dict[str, Any]:
        """Value by field name, of the fields that are set or have an entry in ``defaults``."""
        kinds = get_type_hints(kind, include_extras=True)
        found: dict[str, Any] = {}
        for item in dataclasses.fields(kind):
            inner = _nested(kinds[item.name])
            if inner is not None:
                below = f"{prefix}{item.name.upper()}_"
                if any(self.environ[name] for name in self.given if name.startswith(below)):
                    made = self.values(inner, below, {})
                    found[item.name] = None if self.faults else inner(**made)
                else:
                    self.known |= {name for name, _ in variables(inner, below)}
                continue
            variable, text, shown = self._text(prefix, item)
            if text is not None:
                found[item.name] = self._value(variable, text, shown, kinds[item.name], item.name)
            elif item.name in defaults:
                found[item.name] = defaults[item.name]
            elif item.metadata.get("required") or item.default is MISSING:
                self.faults.append(f"{variable} is not set: {_missing(variable, item)}")
        return found

    def _text(self, prefix: str, item: dataclasses.Field[Any]) -> tuple[str, str | None, bool]:
        """The variable that a field comes from, its text (None: not set) and whether a message may show it."""
        own = prefix + item.name.upper() if item.metadata.get("own", True) else ""
        file, shared = item.metadata.get("file", ""), item.metadata.get("shared", "")
        self.known |= {own, file, shared} - {""}
        shown = not item.metadata.get("secret")
        if file in self.environ:
            return file, self._file(file, self.environ[file]), False
        if own in self.environ:
            return own, self.environ[own], shown
        if self.environ.get(shared):
            return shared, self.environ[shared], shown
        return file or own or shared, None, shown

    def _file(self, variable: str, path: str) -> str:
        try:
            return Path(path).read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            self.faults.append(f"{variable}={path!r} cannot be read: {reason}")
            return ""

    def _value(self, variable: str, text: str, shown: bool, kind: Any, name: str) -> Any:
        if self.faults and self.faults[-1].startswith(f"{variable}="):
            return None  # its file could not be read
        base, *rules = get_args(kind) if get_origin(kind) is Annotated else (kind,)
        told = f"{variable}={text!r}" if shown else f"the value of {variable}"
        try:
            value = _convert(text, base, name)
            for rule in rules:
                if not rule.holds(value):
                    raise ValueError(rule.expected)
        except ValueError as error:
            self.faults.append(f"{told} is wrong; expected: {error}")
            return None
        return value


def _convert(text: str, kind: Any, name: str) -> Any:
    """The value that a text says. Raises ValueError with what was expected."""
    if get_origin(kind) is Literal:
        if text not in get_args(kind):
            raise ValueError("one of " + ", ".join(get_args(kind)))
        return text
    if kind is bool:
        if text.lower() not in TRUE + FALSE:
            raise ValueError("true or false")
        return text.lower() in TRUE
    if kind in (int, float):
        return _number(text, kind, name)
    if kind == tuple[str, ...]:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if kind is bytes:
        return text.encode()
    return kind(text)


def _number(text: str, kind: type, name: str) -> float:
    unit = _UNITS.get(name.rpartition("_")[2])
    expected = f"{'a whole number' if kind is int else 'a number'}{f' of {unit}' if unit else ''}, 0 or more"
    try:
        value: float = kind(text)
    except ValueError:
        raise ValueError(expected) from None
    if not math.isfinite(value) or value < 0:
        raise ValueError(expected)
    return value


def _nested(kind: Any) -> type | None:
    """The dataclass of a field ``X | None``, if X is one."""
    if get_origin(kind) not in (Union, UnionType):
        return None
    inner = [one for one in get_args(kind) if one is not NoneType]
    found = inner[0] if len(inner) == 1 else None
    return found if isinstance(found, type) and dataclasses.is_dataclass(found) else None


def _missing(variable: str, item: dataclasses.Field[Any]) -> str:
    if item.metadata.get("file"):
        return f"name the file that holds the {item.name.replace('_', ' ')}"
    return "it has no default"


def _unknown(names: set[str], known: set[str], prefix: str) -> Iterator[str]:
    mistaken = sorted(name for name in names if not _SERVICE_LINK.fullmatch(name.removeprefix(prefix)))
    for name in mistaken:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known settings are {', '.join(sorted(known))}"
        yield f"{name} is not a setting; {hint}"
