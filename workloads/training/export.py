"""The result: a directory that `transformers` (and Busbar's serving engine) loads.

Everything is first written to a hidden folder inside the output and made durable. Then the old `config.json`,
without which nothing loads the directory, is removed, the new files are renamed into place, and the new
`config.json` comes last: at any moment the directory is loadable and whole, or not loadable at all.
Checkpoints may live in a subfolder of the same output; they are not changed.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.dlpack import from_dlpack

from busbar.workloads.training import adapter as adapters
from busbar.workloads.training.chat import TEMPLATE
from busbar.workloads.training.durable import fsync
from busbar.workloads.training.errors import Diverged
from busbar.workloads.training.settings import Adapter
from busbar.workloads.training.state_file import is_finite
from busbar.workloads.training.tokenizer import save_tokenizer
from busbar.workloads.training.weight_files import WeightFiles

if TYPE_CHECKING:
    from busbar.workloads.training.trainer import Trainer

MARKERS = (
    "config.json",
    adapters.CONFIG,
)  # of a model, of an adapter: without it nothing loads the directory
ADAPTER = "adapter"  # folder of the adapter of a merged model
SHARD_BYTES = 1 * 2**30  # bytes that are written at once; on a GPU a host copy of them is made


def export(
    model: torch.nn.Module,
    tokenizer: Any,
    output: Path,
    sequence: int,
    facts: Mapping[str, Any],
    saved_tokenizer: Path | None = None,
    adapter: Adapter | None = None,
    confirm: Callable[[], object] = lambda: None,
    chat_template: str | None = None,
    weights: Iterable[tuple[str, torch.Tensor]] | None = None,
) -> None:
    """Write weights, configs, tokenizer and `busbar.json` (what was trained, and its scores) to `output`.

    Of a model with an adapter the adapter is written, in peft's format. Merged, the model is written as any other, and
    the adapter beside it in its own folder; the weights of `model` are changed then.

    Args:
        saved_tokenizer: the folder of the tokenizer, whose files are taken as they are (with the chat template).
        confirm: called before the old result is replaced; raises where it must not be.
        chat_template: in the place of the saved tokenizer's own.
        weights: all parameters by their names, one after another; None: `model` has them.
    """
    from transformers.utils.logging import disable_progress_bar

    staging = output / ".tmp-export"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    disable_progress_bar()  # type: ignore[no-untyped-call]
    if adapter is not None:
        adapters.save(model, staging / ADAPTER if adapter.merge else staging)
    if adapter is None or adapter.merge:
        model = model if adapter is None else adapters.merged(model)
        save: Any = model.save_pretrained
        if weights is None:
            save(staging, state_dict=_views(model), max_shard_size=SHARD_BYTES)
        else:
            save(staging, state_dict={})  # configs
            _write_in_turn(model, weights, staging)
    context = getattr(model.config, "max_position_embeddings", sequence)
    save_tokenizer(tokenizer, staging, int(context), saved_tokenizer)
    if chat_template is not None:
        (staging / TEMPLATE).write_text(chat_template)
    (staging / "busbar.json").write_text(json.dumps(facts, indent=2, sort_keys=True) + "\n")
    for file in staging.rglob("*"):
        file.chmod(0o755 if file.is_dir() else 0o644)  # another pod, with another uid, will read it
        fsync(file)
    fsync(staging)
    confirm()
    _swap_in(staging, output)


def _views(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The weights in place, each as a storage of its own.

    `save_pretrained` takes parts of one buffer for shared weights and would copy them all. Tied weights stay one
    tensor, so that they are written once.
    """
    views: dict[int, torch.Tensor] = {}
    found = {}
    for name, value in model.state_dict().items():
        if value.data_ptr() not in views:
            views[value.data_ptr()] = from_dlpack(value.detach())
        found[name] = views[value.data_ptr()]
    return found


def _write_in_turn(model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]], folder: Path) -> None:
    """The weights as they come, each once, and the buffers that `model` has."""
    tensors = dict(model.named_parameters())
    shared = {name for name, _ in model.named_parameters(remove_duplicate=False)} - set(tensors)
    buffers = {
        name: value
        for name, value in model.state_dict().items()
        if name not in tensors and name not in shared
    }
    files = WeightFiles(folder, {**tensors, **buffers}, SHARD_BYTES)
    for name, value in chain(buffers.items(), weights):
        files.write(name, value)


def writes_in_turn(model: Any) -> bool:
    """Whether the files of a result hold the model's parameters as they are: `transformers` makes others of some models'."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    return not model._keys_to_ignore_on_save and not get_model_conversion_mapping(model, add_legacy=False)


DIGEST_BYTES = 16 * 2**20


def trained_weights(trainer: Trainer) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights that are trained, in the order of their names. Raises Diverged where some are not finite."""
    for name, parameter, whole in trainer.weights():
        if not parameter.requires_grad:
            continue
        if not is_finite(whole):
            raise Diverged(
                f"{name} holds numbers that are not finite: no result is written, an earlier one stays. "
                "Lower optimizer.learningRate, or set optimizer.gradientClip"
            )
        yield name, whole


def take_part(trainer: Trainer) -> None:
    """What ranks that write nothing do while another reads the weights from all: once for `digest_of`, once for `export`."""
    for _ in range(2):
        for _ in trainer.weights():
            pass


def digest_of(parameters: Iterable[tuple[str, torch.Tensor]]) -> str:
    """SHA-256 over names and bytes, which come in the order of the names."""
    digest = hashlib.sha256()
    for name, parameter in parameters:
        digest.update(name.encode() + b"\0")
        flat = parameter.detach().reshape(-1).view(torch.uint8)
        for start in range(0, flat.numel(), DIGEST_BYTES):
            digest.update(flat[start : start + DIGEST_BYTES].cpu().numpy().data)
    return digest.hexdigest()


def _swap_in(staging: Path, output: Path) -> None:
    for marker in MARKERS:
        (output / marker).unlink(missing_ok=True)
    for stale in output.glob("*.safetensors*"):  # an earlier result may have had more shards
        stale.unlink()
    adapters.remove_old(output, ADAPTER)
    for file in sorted(staging.iterdir(), key=lambda item: item.name in MARKERS):
        file.rename(output / file.name)
    fsync(output)
    staging.rmdir()
