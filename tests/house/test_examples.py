"""The examples of the property tests: they depend on the test alone."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st


def _examples() -> list[int]:
    """The integers that a property test with `derandomize` is given."""
    found: list[int] = []

    @settings(max_examples=300, derandomize=True, database=None, phases=[Phase.generate])
    @given(st.integers())
    def collect(number: int) -> None:
        found.append(number)

    collect()
    return found


def test_examples_stay_the_same_when_the_code_that_is_imported_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _examples()
    source = tmp_path / "numbers_of_a_module.py"
    source.write_text("\n".join(f"VALUE_{i} = {123_457 + i}" for i in range(200)))
    spec = importlib.util.spec_from_file_location(source.stem, source)
    assert spec is not None
    monkeypatch.setitem(sys.modules, source.stem, importlib.util.module_from_spec(spec))
    assert _examples() == before
