"""The adapters a replica knows by name, and those of them that are in memory.

A name stands for a folder. Its weights are read when it is added, which checks them, and stay until their page is
needed: memory is limited in bytes of whole pages, and the least recently used adapter that no request holds goes
first. A later request reads the folder again. A request holds its adapter until it ends, so one that is removed, or
replaced under its name, meanwhile is still there for it; names in use are never evicted.

Reading happens in whatever thread asks, one adapter at a time; looking one up never waits for that.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from busbar.workloads.serving.adapter_files import read_adapter
from busbar.workloads.serving.adapter_pages import PAGE_SLOTS, Form, Page, Place
from busbar.workloads.serving.architecture import Architecture
from busbar.workloads.serving.errors import AdapterInvalid, Overloaded
from busbar.workloads.serving.settings import AdapterSource

MOST_NAMES = 1024


@dataclass(eq=False)
class Adapter:
    """An adapter in memory."""

    name: str
    digest: str
    place: Place
    store: AdapterStore = field(repr=False)
    holders: int = 0

    @property
    def salt(self) -> tuple[str, str]:
        """Keys and values depend on the adapter, so blocks are shared within one adapter's requests only."""
        return "adapter", self.digest

    def hold(self) -> None:
        """One request more needs it."""
        self.store.count(self, 1)

    def release(self) -> None:
        self.store.count(self, -1)


