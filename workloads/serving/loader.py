"""From a model folder to a ready `EngineCore`: read, check, probe, size the cache."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer

from busbar.workloads.machine.limits import usable_processors
from busbar.workloads.serving import kvcodes
from busbar.workloads.serving.adapters import AdapterStore
from busbar.workloads.serving.architecture import Architecture, read_architecture
from busbar.workloads.serving.attention import padded_columns
from busbar.workloads.serving.balance import key_peaks
from busbar.workloads.serving.blocks import BlockPool
from busbar.workloads.serving.chat import ChatTemplate, load_chat_template
from busbar.workloads.serving.core import EngineCore
from busbar.workloads.serving.draft_load import DraftWeights, draft_shape, make_draft, read_draft
from busbar.workloads.serving.dtype_choice import choose_dtypes, settled
from busbar.workloads.serving.errors import (
    AdapterInvalid,
    MemoryTooSmall,
    ModelCorrupt,
    ModelFileMissing,
    SettingsError,
)
from busbar.workloads.serving.identity import model_identity
from busbar.workloads.serving.kvcache import KvCache, KvShape
from busbar.workloads.serving.metrics import Metrics
from busbar.workloads.serving.model import Decoder
from busbar.workloads.serving.mover import BlockMover
from busbar.workloads.serving.probe import Trial, batch_invariant, choose_backend, choose_in_place
from busbar.workloads.serving.quota import Quotas
from busbar.workloads.serving.runner import Runner
from busbar.workloads.serving.scheduler import Scheduler, StepLimits
from busbar.workloads.serving.settings import STEP_TOKENS, EngineSettings
from busbar.workloads.serving.step_probe import choose_graphs
from busbar.workloads.serving.stream_load import Streaming, WeightReader
from busbar.workloads.serving.text import load_tokenizer
from busbar.workloads.serving.weights import Weights

log = logging.getLogger(__name__)
CPU_KV_BYTES = 256 * 2**20
GPU_KV_SHARE = 0.85


@dataclass(frozen=True)
class LoadedDraft:
    """The draft model, which is `core.draft`."""

    parameters: int
    weight_bytes: int
    kv_bytes: int
    read_weights: Callable[[], Weights]
    """As of `Loaded`."""


@dataclass(frozen=True)
class Loaded:
    """A served model and what its start found out."""

    core: EngineCore
    arch: Architecture
    template: ChatTemplate
    device: torch.device
    dtype: torch.dtype
    weights_stored: str
    """As what the layers' matrices are kept: a float dtype, int8 or int4."""
    weight_bytes: int
    kv_bytes: int
    products: tuple[Trial, ...]
    """What was tried to choose the dtype."""
    trials: tuple[Trial, ...]
    attention: str
    batch_invariant: bool
    load_s: float
    identity: str
    """Equal for two replicas of the same model folder."""
    adapters: AdapterStore
    refused_adapters: dict[str, str]
    """Those that were asked for and are not served, each with the reason."""
    read_weights: Callable[[], Weights]
    """Reads the model folder again. Raises ModelError where it is gone, or holds another model."""
    streaming: Streaming | None
    """None: all layers stay in memory."""
    draft: LoadedDraft | None = None

    @property
    def models(self) -> list[tuple[Runner, Callable[[], Weights]]]:
        """What computes, each with what reads its weights again."""
        models = [(self.core.runner, self.read_weights)]
        if self.draft is not None and self.core.draft is not None:
            models.append((self.core.draft.runner, self.draft.read_weights))
        return models


