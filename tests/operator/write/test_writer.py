"""The merge patches that the writer sends, and what it reads again."""

from __future__ import annotations

from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from busbar.kube.client import Object
from busbar.kube.errors import AlreadyExists
from busbar.kube.informer import Cache, Key
from busbar.kube.resources import PODS
from busbar.operator.metrics import Metrics
from busbar.operator.write.actions import Create
from busbar.operator.write.lanes import Lanes
from busbar.operator.write.writer import Writer, merge_difference

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


async def test_a_pod_that_exists_already_is_read() -> None:
    """It may have been made by a request whose answer was lost, and the watch may be late."""
    pod = {"metadata": {"namespace": "ns", "name": "x-0", "uid": "u", "resourceVersion": "3"}}

    class Server:
        async def create(self, *what: object) -> Object:
            raise AlreadyExists(409, "AlreadyExists", "it exists", "POST")

        async def get(self, *what: object) -> Object:
            return pod

    seen: Cache[Object] = Cache(PODS, lambda obj: obj)
    unused = cast(Any, None)
    writer = Writer(cast(Any, Server()), Metrics(), unused, {"Pod": seen}, unused, Lanes(8))
    await writer.carry_out((Create(PODS, Key("ns", "x-0"), {}),))
    assert seen.items == {Key("ns", "x-0"): pod}
