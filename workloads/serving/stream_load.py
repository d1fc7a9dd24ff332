"""Decides whether a model's layers stay in memory or are streamed, and reads it accordingly.

--weights   resident  all stay; refused before anything is allocated where they do not fit
            stream    as many as fit stay (`stream_plan.py`), the others are streamed
            auto      resident where that fits, else stream
"""

from __future__ import annotations

import logging
import os
import stat
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from busbar.workloads.machine.direct_file import page_memory
from busbar.workloads.machine.limits import host_limit_bytes
from busbar.workloads.serving import kvcodes, weightcodes
from busbar.workloads.serving.architecture import Architecture
from busbar.workloads.serving.attention import padded_columns
from busbar.workloads.serving.draft_load import draft_shape
from busbar.workloads.serving.errors import MemoryTooSmall, ModelFileMissing, ModelUnsupported
from busbar.workloads.serving.identity import model_identity
from busbar.workloads.serving.kvcache import KvShape
from busbar.workloads.serving.layer_file import LayerLayout, open_layers
from busbar.workloads.serving.settings import EngineSettings
from busbar.workloads.serving.stream import FileSource, HostSource, Source, StreamedLayers, host_record
from busbar.workloads.serving.stream_plan import Needs, StreamPlan, fixes_of, plan_stream
from busbar.workloads.serving.weightcodes import WeightForm
from busbar.workloads.serving.weights import Checkpoint, FusedModel, Weights, load_weights

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
    """Predicted: to read the layers that are streamed, at the rate of the start."""
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
            f"{self.plan.text}; from {self.source} at {self.rate / 1e6:.0f} MB/s: at least {self.pass_s:.3g} s "
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
        self._plan: StreamPlan | None = None

    def read(self) -> Reading:
        """Raises MemoryTooSmall before anything is allocated, DiskTooSmall, and ModelError."""
        settings = self._settings
        plan = self._plan = self._plan or self._decide()
        if plan is None or not plan.streamed:
            if plan is not None:
                log.info("weights need not be streamed: %s", plan.text)
                settings = self._following(plan)
            weights = load_weights(settings.model_dir, self._arch, self._device, self._dtype, self._form)
            return Reading(weights, settings, None)
        layers, weights = self._streamed(plan)
        streaming = self._outlook(plan, layers)
        log.info("weights are streamed: %s", streaming.text)
        return Reading(weights, self._following(plan), streaming)

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
        return host_limit_bytes(reserve=reserve)

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
        )

    def _tables(self, arch: Architecture) -> int:
        """Bytes of embedding, head, and the logits of a step."""
        tables = arch.vocab_size * arch.hidden * (1 if arch.tied else 2) * self._dtype.itemsize
        return tables + 3 * 4 * arch.vocab_size * self._settings.max_running

    def _streamed(self, plan: StreamPlan) -> tuple[StreamedLayers, Weights]:
        arch, folder = self._arch, self._settings.model_dir
        layout = LayerLayout.of(arch, self._dtype, self._form)
        checkpoint = Checkpoint(folder)

        def on(device: torch.device) -> FusedModel:
            return FusedModel(checkpoint, arch, device, self._dtype, str(folder))

        model = on(CPU)
        source: Source
        if self._fits_host(plan):
            source = HostSource({i: self._record(model, layout, i, pin=True) for i in plan.streamed})
        else:
            where = self._settings.stream_dir or own_folder(Path(tempfile.gettempdir()))
            identity = model_identity(folder)
            source = FileSource(open_layers(where, identity, model, arch, layout, self._form, log.info))
        resident = {}
        for index in sorted(set(range(arch.layers)) - set(plan.streamed)):
            if isinstance(source, FileSource):
                record = source.fetch(index, page_memory(layout.size))
            else:
                record = self._record(model, layout, index, pin=False)
            resident[index] = layout.layer(record if self._device.type == "cpu" else record.to(self._device))
        layers = StreamedLayers(resident, plan.streamed, source, layout, plan.slots, self._device)
        return layers, on(self._device).around(layers, pack=False)

    def _record(self, model: FusedModel, layout: LayerLayout, index: int, pin: bool) -> torch.Tensor:
        record = host_record(layout.size, pin)
        layout.store(model.layer(index), record, self._form)
        return record

    def _fits_host(self, plan: StreamPlan) -> bool:
        """Whether host memory holds what the device does not; on a CPU they are the same memory. torch takes a power of two
        for what is pinned."""
        if self._device.type != "cuda":
            return False
        host = host_limit_bytes()
        pinned = 1 << (plan.needs.layer_bytes - 1).bit_length()
        return host is not None and len(plan.streamed) * pinned <= host

    def _outlook(self, plan: StreamPlan, layers: StreamedLayers) -> Streaming:
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