def load(settings: EngineSettings, model_id: str, clock: Callable[[], float] = time.monotonic) -> Loaded:
    """Everything a start needs; errors say which file or flag to change."""
    began = time.monotonic()
    arch = read_architecture(settings.model_dir)
    tokenizer = load_tokenizer(settings.model_dir)
    largest = max(tokenizer.get_vocab().values(), default=-1)  # ids may have gaps
    if largest >= arch.vocab_size:
        raise ModelCorrupt(
            f"{settings.model_dir}: tokenizer.json has tokens up to {largest}, the model's embedding only those up to "
            f"{arch.vocab_size - 1}; they do not belong together"
        )
    template = load_chat_template(settings.model_dir)
    device = choose_device(settings.device)
    torch.set_num_threads(settings.threads or usable_processors())
    dtype, products = settled(settings.dtype, device)
    weight_dtype, kv_dtype = choose_dtypes(dtype, arch.dtype, device)
    wanted = context_limit(settings, arch)
    draft_dir, draft_arch = settings.draft_dir, None
    if draft_dir is not None:
        draft_arch = read_draft(draft_dir, tokenizer)
    reader = WeightReader(settings, arch, device, (weight_dtype, kv_dtype), wanted, draft_arch)
    reading = reader.read()
    weights, settings, streaming = reading.weights, reading.settings, reading.streaming
    draft = loaded_draft = None
    if draft_dir is not None and draft_arch is not None:
        read_again = _reader_again(draft_dir, partial(reader.load, "draft", draft_dir, draft_arch))
        draft = DraftWeights(draft_arch, read_again())
    core, trials, invariant = assemble(settings, arch, weights, kv_dtype, tokenizer, model_id, clock, draft)
    if draft is not None and core.draft is not None:
        cache_bytes = core.draft.runner.cache.bytes
        loaded_draft = LoadedDraft(draft.arch.parameter_count, draft.weights.bytes, cache_bytes, read_again)
    if streaming is not None:
        core.least_prompt_tokens = max(core.least_prompt_tokens, streaming.hidden_tokens)
        core.speed.model.theta[0] = streaming.pass_s  # until steps have been measured
    core.grammars.prepare()
    read_weights = _reader_again(settings.model_dir, lambda: reader.read().weights)
    adapters = AdapterStore(arch, device, weight_dtype, settings.adapter_bytes)
    refused = _add_all(adapters, settings)
    return Loaded(
        core=core,
        arch=arch,
        template=template,
        device=device,
        dtype=weight_dtype,
        weights_stored=str(weight_dtype).removeprefix("torch.")
        if settings.weights_dtype == "auto"
        else settings.weights_dtype,
        weight_bytes=weights.bytes,
        kv_bytes=core.runner.cache.bytes,
        products=tuple(products),
        trials=tuple(trials),
        attention=core.runner.decoder.attention_name,
        batch_invariant=invariant,
        load_s=time.monotonic() - began,
        identity=model_identity(settings.model_dir),
        adapters=adapters,
        refused_adapters=refused,
        read_weights=read_weights,
        streaming=streaming,
        draft=loaded_draft,
    )


def _reader_again(folder: Path, read: Callable[[], Weights]) -> Callable[[], Weights]:
    """`read`, refused where the folder does not hold the model any more that it holds now."""
    identity = model_identity(folder)

    def read_again() -> Weights:
        try:
            same = model_identity(folder) == identity
        except OSError as error:
            raise ModelFileMissing(f"{folder} cannot be read any more: {error.strerror or error}") from error
        if not same:
            raise ModelCorrupt(f"{folder} holds another model than the one that was served; start anew")
        return read()

    return read_again


def _add_all(adapters: AdapterStore, settings: EngineSettings) -> dict[str, str]:
    """Reads the adapters of the settings; of those that are refused, why."""
    refused: dict[str, str] = {}
    for source in settings.adapters:
        try:
            adapters.add(source)
        except AdapterInvalid as error:
            if not settings.skip_bad_adapters:
                raise
            log.error("adapter %s is not served: %s", source.name, error)
            refused[source.name] = str(error)
    return refused


