"""From the job's model source to a `transformers` causal LM, and to the sizes that the plan needs."""

from __future__ import annotations

import copy
import dataclasses
import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from busbar.workloads.training import adapter as adapters
from busbar.workloads.training import documents, sequence_parallel, tiled_mlp
from busbar.workloads.training.activations import Peaks, peak_activation_bytes
from busbar.workloads.training.block_slots import frozen_in_blocks, shares_blocks
from busbar.workloads.training.demand import AGAIN, Demand, aligned
from busbar.workloads.training.division import FIXED, divide
from busbar.workloads.training.drawing import Drawing
from busbar.workloads.training.errors import InvalidJob, listed
from busbar.workloads.training.export import writes_in_turn
from busbar.workloads.training.first_weights import IN_MODEL, Drawn, Source, Stored, places_of
from busbar.workloads.training.freeze import freeze, frozen
from busbar.workloads.training.groups import make_groups
from busbar.workloads.training.layer_drop import DroppedBlocks
from busbar.workloads.training.plan import DRAWN_ROOM, READ_BYTES
from busbar.workloads.training.saved_model import FIELD, StoredTensor, check_files, stored_tensors, vectors
from busbar.workloads.training.sequence_parallel import Imagined, SequencePart
from busbar.workloads.training.settings import (
    FLOAT32,
    TILED,
    ZEROTH_ORDER,
    Adapter,
    EngineSpec,
    LayerDrop,
)
from busbar.workloads.training.state_file import is_finite
from busbar.workloads.training.tiled_loss import tile, token_losses

