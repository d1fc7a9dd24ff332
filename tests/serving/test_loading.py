"""Model folders and memory sizes that cannot be served, and the settings derived from those that can."""

from __future__ import annotations

import json
import mmap
import shutil
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.serving.engines import generate, greedy_params, load_engine, tokens_of

from busbar.kube.contracts.report import ServingReport
from busbar.workloads.serving import checkpoint
from busbar.workloads.serving.attention import Span
from busbar.workloads.serving.errors import (
    MemoryTooSmall,
    ModelCorrupt,
    ModelFileMissing,
    ServingError,
    SettingsError,
)
from busbar.workloads.serving.experts import DenseMlp
from busbar.workloads.serving.kvcache import KvCache, KvShape
from busbar.workloads.serving.linear import Linear, Move, PackedLinear, PlainLinear, can_pack, packed
from busbar.workloads.serving.probe import batch_invariant, choose_backend
from busbar.workloads.serving.report import table_report
from busbar.workloads.serving.settings import EngineSettings, ServerSettings
from busbar.workloads.serving.weights import ResidentLayers

WEIGHTS = "model.safetensors"
NORM = "model.norm.weight"


@pytest.fixture
def folder(llama: tuple[Path, Any], tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama[0], tmp_path / "model"))


def change_weights(folder: Path, change: dict[str, torch.Tensor | None]) -> None:
    tensors: dict[str, torch.Tensor] = load_file(folder / WEIGHTS)
    for name, tensor in change.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, folder / WEIGHTS)


def test_missing_weights_are_named(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    with pytest.raises(ModelFileMissing, match=r"model\.safetensors is missing"):
        load_engine(folder)


def test_a_missing_tokenizer_is_named(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelFileMissing, match=r"tokenizer\.json is missing"):
        load_engine(folder)


def test_cut_weights_are_named(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: len(data) // 2])
    with pytest.raises(ModelCorrupt, match="cannot be read as safetensors"):
        load_engine(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({NORM: None}, r"missing model\.norm\.weight"),
        ({"model.extra.weight": torch.zeros(2)}, r"unexpected model\.extra\.weight"),
        ({NORM: torch.zeros(3)}, r"model\.norm\.weight has shape \(3,\)"),
    ],
)
def test_weights_of_another_model_are_refused(
    folder: Path, change: dict[str, torch.Tensor | None], message: str
) -> None:
    change_weights(folder, change)
    with pytest.raises(ModelCorrupt, match=message):
        load_engine(folder)


def test_a_tokenizer_larger_than_the_embedding_is_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 300}))
    with pytest.raises(ModelCorrupt, match="do not belong together"):
        load_engine(folder)


def test_a_token_beyond_the_embedding_is_refused_also_where_the_tokenizer_has_no_more_tokens(
    folder: Path,
) -> None:
    file = folder / "tokenizer.json"
    written = json.loads(file.read_text())
    last = max(written["model"]["vocab"], key=written["model"]["vocab"].get)
    written["model"]["vocab"][last] += 1000
    file.write_text(json.dumps(written))
    with pytest.raises(ModelCorrupt, match="tokens up to 1383, the model's embedding only those up to 383"):
        load_engine(folder)


