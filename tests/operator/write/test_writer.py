"""The merge patches that the writer sends."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from busbar.operator.write.writer import merge_difference

values = st.recursive(
    st.integers() | st.booleans() | st.text(max_size=3) | st.lists(st.integers(), max_size=2),
    lambda inner: st.dictionaries(st.sampled_from("abcd"), inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(st.sampled_from("abcd"), values, max_size=4)


def merged(target: Any, patch: Any) -> Any:
    """The reference algorithm of RFC 7386."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


@given(objects, objects)
def test_the_difference_turns_one_status_into_the_other(old: dict[str, Any], new: dict[str, Any]) -> None:
    patch = merge_difference(old, new)
    assert merged(old, patch) == new
    assert bool(patch) == (old != new)