_PROBE_TOKENS = 8
_BRIEF = 300  # characters
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class ModelRecipe:
    """How to make the model; `folder` holds saved weights, or is None for new ones."""

    config: Any  # transformers.PreTrainedConfig
    folder: Path | None
    dtype: torch.dtype
    seed: int
    adapter: Adapter | None = None
    freeze: tuple[str, ...] = ()
    tiled: bool = False  # logits
    tiled_mlps: bool = False
    sequence: int = 1  # ranks that share each sequence
    wide_gradients: bool = False  # in float32, whatever the type of the weights
    layer_drop: LayerDrop | None = None  # which the trainer attaches to what `build` makes
    documents: bool = False  # of a sequence are kept apart

    @property
    def gradient_dtype(self) -> torch.dtype:
        return torch.float32 if self.wide_gradients else self.dtype

    def empty(self) -> torch.nn.Module:
        """The architecture with arbitrary weights (also under fake tensors), without an adapter."""
        from transformers import AutoModelForCausalLM

        make: Any = AutoModelForCausalLM.from_config
        config = copy.deepcopy(self.config)  # which `sequence_parallel` changes
        model: torch.nn.Module = make(config, dtype=self.dtype)
        return model

    def build(self) -> torch.nn.Module:
        """The model to train: saved weights, or new ones drawn from the seed. Raises InvalidJob."""
        torch.manual_seed(self.seed)
        return self._to_train(self.empty() if self.folder is None else self._load(self.folder))

    def build_in_parts(self) -> tuple[torch.nn.Module, Source]:
        """The same model without memory for its weights, and where these come from, a part at a time; or with all of them
        where they are in files that only `transformers` can read. Raises InvalidJob."""
        torch.manual_seed(self.seed)
        if self.folder is None:
            with Drawing() as drawing:
                model = self.empty()
            drawn = Drawn(drawing, model)
            return self._to_train(model), drawn
        model, places = self._without_weights(self.folder)
        if places is None:
            return self.build(), IN_MODEL
        stored = Stored(self.folder, places)
        model = self._to_train(model)
        if self.adapter is not None and self.adapter.dora:
            adapters.measure_magnitudes(model, stored)
        return model, stored

    def part_bytes(self, model: torch.nn.Module) -> int | None:
        """Of the weights that `build_in_parts` has in memory at a time, of a `model` of these sizes; None: all."""
        largest = max(each.numel() * each.itemsize for each in model.parameters())
        if self.folder is None:
            return DRAWN_ROOM * largest
        if self._without_weights(self.folder)[1] is None:
            return None
        measured = self.adapter is not None and self.adapter.dora
        return max(READ_BYTES, adapters.merge_bytes(model) if measured else 0)

    def _without_weights(
        self, folder: Path
    ) -> tuple[torch.nn.Module, dict[torch.nn.Parameter, tuple[str, StoredTensor]] | None]:
        """The saved model with its buffers alone, and where its files have its weights (see `places_of`)."""
        from transformers.initialization import no_init_weights

        with Drawing() as drawing:
            with no_init_weights():
                made: Any = self.empty()
            for each in made.state_dict(keep_vars=True).values():
                each._is_hf_initialized = True  # not drawn below, where other buffers are made
            made.initialize_weights()
            made.tie_weights()
        Drawn(drawing, made)  # which takes the memory of the parameters
        return made, places_of(made, stored_tensors(folder), self.dtype)

    def _to_train(self, model: torch.nn.Module) -> torch.nn.Module:
        freeze(model, self.freeze)
        return self._as_asked(
            model if self.adapter is None else adapters.attach(model, self.adapter, self.seed)
        )

    def _as_asked(self, model: torch.nn.Module) -> torch.nn.Module:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad_dtype = self.gradient_dtype
        if self.documents:
            documents.attach(model)
        if self.tiled_mlps:
            tiled_mlp.tile(model)
        return tile(model) if self.tiled else model

    def shadow(self, device: torch.device) -> Callable[[], torch.nn.Module]:
        """Makes the model to train under fake tensors. Raises InvalidJob."""
        if self.adapter is None:
            return self._empty_frozen
        with torch.device("meta"):
            model = adapters.attach(self.empty(), self.adapter, self.seed)
        return lambda: self._as_trained(self._as_asked(adapters.on_device(model, device)))

    def _empty_frozen(self) -> torch.nn.Module:
        model = self.empty()
        freeze(model, self.freeze)
        return self._as_trained(self._as_asked(model))

    def _as_trained(self, model: torch.nn.Module) -> torch.nn.Module:
        """As one of the ranks that share each sequence has it, and with all blocks scaled, for shapes alone."""
        if self.layer_drop is not None:
            DroppedBlocks(model, self.layer_drop, self.seed)
        if self.sequence == 1:
            return model
        return sequence_parallel.attach(model, SequencePart(Imagined(self.sequence)))

    def _load(self, folder: Path) -> torch.nn.Module:
        """The saved weights: all that the model needs, in its shapes, and no others."""
        from transformers import AutoModelForCausalLM

        load: Any = AutoModelForCausalLM.from_pretrained
        model: torch.nn.Module
        model, info = load(
            folder,
            dtype=self.dtype,
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # refused below, by name
            output_loading_info=True,
        )
        _check_weights(folder, model, info)
        return model


def _check_weights(folder: Path, model: torch.nn.Module, info: Mapping[str, Any]) -> None:
    """Refuse weights of which transformers says (`info`) that they are not the model's, or that are not finite."""
    lacking = sorted(info["missing_keys"])
    other = sorted(name for name, *_ in info["mismatched_keys"])
    surplus = sorted(set(info["unexpected_keys"]) - vectors(folder))
    for names, what in (
        (lacking, "lacks {}"),
        (other, "holds {} in another shape"),
        (surplus, "holds {}, for which this model has no place"),
    ):
        if names:
            raise InvalidJob(
                FIELD,
                f"{folder} {what.format(listed(names))}: its weights are not those of the "
                f"{type(model).__name__} that its config.json describes",
                "take weights and config.json from the same save_pretrained",
            )
    bad = [name for name, parameter in model.named_parameters() if not is_finite(parameter.detach())]
    if bad:
        raise InvalidJob(
            FIELD,
            f"{folder} holds numbers that are not finite in {listed(bad)}",
            "take an earlier result",
        )