def assemble(
    settings: EngineSettings,
    arch: Architecture,
    weights: Weights,
    kv_dtype: torch.dtype,
    tokenizer: Tokenizer,
    model_id: str,
    clock: Callable[[], float],
    draft: DraftWeights | None = None,
) -> tuple[EngineCore, list[Trial], bool]:
    """The engine around weights that are in memory already; with a `draft` it guesses, too."""
    device = weights.embedding.device
    shape = KvShape.of(arch, settings.block_tokens, kv_dtype, kvcodes.FORMS.get(settings.kv_dtype))
    wanted = context_limit(settings, arch)
    beside = 0 if draft is None else draft_shape(draft.arch, settings.block_tokens, kv_dtype).block_bytes
    blocks = block_count(settings, shape, wanted, kv_budget(settings.kv_bytes, device), beside)
    max_model_len = min(wanted, blocks * settings.block_tokens)
    attention, trials = choose_backend(shape, arch.heads, device)
    in_place = None
    if not settings.deterministic:
        in_place, tried = choose_in_place(shape, arch.heads, device, attention)
        trials += tried
    decoder = Decoder(arch, weights, attention, wanted, in_place)
    if shape.form is not None:
        decoder.balance(key_peaks(decoder, shape, device, wanted))
    invariant = in_place is None and batch_invariant(decoder, shape, device, wanted)
    limits = StepLimits(
        settings.block_tokens,
        settings.max_batched_tokens or STEP_TOKENS,
        settings.max_running,
        prefix_cache=settings.prefix_cache,
    )
    cache = KvCache(shape, blocks, device)
    mover = host_tier(settings, cache)
    pool = BlockPool(blocks, settings.block_tokens, 0 if mover is None else mover.slots)
    metrics = Metrics(model_id, max_model_len)
    metrics.cache_config(settings.block_tokens, blocks, shape.stored)
    runner = Runner(decoder, cache, adapters_together=not settings.deterministic, mover=mover)
    trials += choose_graphs(runner, settings.max_running * (1 + settings.speculate))
    drafter = None
    if draft is not None:
        drafter, tried = make_draft(draft, settings, kv_dtype, blocks, max_model_len, arch, clock)
        trials += tried
    core = EngineCore(
        Scheduler(pool, limits, Quotas(dict(settings.kv_quotas), blocks)),
        runner,
        tokenizer,
        arch.eos,
        metrics,
        max_model_len,
        clock,
        None if settings.tpot_ms is None else settings.tpot_ms / 1e3,
        settings.speculate,
        drafter,
    )
    return core, trials, invariant


def host_tier(settings: EngineSettings, cache: KvCache) -> BlockMover | None:
    """Room for blocks in host memory, and what copies them; None where none is wanted."""
    if not settings.host_kv_bytes:
        return None
    slots = settings.host_kv_bytes // cache.shape.block_bytes
    if not slots:
        raise MemoryTooSmall(
            f"{settings.host_kv_bytes} bytes of host memory hold no KV block of {cache.shape.block_bytes} bytes; give "
            "more (--host-kv-memory), or none"
        )
    return BlockMover(cache, slots)


def choose_device(wanted: str) -> torch.device:
    if wanted == "cuda" and not torch.cuda.is_available():
        raise SettingsError("device cuda was asked for, but torch sees no CUDA device here")
    if wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available()):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def context_limit(settings: EngineSettings, arch: Architecture) -> int:
    """The longest context asked for, at most what the model is right for."""
    if settings.max_model_len is not None and settings.max_model_len > arch.max_positions:
        raise SettingsError(
            f"a context of {settings.max_model_len} tokens was asked for; the model in "
            f"{settings.model_dir} is made for {arch.max_positions}"
        )
    return settings.max_model_len or arch.max_positions


def kv_budget(asked: int | None, device: torch.device) -> int:
    if asked is not None:
        return asked
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * GPU_KV_SHARE)
    return CPU_KV_BYTES


def block_count(settings: EngineSettings, shape: KvShape, max_len: int, budget: int, beside: int = 0) -> int:
    """Usable blocks within `budget` bytes (one more is scratch), no more than could ever be used. A draft's block of `beside`
    bytes comes with each."""
    block_bytes = shape.block_bytes + beside
    blocks = budget // block_bytes - 1
    if blocks < 1:
        raise MemoryTooSmall(
            f"{budget} bytes for the KV cache hold no block: one block of {shape.block_tokens} tokens "
            f"takes {block_bytes} bytes and two are the least (one is scratch); give at least "
            f"{2 * block_bytes} (--kv-memory, or kvCacheMemory of the ModelService)"
        )
    most = settings.max_running * padded_columns(-(-max_len // shape.block_tokens), shape.block_tokens)
    return min(blocks, most)
