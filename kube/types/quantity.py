"""Kubernetes quantities (`500m`, `2Gi`, `1.5`) as exact numbers.

Source: the grammar in the documentation of Kubernetes' `apimachinery/pkg/api/resource`, with exponents (`1e3`).
"""

import re
from decimal import ROUND_CEILING, Decimal

PATTERN = r"^([0-9]+(\.[0-9]*)?|\.[0-9]+)(([KMGTPE]i)|[munkMGTPE]|([eE][+-]?[0-9]{1,2}))?$"
"""Unsigned quantities only, because no request is negative. RE2 and Python agree on this expression."""

_SUFFIXES = {
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    "": Decimal(1),
    "k": Decimal(10) ** 3,
    "M": Decimal(10) ** 6,
    "G": Decimal(10) ** 9,
    "T": Decimal(10) ** 12,
    "P": Decimal(10) ** 15,
    "E": Decimal(10) ** 18,
    "Ki": Decimal(2) ** 10,
    "Mi": Decimal(2) ** 20,
    "Gi": Decimal(2) ** 30,
    "Ti": Decimal(2) ** 40,
    "Pi": Decimal(2) ** 50,
    "Ei": Decimal(2) ** 60,
}
_SPLIT = re.compile(r"^(?P<number>[0-9.]+)(?P<rest>.*)$")


def parse(quantity: str | int) -> Decimal:
    """The exact value of a quantity. Raises ValueError with the text and the accepted form."""
    text = str(quantity)
    if not re.match(PATTERN, text):
        raise ValueError(
            f"{text!r} is not a quantity; write a number with an optional suffix such as 500m or 2Gi"
        )
    found = _SPLIT.match(text)
    assert found is not None
    number, rest = Decimal(found["number"].rstrip(".") or "0"), found["rest"]
    if rest[:1] in ("e", "E") and rest not in _SUFFIXES:
        return number.scaleb(int(rest[1:]))
    return number * _SUFFIXES[rest]


def to_bytes(quantity: str | int) -> int:
    """Bytes of a memory quantity, rounded up."""
    return int(parse(quantity).to_integral_value(rounding=ROUND_CEILING))


def to_millis(quantity: str | int) -> int:
    """Thousandths of a quantity (milli-cores of a CPU quantity), rounded up."""
    return int((parse(quantity) * 1000).to_integral_value(rounding=ROUND_CEILING))


def to_mib(quantity: str | int | None) -> int:
    """MiB of a memory quantity, rounded up; 0 where there is none."""
    return 0 if quantity is None else -(-to_bytes(quantity) // 2**20)
