"""Decides whether a model's layers stay in memory or are streamed, and reads it accordingly.

--weights   resident  all stay; refused before anything is allocated where they do not fit
            stream    as many as fit stay (`stream_plan.py`), the others are streamed, or single experts of them
            auto      resident where that fits, else stream
"""

from __future__ import annotations

import logging
import os
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from busbar.workloads.machine.direct_file import page_memory
from busbar.workloads.machine.limits import host_limit_bytes
from busbar.workloads.serving import kvcodes, weightcodes
from busbar.workloads.serving.architecture import Architecture
from busbar.workloads.serving.attention import padded_columns
from busbar.workloads.serving.checkpoint import Checkpoint
from busbar.workloads.serving.draft_load import draft_shape
from busbar.workloads.serving.errors import (
    MemoryTooSmall,
    ModelFileMissing,
    ModelUnsupported,
    SettingsError,
)
from busbar.workloads.serving.expert_stream import ExpertCache, ExpertStreamedLayers
from busbar.workloads.serving.identity import model_identity
from busbar.workloads.serving.kept_weights import KeptFolder
from busbar.workloads.serving.kvcache import KvShape
from busbar.workloads.serving.layer_file import FileLayout, LayerLayout, open_layers
from busbar.workloads.serving.settings import EngineSettings
from busbar.workloads.serving.stream import (
    FileSource,
    HostSource,
    Source,
    StreamedLayers,
    host_record,
    records,
)
from busbar.workloads.serving.stream_plan import ExpertNeeds, Needs, StreamPlan, fixes_of, plan_stream
from busbar.workloads.serving.weightcodes import WeightForm
from busbar.workloads.serving.weights import FusedModel, Weights, load_weights

log = logging.getLogger(__name__)
GPU_SHARE = 0.92
"""Of the free memory of a GPU; the rest is for the allocator and libraries."""
STREAM_RESERVE_BYTES = 128 * 2**20
"""Host memory for what Python and torch load later."""
PROBE_ROWS = 64
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Streaming:
    """How the layers of this engine come, and what a step costs because of that."""

    plan: StreamPlan
    source: str
    pass_s: float
    """Predicted: to read what is streamed, of experts all that have no place, at the rate of the start."""
    token_s: float
    """Predicted: the products of one token of many in a step."""
    rate: float
    """Bytes per second, measured at the start."""

    @property
    def hidden_tokens(self) -> int:
        """Tokens of a step that are computed while layers are read anyway."""
        return min(self.plan.tokens, int(self.pass_s / self.token_s))

    @property
    def text(self) -> str:
        return (
            f"{self.plan.text}; from {self.source} at {self.rate / 1e6:.0f} MB/s: "
            f"at {'most' if self.plan.places else 'least'} {self.pass_s:.3g} s "
            f"a step, in which {self.hidden_tokens} tokens are computed"
        )


@dataclass(frozen=True)
class Reading:
    """The weights, and the settings that follow from how they are kept."""

    weights: Weights
    settings: EngineSettings
    streaming: Streaming | None
    """None: all layers stay."""