class AdapterStore:
    """Names, pages and who holds what. Safe to use from any thread."""

    def __init__(self, arch: Architecture, device: torch.device, dtype: torch.dtype, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._arch, self._device, self._dtype = arch, device, dtype
        self._sources: dict[str, AdapterSource] = {}
        self._resident: dict[str, Adapter] = {}
        """By name, the least recently used first."""
        self._leaving: list[Adapter] = []
        """Removed or replaced, but held."""
        self._pages: list[Page] = []
        self._filling: Place | None = None
        """The slot that is being written."""
        self._lock = threading.Lock()
        """Around everything but reading files; never held long."""
        self._reading = threading.Lock()

    @property
    def bytes(self) -> int:
        return sum(page.bytes for page in self._pages)

    @property
    def names(self) -> list[str]:
        with self._lock:
            return list(self._sources)

    @property
    def sources(self) -> dict[str, AdapterSource]:
        """What the names stand for."""
        with self._lock:
            return dict(self._sources)

    @property
    def resident(self) -> list[str]:
        """Names of those in memory."""
        with self._lock:
            return list(self._resident)

    def __contains__(self, name: str) -> bool:
        return name in self._sources

    def add(self, source: AdapterSource) -> None:
        """Reads an adapter and gives it its name. Raises AdapterInvalid, or Overloaded where requests hold all
        memory."""
        with self._reading:
            with self._lock:
                self._check_new(source.name)
            self._load(source)
            with self._lock:
                self._sources[source.name] = source

    def put(self, source: AdapterSource) -> None:
        """As `add`, but in place of one that has the name: requests that hold that one keep it, and a refusal leaves it
        where it is."""
        with self._reading:
            with self._lock:
                if source.name not in self._sources:
                    self._check_new(source.name)
            self._load(source)
            with self._lock:
                self._sources[source.name] = source

    def remove(self, name: str) -> bool:
        """Forgets a name; whether it was known. Requests that hold the adapter keep it."""
        with self._reading, self._lock:
            known = self._sources.pop(name, None) is not None
            self._give_up(name)
            self._drop_empty_pages()
            return known

    def empty(self) -> None:
        """Gives up what no request holds; it is read again when it is asked for."""
        with self._reading, self._lock:
            self._resident = {name: each for name, each in self._resident.items() if each.holders}
            self._drop_empty_pages()

    def held(self, name: str) -> Adapter | None:
        """The adapter, held for the caller; None if it is not in memory. Never waits for a file."""
        with self._lock:
            adapter = self._resident.pop(name, None)
            if adapter is not None:
                self._resident[name] = adapter
                adapter.holders += 1
            return adapter

    def bring(self, name: str) -> bool:
        """Reads an adapter into memory unless it is there; False for an unknown name. Raises as `add`.

        It holds nothing: a caller may be gone when a slow file has been read.
        """
        with self._reading:
            with self._lock:
                source, resident = self._sources.get(name), name in self._resident
            if source is not None and not resident:
                self._load(source)
            return source is not None

    def count(self, adapter: Adapter, more: int) -> None:
        with self._lock:
            adapter.holders += more
            if not adapter.holders and adapter in self._leaving:
                self._leaving.remove(adapter)
                self._drop_empty_pages()

    def _load(self, source: AdapterSource) -> None:
        """Brings an adapter into memory; the caller has the lock for reading."""
        file = read_adapter(source.folder, self._arch, self._dtype)
        form = Form.of(file)
        size = form.slot_bytes(self._arch, self._dtype)
        if size > self.most_bytes:
            raise AdapterInvalid(
                f"the adapter {source.name!r} takes {size} bytes in memory; {self.most_bytes} are allowed "
                "(--adapter-memory)"
            )
        with self._lock:
            self._filling = place = self._free_slot(form, size)
        try:
            place.page.write(place.slot, file.factors)
            with self._lock:
                self._give_up(source.name)
                self._resident[source.name] = Adapter(source.name, file.digest, place, self)
        finally:
            self._filling = None

    # -- inside, under the lock -----------------------------------------------------------------

    def _give_up(self, name: str) -> None:
        """No request gets the adapter of this name any more; those that hold it keep it."""
        adapter = self._resident.pop(name, None)
        if adapter is not None and adapter.holders:
            self._leaving.append(adapter)

    def _check_new(self, name: str) -> None:
        if name in self._sources:
            raise AdapterInvalid(
                f"the adapter name {name!r} is in use; unload that adapter first, or choose another"
            )
        if len(self._sources) >= MOST_NAMES:
            raise AdapterInvalid(f"{MOST_NAMES} adapters are known already; unload some")

    def _free_slot(self, form: Form, slot_bytes: int) -> Place:
        while True:
            taken = {each.place for each in self._all()}
            for page in self._pages:
                for slot in range(page.slots):
                    if page.form == form and (place := Place(page, slot)) not in taken:
                        return place
            slots = min(PAGE_SLOTS, (self.most_bytes - self.bytes) // slot_bytes)
            if slots > 0:
                self._pages.append(Page(form, slots, self._arch, self._device, self._dtype))
            else:
                self._evict(form)

    def _evict(self, form: Form) -> None:
        """Gives up one adapter of this form, or all of a page of another one: the least recently used."""
        order = {adapter: turn for turn, adapter in enumerate(self._resident.values())}
        same = next((a for a in order if a.place.page.form == form and not a.holders), None)
        if same is not None:
            del self._resident[same.name]
            return
        last_use: dict[Page, int] = {}
        for adapter in self._all():
            turn = len(order) if adapter.holders else order[adapter]
            last_use[adapter.place.page] = max(turn, last_use.get(adapter.place.page, 0))
        page = min(last_use, key=lambda each: last_use[each], default=None)
        if page is None or last_use[page] == len(order):
            raise Overloaded(
                "running requests hold all memory for adapters; try again shortly, or give more (--adapter-memory)",
                retry_after_s=2,
            )
        for adapter in [a for a in order if a.place.page is page]:
            del self._resident[adapter.name]
        self._drop_empty_pages()

    def _drop_empty_pages(self) -> None:
        used = {adapter.place.page for adapter in self._all()}
        if self._filling is not None:
            used.add(self._filling.page)
        self._pages = [page for page in self._pages if page in used]

    def _all(self) -> Iterable[Adapter]:
        return (*self._resident.values(), *self._leaving)
