"""The settings of one run, as frozen dataclasses. Standard library only, because `plan` and `optimizer` need no more.

`job` makes them from a TrainingJob; benchmarks and tests may make them by hand.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from busbar.kube.types.checkpoint import MemoryCopyPolicy

GATED, BLOCKING = "gated", "blocking"
ADAMW, ZEROTH_ORDER = "AdamW", "ZerothOrder"
WHOLE, TILED = "whole", "tiled"
ACROSS, WITHIN = "across-documents", "within-documents"  # what attention sees of a sequence of several
WEIGHTS, FLOAT32 = "weights", "float32"  # types of gradients
EXACT, BF16, INT8 = "exact", "bf16", "int8"  # formats of AdamW's moments
OPTIMIZER, GRADIENTS, PARAMETERS = "optimizer", "gradients", "parameters"  # ZeRO stages 1, 2 and 3


@dataclass(frozen=True)
class ModelSource:
    """Exactly one of a `transformers` config (new random weights) or a saved model's URI."""

    config: Mapping[str, Any] | None
    uri: str | None


@dataclass(frozen=True)
class TokenizerSource:
    """A vocabulary size (train one on the corpus) or the URI of a saved one; neither: the model's own."""

    vocab_size: int | None
    uri: str | None


@dataclass(frozen=True)
class Fields:
    """Names of the fields of a row; a kind of row without a name is not read."""

    text: str | None = "text"
    prompt: str | None = "prompt"
    completion: str | None = "completion"
    messages: str | None = "messages"


@dataclass(frozen=True)
class DataSource:
    uri: str
    holdout_fraction: float  # share of *files* kept out of training
    sequence_length: int  # tokens per packed sequence
    format: str | None = None  # text | jsonl; None: by each file's ending
    fields: Fields = Fields()
    skips_bad_rows: bool = False
    chat_template: str | None = None  # in the place of the tokenizer's own
    packing: str = ACROSS  # across-documents | within-documents: what attention sees (see `documents`)

    @property
    def keeps_documents_apart(self) -> bool:
        return self.packing == WITHIN


@dataclass(frozen=True)
class Adapter:
    """LoRA beside frozen weights, as `peft` names its parts."""

    rank: int
    alpha: float
    dropout: float
    targets: tuple[str, ...] | None  # None: every linear layer but the output's
    rs_lora: bool
    dora: bool
    merge: bool  # write the whole model

    def __str__(self) -> str:
        names = "all linear layers" if self.targets is None else ", ".join(self.targets)
        return f"{'DoRA' if self.dora else 'LoRA'} of rank {self.rank} on {names}"


@dataclass(frozen=True)
class Batch:
    sequences: int  # per optimizer step
    micro_batch: int  # per forward and backward; divides `sequences`


@dataclass(frozen=True)
class OptimizerSpec:
    """Hyperparameters of AdamW, as torch names them, or of a zeroth-order run, which has no betas and no eps."""

    learning_rate: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float  # on matrices only; vectors (norms, biases) are never decayed
    warmup_steps: int
    schedule: str  # linear | cosine | constant
    gradient_clip: float | None  # global norm, or the absolute slope; None: no clipping
    name: str = ADAMW
    perturbation: float = 1e-3  # how far from the weights a zeroth-order run takes its losses


@dataclass(frozen=True)
class LengthWarmup:
    """Sequences are cut in the first `steps`: to `start` tokens, and then to more of them (Li et al., 2021, 2108.06084)."""

    start: int
    steps: int

    def length(self, step: int, whole: int) -> int:
        """Tokens of a sequence in this step, the first being 0: a multiple of eight, but for `start` and `whole`."""
        if step >= self.steps:
            return whole
        return max(self.start, (self.start + (whole - self.start) * step // self.steps) // 8 * 8)


@dataclass(frozen=True)
class LayerDrop:
    """Blocks that a step leaves out (see `layer_drop`)."""

    keep: float  # towards which the share of steps that keep the last block falls
    rate: float  # of that fall, per step

    def probability(self, step: int, number: int, count: int) -> float:
        """That a step, the first being 0, keeps block `number`, counted from 0, of `count`."""
        theta = (1 - self.keep) * math.exp(-self.rate * step) + self.keep
        return 1 - (number + 1) / count * (1 - theta)

    def left_out(self, seed: int, step: int, count: int) -> frozenset[int]:
        """The blocks that a step leaves out."""
        return frozenset(
            number
            for number in range(count)
            if _draw(seed, step, number) >= self.probability(step, number, count)
        )


def _draw(seed: int, step: int, number: int) -> float:
    """A number from 0 to 1, 1 not included, that is the same on every machine."""
    digest = hashlib.blake2b(f"layer drop {seed} {step} {number}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53


@dataclass(frozen=True)
class Evaluation:
    ngram_order: int  # context length in bytes of the longer n-gram model


@dataclass(frozen=True)
class CheckpointPolicy:
    every_steps: int | None
    every_seconds: float | None
    keep: int
    adopt: bool = False  # continue from another job's checkpoints
    memory: MemoryCopyPolicy | None = None  # copies beside them (see `memory_copy`); None: there are none

    def due(self, step: int, seconds_since_last: float) -> bool:
        by_steps = self.every_steps is not None and step % self.every_steps == 0
        return by_steps or (self.every_seconds is not None and seconds_since_last >= self.every_seconds)


@dataclass(frozen=True)
class EngineSpec:
    """`spec.engine`, checked."""

    model: ModelSource
    tokenizer: TokenizerSource
    data: DataSource
    steps: int
    batch: Batch
    optimizer: OptimizerSpec
    dtype: str
    mode: str
    device_memory_bytes: int | None  # limit of the device arena; None: what the device has
    seed: int
    threads: int | None  # CPU threads of torch; None: the run decides (see `environment`)
    evaluation: Evaluation | None
    max_bad_steps: int  # skipped steps in a row after which the run ends
    settings: Mapping[str, Any]  # every field that decides the run's numbers, by its path
    identity: str  # hash of `settings`
    adapter: Adapter | None = None  # None: the model's own weights are trained
    freeze: tuple[str, ...] = ()  # patterns of names of those that are not (see `freeze`)
    activations: str = "auto"  # auto | keep | recompute (see `recompute`)
    loss: str = WHOLE  # whole | tiled: how logits exist (see `tiled_loss`)
    length_warmup: LengthWarmup | None = None  # None: sequences are whole in all steps
    layer_drop: LayerDrop | None = None  # None: all steps have all blocks
    gradient_sums: str = WEIGHTS  # weights | float32: the type in which gradients are added up
    mlp: str = WHOLE  # whole | tiled: how MLPs are computed (see `tiled_mlp`)
    schedule: str = (
        "auto"  # auto | gated | blocking: whether updates run beside the next forward pass (see `gates`)
    )
    order: str = "fast"  # in which gradients are added up: fast | fixed (see `division`)
    sequence: int = 1  # ranks that share each sequence (see `sequence_parallel`)
    processes: int = 1  # of each pod (see `processes`)
    sharding: str = OPTIMIZER  # what is divided among the ranks of a gang: optimizer | gradients | parameters
    state: str = EXACT  # exact | bf16 | int8: the format of the moments (see `moments`)
    scratch_disk_bytes: int = 0  # of the disk for temporary files, which optimizer state may take