def open_model(spec: EngineSpec, folder: Path | None, vocab_size: int, end_of_text: int) -> ModelRecipe:
    """Check the model source. Raises InvalidJob with the field and what transformers said."""
    from transformers import AutoConfig

    where = "spec.engine.model.config" if spec.model.config is not None else "spec.engine.model.uri"
    try:
        if spec.model.config is None:
            config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
        else:
            given = dict(spec.model.config)
            given.setdefault("vocab_size", vocab_size)
            given.setdefault("bos_token_id", end_of_text)
            given.setdefault("eos_token_id", end_of_text)
            config = AutoConfig.for_model(given.pop("model_type"), **given)
            _check_fields(config, given, where)
    except InvalidJob:
        raise
    except Exception as problem:
        raise InvalidJob(where, f"is refused by transformers: {_brief(problem)}", "correct it") from problem
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and spec.data.sequence_length > longest:
        raise InvalidJob(
            "spec.engine.data.sequenceLength",
            f"is {spec.data.sequence_length}, the model's max_position_embeddings is {longest}",
            "shorten it, or raise the model's limit",
        )
    if getattr(config, "quantization_config", None) is not None:
        raise InvalidJob(
            where,
            "has a quantization_config, and quantized weights are not trained",
            "name the model as it was before",
        )
    if folder is not None:
        check_files(folder)
    size = getattr(config, "vocab_size", None)
    if size is None or getattr(config, "num_hidden_layers", 1) == 0:
        lacking = "layers" if size is not None else "vocabulary of its own"
        raise InvalidJob(where, f"describes a {config.model_type} model without {lacking}", "correct it")
    if size < vocab_size:
        raise InvalidJob(where, f"vocab_size {size} is less than the tokenizer's {vocab_size}", "raise it")
    if spec.sequence > 1:
        sequence_parallel.refuse(config, spec.data.sequence_length, spec.sequence)
    if spec.data.keeps_documents_apart:
        documents.refuse(config)
    return ModelRecipe(
        config,
        folder,
        DTYPES[spec.dtype],
        spec.seed,
        spec.adapter,
        spec.freeze,
        spec.loss == TILED,
        spec.mlp == TILED,
        spec.sequence,
        spec.gradient_sums == FLOAT32,
        spec.layer_drop,
        spec.data.keeps_documents_apart,
    )


def _check_fields(config: Any, given: Mapping[str, Any], where: str) -> None:
    """Refuse fields that the architecture does not have: transformers would keep them, and nothing would read them."""
    known = {field.name for field in dataclasses.fields(config)} | set(config.attribute_map)
    unread = [
        name
        for name in given
        if name not in known and name in vars(config) and not hasattr(type(config), name)
    ]
    if unread:
        near = difflib.get_close_matches(unread[0], known, n=2, cutoff=0.5)
        raise InvalidJob(
            f"{where}.{unread[0]}",
            f"is not a field of {type(config).__name__}"
            + (f", which has {' and '.join(near)}" if near else ""),
            "correct it, or take it out",
        )


def _brief(problem: Exception) -> str:
    """What an exception of a library says, of which some list every model they know."""
    text = str(problem) if isinstance(problem, ValueError) else f"{type(problem).__name__}: {problem}"
    return text if len(text) <= _BRIEF else f"{text[:_BRIEF]} ..."