def test_shards_are_read_through_their_index(folder: Path, llama: tuple[Path, Any]) -> None:
    tensors: dict[str, torch.Tensor] = load_file(folder / WEIGHTS)
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in parts.items():
        save_file({n: tensors[n] for n in held}, folder / file)
    (folder / WEIGHTS).unlink()
    index = {"weight_map": {n: file for file, held in parts.items() for n in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    prompt = [[5, 6, 7]]
    whole = generate(load_engine(llama[0]), prompt, greedy_params(8))
    assert tokens_of(generate(load_engine(folder), prompt, greedy_params(8))[0]) == tokens_of(whole[0])


def test_a_whole_file_goes_before_an_index(folder: Path) -> None:
    """As in transformers and in training: a folder that was saved twice may have both."""
    index = {"weight_map": {NORM: "of-an-earlier-save.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert set(checkpoint.Checkpoint(folder)) == set(load_file(folder / WEIGHTS))


def test_loading_never_holds_more_than_a_few_tensors_of_the_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive, peak = 0, 0
    opened: Any = safe_open

    class Watching:
        def __init__(self, *args: Any, **options: Any) -> None:
            self._file = opened(*args, **options)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

        def __enter__(self) -> Watching:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def get_tensor(self, name: str) -> torch.Tensor:
            nonlocal alive, peak
            tensor: torch.Tensor = self._file.get_tensor(name)
            alive, peak = alive + 1, max(peak, alive + 1)
            weakref.finalize(tensor, gone)
            return tensor

    def gone() -> None:
        nonlocal alive
        alive -= 1

    monkeypatch.setattr(checkpoint, "safe_open", Watching)
    load_engine(folder)
    assert 1 <= peak <= 3


def test_an_index_cannot_point_out_of_the_folder(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    index = {"weight_map": {NORM: "../other/model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelFileMissing, match="is missing"):
        load_engine(folder)


def test_memory_for_less_than_one_block_is_refused_with_the_least_amount(folder: Path) -> None:
    block = 2 * 2 * 2 * 16 * 16 * 4
    with pytest.raises(MemoryTooSmall, match=f"give at least {2 * block}"):
        load_engine(folder, kv_bytes=2 * block - 1)
    assert load_engine(folder, kv_bytes=2 * block).core.scheduler.pool.total == 1


def test_the_context_is_what_the_pool_can_hold(folder: Path) -> None:
    block = 2 * 2 * 2 * 16 * 16 * 4
    assert load_engine(folder, kv_bytes=11 * block).core.max_model_len == 160
    assert load_engine(folder).core.max_model_len == 512


def test_a_context_beyond_the_models_is_refused(folder: Path) -> None:
    with pytest.raises(SettingsError, match="made for 512"):
        load_engine(folder, max_model_len=513)
    assert load_engine(folder, max_model_len=512).core.max_model_len == 512


def test_a_gpu_that_is_not_there_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SettingsError, match="no CUDA device"):
        load_engine(folder, device="cuda")
    assert load_engine(folder, device="auto").device.type == "cpu"


def test_packed_products_equal_float64() -> None:
    if not can_pack(torch.device("cpu"), torch.float32):
        assert not torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        return
    generator = torch.Generator().manual_seed(3)
    weight, bias = torch.randn((70, 33), generator=generator), torch.randn(70, generator=generator)
    x = torch.randn((9, 33), generator=generator)
    exact = x.double() @ weight.double().T + bias.double()
    for linear in (PlainLinear(weight, bias), PackedLinear(packed(weight), bias)):
        assert (linear(x).double() - exact).abs().max() < 1e-4
        assert linear.bytes == (70 * 33 + 70) * 4


def test_a_wrong_attention_back_end_is_never_chosen(folder: Path) -> None:
    loaded = load_engine(folder)
    shape = loaded.core.runner.cache.shape

    class Wrong:
        name = "wrong"

        def __call__(
            self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, span: Span, kv_heads: int
        ) -> torch.Tensor:
            return torch.zeros_like(q)

    right = loaded.core.runner.decoder.attention
    chosen, trials = choose_backend(shape, 4, torch.device("cpu"), [Wrong(), right])
    assert chosen is right
    assert {t.name: t.max_error > 0.01 for t in trials} == {"wrong": True, right.name: False}
    with pytest.raises(ServingError, match="wrong is off by"):
        choose_backend(shape, 4, torch.device("cpu"), [Wrong()])


def test_a_pool_on_a_cpu_takes_memory_where_it_is_written() -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    before = resident_bytes()
    cache = KvCache(KvShape(1, 1, 64, 64, torch.float32), 2**11, torch.device("cpu"))
    assert cache.bytes > 2**26
    assert resident_bytes() < before + 2**22
    ones = torch.ones((64, 1, 64))
    blocks, slots = torch.full((64,), 1000), torch.arange(64)
    cache.store(0, cache.slot_index(blocks, slots), ones, 2 * ones)
    assert cache.pool.sum() == 3 * 64 * 64
    assert cache.contents(0, torch.tensor([1000]))[0, 1].min() == 2


def test_the_start_check_notices_a_product_that_depends_on_the_number_of_rows(folder: Path) -> None:
    runner = load_engine(folder, deterministic=True).core.runner
    shape, device = runner.cache.shape, torch.device("cpu")
    decoder = runner.decoder
    assert batch_invariant(decoder, shape, device, 512)

    class Leaning:
        """A matrix product with an error that grows with the batch."""

        def __init__(self, inner: Linear) -> None:
            self._inner = inner
            self.bytes = inner.bytes

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return self._inner(x) + 1e-6 * x.shape[0]

        def moved(self, move: Move) -> Leaning:
            return Leaning(self._inner.moved(move))

    first, *rest = decoder.weights.layers
    assert isinstance(first.mlp, DenseMlp)
    leaning = replace(first, mlp=replace(first.mlp, down=Leaning(first.mlp.down)))
    decoder.weights = replace(decoder.weights, layers=ResidentLayers([leaning, *rest]))
    assert not batch_invariant(decoder, shape, device, 512)


def test_the_report_names_the_class_and_its_bytes(folder: Path) -> None:
    loaded = load_engine(folder)
    generate(loaded, [[1, 2, 3]], greedy_params(10, ignore_eos=True))
    report = table_report(loaded, ServerSettings(EngineSettings(folder), "tiny"))
    assert report.workload_class.startswith("serve-llama-117.1k-float32-")
    assert report.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert report.mode == "resident"
    assert report.parameters == 117_056
    assert report.kv_bytes == loaded.kv_bytes
    assert ServingReport.model_validate_json(json.dumps(report.to_wire())) == report
