"""Which adapters a replica knows, and which are in memory."""

from __future__ import annotations

import pytest
import torch
from tests.serving.adapted import Family, save_adapter

from busbar.workloads.serving.adapters import Adapter, AdapterStore
from busbar.workloads.serving.architecture import read_architecture
from busbar.workloads.serving.errors import AdapterInvalid, Overloaded, SettingsError
from busbar.workloads.serving.settings import AdapterSource, EngineSettings

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def equals(tmp_path_factory: pytest.TempPathFactory, tiny: Family) -> list[AdapterSource]:
    """Five adapters of one form."""
    root = tmp_path_factory.mktemp("equals")
    for number in range(5):
        save_adapter(tiny.model, root / f"e{number}", number)
    return [AdapterSource(f"e{number}", root / f"e{number}") for number in range(5)]


SLOT = 4 * 4 * 2 * (3 * 64 + 32 + 32 + 64 + 64 + 64 + 3 * 64 + 3 * 112)
"""Bytes of one: rank 4, float32, two layers, inputs and outputs of the seven matrices."""


def held(store: AdapterStore, name: str) -> Adapter:
    assert store.bring(name)
    adapter = store.held(name)
    assert adapter is not None
    return adapter


def test_the_least_recently_used_goes_first_and_comes_back(tiny: Family, equals: list[AdapterSource]) -> None:
    store = AdapterStore(read_architecture(tiny.folder), CPU, torch.float32, 3 * SLOT)
    for source in equals[:4]:
        store.add(source)
    assert store.bytes <= 3 * SLOT
    assert (store.names, store.resident) == (["e0", "e1", "e2", "e3"], ["e1", "e2", "e3"])
    assert store.held("e0") is None
    held(store, "e1").release()
    held(store, "e0").release()
    assert store.resident == ["e3", "e1", "e0"]


def test_one_that_is_held_stays(tiny: Family, equals: list[AdapterSource]) -> None:
    store = AdapterStore(read_architecture(tiny.folder), CPU, torch.float32, 2 * SLOT)
    for source in equals[:3]:
        store.add(source)
    first, second = held(store, "e0"), held(store, "e1")
    with pytest.raises(Overloaded, match="running requests hold all memory"):
        store.bring("e2")
    first.release()
    third = held(store, "e2")
    assert third.place == first.place
    assert third.place != second.place
    assert not store.bring("unknown")


def test_one_that_is_removed_ends_with_its_requests(tiny: Family, equals: list[AdapterSource]) -> None:
    store = AdapterStore(read_architecture(tiny.folder), CPU, torch.float32, SLOT)
    store.add(equals[0])
    first = held(store, "e0")
    assert store.remove("e0")
    assert not store.remove("e0")
    assert (store.names, store.bring("e0"), store.bytes) == ([], False, SLOT)
    with pytest.raises(Overloaded):
        store.add(equals[1])
    first.release()
    assert store.bytes == 0
    store.add(equals[1])


def test_another_form_takes_the_page_that_was_used_least_recently(
    tiny: Family, equals: list[AdapterSource]
) -> None:
    store = AdapterStore(read_architecture(tiny.folder), CPU, torch.float32, 3 * SLOT)
    for source in equals[:3]:
        store.add(source)
    small, large = tiny.sources[0], tiny.sources[1]
    store.add(large)  # rank 8: two of the slots
    assert store.resident == ["all"]
    store.add(small)
    store.add(equals[3])
    assert store.bytes <= 3 * SLOT
    assert "e3" in store.resident


def test_one_that_is_larger_than_all_memory_is_refused(tiny: Family, equals: list[AdapterSource]) -> None:
    store = AdapterStore(read_architecture(tiny.folder), CPU, torch.float32, SLOT - 1)
    with pytest.raises(AdapterInvalid, match="--adapter-memory"):
        store.add(equals[0])
    assert store.names == []


def test_names_are_given_once(tiny: Family, equals: list[AdapterSource]) -> None:
    store = AdapterStore(read_architecture(tiny.folder), CPU, torch.float32, 2**24)
    store.add(equals[0])
    with pytest.raises(AdapterInvalid, match="'e0' is in use"):
        store.add(AdapterSource("e0", equals[1].folder))
    with pytest.raises(SettingsError, match="two adapters have the name 'e0'"):
        EngineSettings(tiny.folder, adapters=(equals[0], equals[0]))
    for name in ("", "a b", "-a", "a/b", "a:b", "x" * 64):
        with pytest.raises(SettingsError, match="no name for an adapter"):
            AdapterSource(name, tiny.folder)
    AdapterSource("x" * 63, tiny.folder)