def check_causal(model: torch.nn.Module, vocabulary: int) -> None:
    """Refuse a model in which a position sees later ones: it would read the tokens that it has to predict.

    The gradient of the first position's logits with respect to later embeddings is exactly zero in a causal model.
    An architecture that takes no such short sequence is not checked.
    """
    kept: list[torch.Tensor] = []  # the embeddings

    def keep(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
        kept.append(output.detach().requires_grad_())  # which those of a frozen table do not
        return kept[-1]

    table: Any = model.get_input_embeddings()  # type: ignore[operator]
    hook = table.register_forward_hook(keep)
    was_training = model.training
    try:
        tokens = torch.arange(_PROBE_TOKENS, device=table.weight.device)[None] % vocabulary
        logits = model.eval()(input_ids=tokens, use_cache=False).logits
        (gradient,) = torch.autograd.grad(logits[0, 0].float().square().sum(), kept[0])
    except (RuntimeError, ValueError, IndexError):
        return
    finally:
        hook.remove()
        model.train(was_training)
    if bool((gradient[0, 1:].abs() > 0).any()):
        raise InvalidJob(
            "spec.engine.model",
            f"{type(model).__name__} is not causal as it is configured: a position sees the tokens after it, "
            "which it has to predict",
            "set is_decoder: true in its config if it has that field, or choose a causal model",
        )


def measure_demand(recipe: ModelRecipe, spec: EngineSpec, device: torch.device, ranks: int = 1) -> Demand:
    """Group sizes and peak activations, found on fake tensors: nothing is allocated. Raises InvalidJob."""
    divide(spec.batch.sequences, spec.batch.micro_batch, ranks, spec.order, spec.sequence)  # refused at once
    return demand_of(recipe, spec, *measure_peaks(recipe, spec, device), ranks)


def measure_peaks(
    recipe: ModelRecipe, spec: EngineSpec, device: torch.device
) -> tuple[torch.nn.Module, Peaks]:
    """The fake model and the peaks of its activations, which any number of ranks has. Raises InvalidJob."""
    try:
        model, peaks = peak_activation_bytes(
            recipe.shadow(device),
            spec.batch.micro_batch,
            spec.data.sequence_length,
            device,
            None if spec.evaluation is None else token_losses,
            backward=spec.optimizer.name != ZEROTH_ORDER,
            documents=recipe.documents,
        )
    except InvalidJob:
        raise
    except Exception as problem:  # the model's own code, which may fail in any way
        raise InvalidJob(
            "spec.engine.model",
            f"this architecture cannot be trained here: {_brief(problem)}",
            "correct its config, or choose another",
        ) from problem
    if spec.activations in AGAIN and peaks.recomputed is None:
        raise InvalidJob(
            "spec.engine.activations",
            f"{spec.activations} is not possible with this {type(model).__name__}: {peaks.why_not}",
            "keep them",
        )
    return model, peaks


def demand_of(
    recipe: ModelRecipe, spec: EngineSpec, model: torch.nn.Module, peaks: Peaks, ranks: int
) -> Demand:
    """What `measure_peaks` found, as a number of ranks divides it. Raises InvalidJob."""
    division = divide(spec.batch.sequences, spec.batch.micro_batch, ranks, spec.order, spec.sequence)
    groups = tuple(group.size for group in make_groups(model, ranks))
    merges = recipe.adapter is not None and recipe.adapter.merge
    return Demand(
        groups,
        spec.dtype,
        spec.batch.micro_batch,
        peaks.kept,
        peaks.evaluation,
        frozen_bytes=sum(aligned(each.numel() * each.itemsize) for each in frozen(model)),
        frozen_in_blocks=frozen_in_blocks(model),
        shared_blocks=shares_blocks(model),
        merge_bytes=adapters.merge_bytes(model) if merges else 0,
        writes_frozen=bool(spec.freeze),
        ranks=ranks,
        fixed_order=spec.order == FIXED,
        partial_sums=division.partial_sums,
        leaf_size=division.leaf_size,
        sharding=spec.sharding,
        part_bytes=recipe.part_bytes(model) if ranks > 1 else None,
        gathers_result=recipe.adapter is not None or not writes_in_turn(model),
        activations=spec.activations,
        schedule=spec.schedule,
        state=spec.state,
        recompute_bytes=peaks.recomputed,
        swap_bytes=peaks.swapped,
        swapped_bytes=peaks.on_host,
        gradient_dtype=FLOAT32 if spec.gradient_sums == FLOAT32 else spec.dtype,
        sequence=spec.sequence,
        sequence_bytes=sequence_parallel.exchanged_bytes(model),
        zeroth_order=spec.optimizer.name == ZEROTH_ORDER,
    )


def model_report(model: torch.nn.Module, adapter: Adapter | None) -> dict[str, Any]:
    """How much of the model is trained, for the status."""
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "trainableParameters": sum(each.numel() for each in model.parameters() if each.requires_grad),
        "adapter": None if adapter is None else str(adapter)[:253],
    }
