"""Quantities are exact."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from busbar.kube.types import quantity


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        (2, 2),
        ("500m", Decimal("0.5")),
        ("1.5", Decimal("1.5")),
        (".5", Decimal("0.5")),
        ("1.", 1),
        ("2Gi", 2 * 2**30),
        ("256Mi", 256 * 2**20),
        ("1k", 1000),
        ("1E", 10**18),
        ("1e3", 1000),
        ("1E3", 1000),
        ("1e-3", Decimal("0.001")),
        ("0.1Ki", Decimal("102.4")),
    ],
)
def test_quantity_has_its_value(text: str | int, value: Decimal | int) -> None:
    assert quantity.parse(text) == value


@pytest.mark.parametrize("text", ["", "-1", "1x", "Gi", "1 Gi", "1Kib", "one", "1.2.3", "+1"])
def test_what_is_no_quantity_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity; write a number"):
        quantity.parse(text)


def test_parts_of_a_byte_or_millicore_are_rounded_up() -> None:
    assert quantity.to_bytes("0.1Ki") == 103
    assert quantity.to_millis("0.0001") == 1
    assert quantity.to_millis("500m") == 500


def test_parts_of_a_mebibyte_are_rounded_up() -> None:
    assert [quantity.to_mib(q) for q in (None, 0, "1", "2Gi", "1025Ki")] == [0, 0, 1, 2048, 2]


@given(st.integers(min_value=0, max_value=2**50), st.sampled_from(["", "m", "k", "M", "Ki", "Mi", "Gi"]))
def test_units_only_multiply(number: int, suffix: str) -> None:
    assert quantity.parse(f"{number}{suffix}") == number * quantity.parse(f"1{suffix}")