class WeightReader:
    """The weights of a model folder on a device, for a start and for every wake from sleep without them."""

    def __init__(
        self,
        settings: EngineSettings,
        arch: Architecture,
        device: torch.device,
        dtypes: tuple[torch.dtype, torch.dtype],
        wanted: int,
        draft: Architecture | None = None,
    ) -> None:
        """`dtypes` of weights and of keys and values; `wanted` is the context's length. A `draft` takes memory, too."""
        self._settings, self._arch, self._device = settings, arch, device
        self._dtype, self._kv_dtype = dtypes
        self._form = weightcodes.FORMS.get(settings.weights_dtype)
        self._wanted = wanted
        self._draft = draft
        self._kept = None if settings.keep_dir is None else KeptFolder.open(settings.keep_dir)
        self._plan: StreamPlan | None = None

    def read(self) -> Reading:
        """Raises MemoryTooSmall before anything is allocated, DiskTooSmall, and ModelError."""
        settings = self._settings
        plan = self._plan = self._plan or self._decide()
        if plan is None or plan.all_stay:
            if plan is not None:
                log.info("weights need not be streamed: %s", plan.text)
                settings = self._following(plan)
            weights = self.load("model", settings.model_dir, self._arch, self._form)
            return Reading(weights, settings, None)
        if self._kept is not None:
            log.warning("weights that are streamed are not kept: their file outlives the engine already")
            self._kept.clear()
        layers, weights = self._streamed(plan)
        streaming = self._outlook(plan, layers)
        log.info("weights are streamed: %s", streaming.text)
        return Reading(weights, self._following(plan), streaming)

    def load(self, name: str, folder: Path, arch: Architecture, form: WeightForm | None = None) -> Weights:
        """The weights in a folder, all in memory; kept under this name, if weights are kept. Raises ModelError."""
        load = load_weights if self._kept is None else partial(self._kept.load, name)
        return load(folder, arch, self._device, self._dtype, form)

    @property
    def needs(self) -> Needs:
        """Of the model as it is asked for."""
        return self._needs(self._form)

    def _following(self, plan: StreamPlan) -> EngineSettings:
        return replace(self._settings, kv_bytes=plan.kv_bytes, max_batched_tokens=plan.tokens)

    def _decide(self) -> StreamPlan | None:
        """None: nothing is streamed."""
        asked = self._settings.weights
        needs = self.needs
        if asked != "stream":
            memory = self._memory(reserve=0)
            if memory is None or needs.resident_bytes <= memory:
                return None
            if asked == "resident":
                raise MemoryTooSmall(self._refusal(needs, memory))
        memory = self._memory(STREAM_RESERVE_BYTES)
        if memory is None:
            raise MemoryTooSmall(
                "this machine does not say how much memory is free; give it (--memory), so that it can be divided"
            )
        return plan_stream(needs, memory, [*self._other_forms(), *fixes_of(needs)])

    def _memory(self, reserve: int) -> int | None:
        """Of the device, in bytes; None where nothing is known."""
        if self._settings.memory_bytes is not None:
            return self._settings.memory_bytes
        if self._device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self._device)
            return int(free * GPU_SHARE)
        host, kept = host_limit_bytes(reserve=reserve), 0 if self._kept is None else self._kept.held_bytes
        return None if host is None else host + kept

    def _other_forms(self) -> list[tuple[str, Needs]]:
        """Weights in fewer bits."""
        found = []
        for form in (weightcodes.INT8, weightcodes.INT4):
            if self._form is None or form.bits < self._form.bits:
                try:
                    found.append((f"--weights-dtype {form.name}", self._needs(form)))
                except ModelUnsupported:
                    continue
        return found

    def _refusal(self, needs: Needs, memory: int) -> str:
        if needs.draft_bytes and needs.resident_bytes - needs.draft_bytes <= memory:
            return (
                f"the model and its draft need {needs.resident_bytes / 2**20:.0f} MiB, the draft {needs.draft_bytes / 2**20:.0f} "
                f"of them, and {memory / 2**20:.0f} MiB of memory are free. It fits without --draft"
            )
        text = (
            f"the model needs {needs.resident_bytes / 2**20:.0f} MiB and {memory / 2**20:.0f} MiB of memory are free. It fits "
            "with "
        )
        for flag, changed in self._other_forms():
            if changed.resident_bytes <= memory:
                return f"{text}{flag}"
        if needs.least_bytes <= memory:
            return f"{text}--weights stream: layers are read in every step, which is slower"
        return f"{text}{-(-needs.resident_bytes // 2**20)} MiB of memory"

    def _needs(self, form: WeightForm | None) -> Needs:
        arch, settings, element = self._arch, self._settings, self._dtype.itemsize
        shape = KvShape.of(arch, settings.block_tokens, self._kv_dtype, kvcodes.FORMS.get(settings.kv_dtype))
        block_bytes, draft_bytes = shape.block_bytes, 0
        if self._draft is not None:
            block_bytes += draft_shape(self._draft, settings.block_tokens, self._kv_dtype).block_bytes
            layers = self._draft.layers * LayerLayout.of(self._draft, self._dtype, None).size
            draft_bytes = self._tables(self._draft) + layers
        columns = padded_columns(-(-self._wanted // settings.block_tokens), settings.block_tokens)
        heads = (arch.heads + 2 * arch.kv_heads) * arch.head_dim
        # Alive at once at most: of attention x, its norm and four copies of queries, keys and values; of the MLP gate, up
        # and their product; of experts what each is given and gives, sorted, unsorted and in float32, too.
        mlp = 4 * arch.intermediate
        if arch.routing is not None:
            mlp = arch.routing.per_token * (mlp + 4 * arch.hidden)
        row = 3 * arch.hidden + max(4 * heads, mlp)
        return Needs(
            layers=arch.layers,
            layer_bytes=LayerLayout.of(arch, self._dtype, form).size,
            fixed_bytes=self._tables(arch) + _adapter_bytes(settings),
            token_bytes=row * max(element, 4),
            block_bytes=block_bytes,
            most_blocks=settings.max_running * columns,
            kv_bytes=settings.kv_bytes,
            tokens=settings.max_batched_tokens,
            depth=settings.stream_depth,
            draft_bytes=draft_bytes,
            experts=self._expert_needs(form),
            unit=settings.stream_unit,
        )

    def _expert_needs(self, form: WeightForm | None) -> ExpertNeeds | None:
        routing = self._arch.routing
        if routing is None:
            if self._settings.stream_unit == "experts":
                raise SettingsError(
                    f"the model in {self._settings.model_dir} has no experts to stream (--stream-unit experts)"
                )
            return None
        layout = FileLayout.by_expert(self._arch, self._dtype, form)
        return ExpertNeeds(
            routing.experts,
            routing.per_token,
            layout.layout(layout.layers).size,
            layout.layer.size,
        )

    def _tables(self, arch: Architecture) -> int:
        """Bytes of embedding, head, and the logits of a step."""
        tables = arch.vocab_size * arch.hidden * (1 if arch.tied else 2) * self._dtype.itemsize
        return tables + 3 * 4 * arch.vocab_size * self._settings.max_running

    def _streamed(self, plan: StreamPlan) -> tuple[StreamedLayers | ExpertStreamedLayers, Weights]:
        checkpoint = Checkpoint(self._settings.model_dir)

        def on(device: torch.device) -> FusedModel:
            return FusedModel(checkpoint, self._arch, device, self._dtype, str(self._settings.model_dir))

        of = self._by_expert if plan.places else self._by_layer
        layers = of(plan, on(CPU))
        return layers, on(self._device).around(layers, pack=False)

    def _by_layer(self, plan: StreamPlan, model: FusedModel) -> StreamedLayers:
        layout = FileLayout(self._arch.layers, LayerLayout.of(self._arch, self._dtype, self._form))
        source = self._source(plan, model, layout, {index: [index] for index in plan.streamed})
        stays = sorted(set(range(self._arch.layers)) - set(plan.streamed))
        resident = dict(
            zip(stays, map(layout.layer.layer, self._stay(stays, source, model, layout)), strict=True)
        )
        return StreamedLayers(resident, plan.streamed, source, layout.layer, plan.slots, self._device)

    def _by_expert(self, plan: StreamPlan, model: FusedModel) -> ExpertStreamedLayers:
        assert self._arch.routing is not None
        layout = FileLayout.by_expert(self._arch, self._dtype, self._form)
        every = range(self._arch.layers)
        numbers = {i: [layout.number(i, expert) for expert in range(layout.experts)] for i in every}
        source = self._source(plan, model, layout, numbers)
        ahead = self._settings.stream_depth != 0
        cache = ExpertCache(
            layout, plan.places, self._arch.routing.per_token, source, self._device, ahead=ahead
        )
        return ExpertStreamedLayers(list(self._stay(every, source, model, layout)), layout, cache)

    def _source(
        self, plan: StreamPlan, model: FusedModel, layout: FileLayout, numbers: dict[int, list[int]]
    ) -> Source:
        """Of the records with these numbers, by layer."""
        if not self._fits_host(plan):
            where = self._settings.stream_dir or own_folder(Path(tempfile.gettempdir()))
            identity = model_identity(self._settings.model_dir)
            return FileSource(open_layers(where, identity, model, layout, self._form, log.info))
        made: dict[int, torch.Tensor] = {}
        for found in numbers.values():  # pinned memory is taken in powers of two
            size = layout.layout(found[0]).size
            for number, record in zip(
                found, records(host_record(len(found) * size, True), size), strict=True
            ):
                layout.store(model, number, record, self._form)
                made[number] = record
        return HostSource(made)

    def _stay(
        self, numbers: Iterable[int], source: Source, model: FusedModel, layout: FileLayout
    ) -> Iterator[torch.Tensor]:
        """Records on the device that computes."""
        for number in numbers:
            record = page_memory(layout.layout(number).size)
            if isinstance(source, FileSource):
                source.fetch(number, record)
            else:
                layout.store(model, number, record, self._form)
            yield record if self._device.type == "cpu" else record.to(self._device)

    def _fits_host(self, plan: StreamPlan) -> bool:
        """Whether host memory holds what the device does not; on a CPU they are the same memory. torch takes a power of two
        for what is pinned."""
        if self._device.type != "cuda":
            return False
        host, needs, layers = host_limit_bytes(), plan.needs, len(plan.streamed)
        size = needs.layer_bytes
        if plan.places and needs.experts is not None:  # all of them: which ones are on the device changes
            size, layers = needs.experts.count * needs.experts.bytes, needs.layers
        pinned = 1 << (size - 1).bit_length()
        return host is not None and layers * pinned <= host

    def _outlook(self, plan: StreamPlan, layers: StreamedLayers | ExpertStreamedLayers) -> Streaming:
        """Measures the rate of the source, and the products of a layer."""
        layer = layers.probe()
        x = torch.zeros((PROBE_ROWS, self._arch.hidden), dtype=self._dtype, device=self._device)
        took = []
        with torch.inference_mode():
            for _ in range(2):
                began = time.perf_counter()
                attended = layer.qkv(x)[:, : self._arch.heads * self._arch.head_dim]
                layer.mlp(layer.out(attended)).sum().item()
                took.append(time.perf_counter() - began)
        token_s = max(min(took) * self._arch.layers / PROBE_ROWS, 1e-9)
        pass_s = plan.pass_bytes / max(layers.rate.probed, 1.0)
        return Streaming(plan, layers.source.name, pass_s, token_s, layers.rate.probed)


def own_folder(root: Path) -> Path:
    """The folder for layers below one that everybody can write to: nobody else may, because what is found there is
    computed with. Raises ModelFileMissing."""
    folder, user = root / f"busbar-layers-{os.getuid()}", os.getuid()
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise ModelFileMissing(f"{folder} cannot be made: {error.strerror or error}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != user or found.st_mode & 0o022:
        raise ModelFileMissing(
            f"layers are not streamed from {folder}, which somebody else may write to; remove it, or name another folder "
            "(--stream-dir)"
        )
    return folder


def _adapter_bytes(settings: EngineSettings) -> int:
    """Of those that are read at the start. Where others may be loaded, what streaming leaves for all of them."""
    if settings.adapter_root is not None and settings.weights == "stream":
        return settings.adapter_bytes
    files = (file for source in settings.adapters for file in source.folder.glob("*.safetensors"))
    return min(settings.adapter_bytes, sum(file.stat().st_size for file in files))
