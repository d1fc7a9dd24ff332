"""Experts that are read one by one, because the memory does not hold all of them.

    source (file, or host memory) ── reading threads ─► places, each for one expert ──► the products of a layer

Everything else of the layers stays in memory, and so do as many experts as there are places (`expert_places.py`). When a
layer has chosen its experts, those that are not there are asked for; then, from the same hidden states, the next layer's
router says what it would choose, and what of that is not there is read while this layer and the next one's attention compute.
Those states are not yet the ones that the next layer will get: what was foreseen wrongly costs a read, never a wrong number.
Behind the last layer the experts are foreseen that the first one used in most of the last passes. What a layer waits for
goes ahead of what is foreseen. The experts that are there are computed first, and each row's sum has the order of
`experts.py`, so that nothing of this changes a bit.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
import torch.nn.functional as F

from busbar.workloads.machine.direct_file import BusyClock
from busbar.workloads.machine.streams import Event
from busbar.workloads.serving.expert_places import ExpertPlaces
from busbar.workloads.serving.experts import DenseMlp, EachExpert, ExpertMlp, rows_of
from busbar.workloads.serving.layer_file import FileLayout
from busbar.workloads.serving.linear import Move
from busbar.workloads.serving.stream import PROBES, Link, Rate, Source, host_record, records
from busbar.workloads.serving.weights import Layer

READERS = 3
"""Threads that read from a file: single experts are small, and a disk reaches its rate with several reads at a time."""
PARTS = 8
"""In which the experts of a layer are computed before it is looked anew which places have become free to read ahead."""


@dataclass
class ExpertCounts:
    """Since the start."""

    queries: int = 0
    """Experts that a layer computed with, once per step."""
    hits: int = 0
    """Of them those that were in memory when the layer asked."""
    prefetches: int = 0
    """Read ahead."""
    prefetch_hits: int = 0
    """Of them those that the next layer used."""
    read_bytes: int = 0

    @property
    def hit_rate(self) -> float | None:
        return self.hits / self.queries if self.queries else None


@dataclass
class _Read:
    """An expert on its way to its place."""

    layer: int
    expert: int
    place: int
    free: Event
    """The device does not compute with the expert before it any more."""
    ahead: bool = False
    done: threading.Event = field(default_factory=threading.Event)


class _Reader:
    """Threads that read what is waited for first."""

    def __init__(self, read: Callable[[_Read], object], threads: int) -> None:
        self._read = read
        self._urgent: deque[_Read] = deque()
        self._ahead: deque[_Read] = deque()
        self._change = threading.Condition()
        self._closed = False
        self._failure: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._run, name=f"stream-experts-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def order(self, reads: Sequence[_Read], *, urgent: bool) -> None:
        with self._change:
            (self._urgent if urgent else self._ahead).extend(reads)
            self._change.notify(len(reads))

    def settle(self, layer: int, wanted: Sequence[int]) -> list[_Read]:
        """Of what is foreseen and has not begun, what this layer wants is urgent; the rest is taken back, and returned."""
        with self._change:
            waiting = list(self._ahead)
            self._ahead.clear()
            right = [read for read in waiting if read.layer == layer and read.expert in wanted]
            self._urgent.extend(right)
            self._change.notify(len(right))
        return [read for read in waiting if read not in right]

    def wait(self, read: _Read) -> None:
        """Raises what any reading raised."""
        read.done.wait()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        with self._change:
            self._closed = True
            self._change.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (read := self._next()) is not None:
            try:
                if self._failure is None:
                    self._read(read)
            except BaseException as failure:
                self._failure = failure
            read.done.set()

    def _next(self) -> _Read | None:
        with self._change:
            while not (self._closed or self._urgent or self._ahead):
                self._change.wait()
            if self._closed:
                return None
            return (self._urgent or self._ahead).popleft()


class ExpertCache:
    """Places in the memory of the device that computes, and what fills them. Its methods are for the engine's thread."""

    def __init__(
        self,
        layout: FileLayout,
        places: int,
        per_token: int,
        source: Source,
        device: torch.device,
        *,
        ahead: bool,
        link: Callable[[torch.device], Link] = Link.of,
    ) -> None:
        """`source` knows the records by the numbers of `layout`. `ahead`: whether anything is read ahead."""
        assert layout.expert is not None
        self.rate, self.counts, self.source = Rate(), ExpertCounts(), source
        self._layout, self._size = layout, layout.expert.size
        self._count, self._per_token, self._device, self._ahead = places, per_token, device, ahead
        self._open = link
        self._gates: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._foreseen: tuple[int, list[int]] = (0, [])
        self._busy = BusyClock()
        self._measured_s = 0.0
        self._counting = threading.Lock()
        self._reader: _Reader | None = None
        self._reads: dict[tuple[int, int], _Read] = {}
        """By layer and expert, until the layer waits for them."""
        self._places = self._no_places()

    @torch.inference_mode(False)  # another thread writes to what is made here
    def begin(self) -> None:
        """Takes the places, where that has not been done."""
        if self._reader is not None:
            self._places.busy[:] = False  # of a pass that was given up
            for key in self._reads:
                self._places.busy[key] = True
            return
        size, on_gpu = self._size, self._device.type == "cuda"
        self._link = self._open(self._device)
        direct = self.source.needs_staging and self._link.loading is None
        whole = self._count * size
        memory = (
            host_record(whole, False)
            if direct
            else torch.zeros(whole, dtype=torch.uint8, device=self._device)
        )
        self._memory = records(memory, size)
        self._staging = host_record(size, on_gpu) if self.source.needs_staging and not direct else None
        assert self._layout.expert is not None
        self._experts = [self._layout.expert.expert(each) for each in self._memory]
        self._places, self._reads = self._no_places(), {}
        self._reader = _Reader(self._fetch, READERS if direct else 1)

    def rest(self) -> None:
        """Ends the thread behind its read, and drops the places."""
        if self._reader is None:
            return
        self._reader.close()
        self._link.close()
        self._reader = None
        self._memory, self._experts, self._staging = [], [], None

    @property
    def is_open(self) -> bool:
        """Whether places are held."""
        return self._reader is not None

    def probe(self) -> DenseMlp:
        """Fills the places evenly, and measures the rate before anything depends on it. One of the experts."""
        self.begin()
        every = self._layout.layers * self._layout.experts
        chosen = [divmod(i * every // self._count, self._layout.experts) for i in range(self._count)]
        for layer, expert in chosen:
            self._order(layer, [expert], layer, ahead=False)
        self._wait_for_all()  # checksums are compared, and the places' pages are made
        self.rate.take(0.0)
        assert self._reader is not None
        for _ in range(PROBES):
            again = [
                _Read(layer, expert, self._place(layer, expert), self._link.computing().record())
                for layer, expert in chosen[:PROBES]
            ]
            self._reader.order(again, urgent=True)
            for read in again:
                self._reader.wait(read)
        self.rate.probed = self.rate.lately = self.rate.take(0.0) or 0.0
        self.counts.read_bytes = 0
        return self._experts[0]

    def link_layers(self, layers: Sequence[Layer]) -> None:
        """By what each layer's hidden states are multiplied to be those of the next one, and its router."""
        self._gates = []
        for this, following in pairwise(layers):
            mlp = following.mlp
            assert isinstance(mlp, ExpertMlp)
            norm = this.mlp_norm.float()
            turned = torch.where(norm == 0, 0.0, following.mlp_norm.float() / norm)
            self._gates.append((turned, mlp.router))

    def foresee(self, layer: int, x: torch.Tensor) -> None:
        """Notes which experts the next layer would choose for x [rows, hidden], what this one's router gets; those of most
        rows first."""
        following = (layer + 1) % self._layout.layers
        if not self._ahead or not self._places.pays():
            return
        if following == 0:
            found = self._places.often(0)
        else:
            turned, router = self._gates[layer]
            chosen = F.linear(x.float() * turned, router.float()).topk(self._per_token, -1).indices
            rows = torch.bincount(chosen.flatten(), minlength=self._layout.experts).tolist()
            found = sorted((each for each, count in enumerate(rows) if count), key=lambda each: -rows[each])
        self._foreseen = following, found

    def use(self, layer: int, wanted: Sequence[int]) -> Iterator[tuple[int, DenseMlp]]:
        """The experts of a layer, in any order; each may be used until the next one is asked for."""
        assert self._reader is not None
        places = self._places
        for read in self._reader.settle(layer, wanted):
            self._reads.pop((read.layer, read.expert))
            places.drop(read.layer, read.expert)
        self._free_what_was_read()
        self.counts.prefetch_hits += places.count(layer, wanted)
        coming = [each for each in wanted if (layer, each) in self._reads]
        missing = places.missing(layer, wanted)
        there = [each for each in wanted if each not in coming and each not in missing]
        self.counts.queries += len(wanted)
        self.counts.hits += len(there)
        places.busy[layer, there] = True
        places.foresee(*self._foreseen)
        line = deque(there + coming)
        missing = self._order_more(layer, missing, line)
        part, computed = -(-len(wanted) // PARTS), 0
        while line or missing:
            if not line:  # every place is being read to for another layer
                self._wait_for_all()
                missing = self._order_more(layer, missing, line)
            expert = line.popleft()
            if (layer, expert) in self._reads:
                self._reader.wait(self._reads.pop((layer, expert)))
            yield expert, self._experts[self._place(layer, expert)]
            places.busy[layer, expert] = False
            computed += 1
            if computed % part == 0 or not line:
                missing = self._order_more(layer, missing, line)
        self._foreseen = (0, [])

    def _order_more(self, layer: int, missing: list[int], line: deque[int]) -> list[int]:
        """Reads those that are missing, to be computed at the end of the line, and where none lacks a place what is foreseen.
        Those that do."""
        left = self._order(layer, missing, layer, ahead=False)
        line.extend(missing[: len(missing) - len(left)])
        following, foreseen = self._foreseen
        if foreseen and not left:
            self._order(following, self._places.missing(following, foreseen), layer, ahead=True)
        return left

    def _no_places(self) -> ExpertPlaces:
        return ExpertPlaces(self._layout.layers, self._layout.experts, self._count, self._per_token)

    def _order(self, layer: int, experts: list[int], now: int, *, ahead: bool) -> list[int]:
        """Reads those for which there are places. The others."""
        if not experts:
            return experts
        assert self._reader is not None
        taken = self._places.take(layer, experts, now, ahead=ahead)
        free = self._link.computing().record()
        reads = [_Read(layer, expert, place, free, ahead) for expert, place in taken]
        self._reads.update({(layer, read.expert): read for read in reads})
        self._reader.order(reads, urgent=not ahead)
        return experts[len(reads) :]

    def _fetch(self, read: _Read) -> None:
        """In the reading thread."""
        read.free.wait()  # not part of the time that reading takes
        place, loading = self._memory[read.place], self._link.loading
        staging = place if self._staging is None and self.source.needs_staging else self._staging
        with self._busy:
            record = self.source.fetch(self._layout.number(read.layer, read.expert), staging)
            if record is not place:
                if loading is None:
                    place.copy_(record)
                else:
                    loading.copy(place, record)
                    loading.synchronize()
        with self._counting:
            self.counts.read_bytes += self._size
            self.counts.prefetches += read.ahead
            seconds = self._busy.seconds
            self.rate.add(self._size, seconds - self._measured_s)
            self._measured_s = seconds

    def _place(self, layer: int, expert: int) -> int:
        found = self._places.place(layer, expert)
        assert found is not None
        return found

    def _free_what_was_read(self) -> None:
        for key in [key for key, read in self._reads.items() if read.done.is_set()]:
            self._arrived(key)

    def _wait_for_all(self) -> None:
        for key in list(self._reads):
            self._arrived(key)

    def _arrived(self, key: tuple[int, int]) -> None:
        assert self._reader is not None
        self._reader.wait(self._reads.pop(key))
        self._places.busy[key] = False


class CachedExperts:
    """As `experts.Experts`: those of one layer, in a cache."""

    def __init__(self, cache: ExpertCache, layer: int, size: int) -> None:
        self.cache, self.layer = cache, layer
        self.bytes = size

    def __call__(self, x: torch.Tensor, counts: torch.Tensor, least_rows: int) -> torch.Tensor:
        """As `Experts.__call__`."""
        out, rows, first = torch.empty_like(x), {}, 0
        for expert, count in enumerate(counts.tolist()):
            if count:
                rows[expert] = slice(first, first + count)
            first += count
        for expert, mlp in self.cache.use(self.layer, list(rows)):
            out[rows[expert]] = rows_of(mlp, x[rows[expert]], least_rows)
        return out

    def moved(self, move: Move) -> CachedExperts:
        """They stay: what moves is dropped before."""
        return self


@dataclass(frozen=True)
class ForeseeingMlp(ExpertMlp):
    """A router whose hidden states say what the next layer will need."""

    foresee: Callable[[torch.Tensor], object] = field(kw_only=True)

    def __call__(self, x: torch.Tensor, least_rows: int = 1) -> torch.Tensor:
        """As `ExpertMlp.__call__`."""
        self.foresee(x)
        return super().__call__(x, least_rows)

    def moved(self, move: Move) -> ForeseeingMlp:
        return replace(self, router=move(self.router))


class ExpertStreamedLayers:
    """`weights.Layers` whose experts are read one by one; the rest of them stays."""

    def __init__(self, layers: Sequence[torch.Tensor], layout: FileLayout, cache: ExpertCache) -> None:
        """`layers`: their records without experts, on the device that computes."""
        assert layout.expert is not None
        size = layout.experts * layout.expert.matrix_bytes
        self.cache = cache
        self.bytes = layout.layers * (layout.layer.matrix_bytes + size)
        self._layers = [
            _foreseeing(layout.layer.layer(record, CachedExperts(cache, index, size)), cache, index)
            for index, record in enumerate(layers)
        ]
        cache.link_layers(self._layers)

    @property
    def rate(self) -> Rate:
        return self.cache.rate

    @property
    def source(self) -> Source:
        return self.cache.source

    @property
    def is_open(self) -> bool:
        return self.cache.is_open

    def __len__(self) -> int:
        return len(self._layers)

    def __iter__(self) -> Iterator[Layer]:
        self.cache.begin()
        yield from self._layers
        self.rate.end_pass(self.source.name)

    def probe(self) -> Layer:
        """As `StreamedLayers.probe`: a layer with one expert in the place of each."""
        layer, expert = self._layers[0], self.cache.probe()
        mlp = layer.mlp
        assert isinstance(mlp, ExpertMlp)
        each = EachExpert([expert] * mlp.routing.experts)
        return replace(layer, mlp=ExpertMlp(mlp.routing, mlp.router, each))

    def moved(self, move: Move) -> ExpertStreamedLayers:
        self._layers = [layer.moved(move) for layer in self._layers]
        self.cache.link_layers(self._layers)
        return self

    def rest(self) -> None:
        self.cache.rest()

    def close(self) -> None:
        self.rest()
        self.source.close()


def _foreseeing(layer: Layer, cache: ExpertCache, index: int) -> Layer:
    mlp = layer.mlp
    assert isinstance(mlp, ExpertMlp)
    return replace(
        layer,
        mlp=ForeseeingMlp(mlp.routing, mlp.router, mlp.experts, foresee=lambda x: cache.foresee(index, x)),
    )
