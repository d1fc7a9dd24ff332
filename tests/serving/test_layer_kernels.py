"""The kernels between a layer's products, by Triton's interpreter (`conftest.py`), against torch's calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.serving.engines import generate, greedy_params, load_engine, tokens_of
from tests.serving.graphed import PROMPTS, graphs_of, with_graphs
from tests.serving.models import greedy, save_model

from busbar.workloads.serving import step_probe
from busbar.workloads.serving.experts import gated
from busbar.workloads.serving.kvcache import KvCache, KvShape
from busbar.workloads.serving.layer_kernels import LAYER_KERNELS
from busbar.workloads.serving.step_probe import try_calls

CPU = torch.device("cpu")


def normal(*size: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 60), (2, 1500)])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sums_and_norms_are_torchs(rows: int, width: int, adds: bool, dtype: torch.dtype) -> None:
    x, weight = normal(rows, width, dtype=dtype), normal(width, seed=2, dtype=dtype)
    added = normal(rows, width, seed=1, dtype=dtype) if adds else None
    total, normed = LAYER_KERNELS.add_norm(x, added, weight, 1e-5)
    expected = x if added is None else x + added
    assert torch.equal(total, expected)
    exact = torch.nn.functional.rms_norm(expected.double(), (width,), weight.double(), 1e-5)
    assert normed.dtype is dtype
    assert (normed.double() - exact).abs().max() < (1e-5 if dtype is torch.float32 else 5e-3)


@pytest.mark.parametrize(("rows", "inner"), [(1, 64), (3, 101), (2, 1500)])
def test_gated_products_are_torchs(rows: int, inner: int) -> None:
    gate_up = 4 * normal(rows, 2 * inner)
    torch.testing.assert_close(LAYER_KERNELS.gated(gate_up), gated(gate_up.clone()))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        (
            "llama",
            {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 60},
        ),  # 20 numbers a head
        ("qwen2", {}),
        ("qwen3", {}),  # norms of queries and keys
        ("mixtral", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{len(value)} changes",
)
def test_greedy_tokens_equal_transformers(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    model = save_model(tmp_path, family, **changes)
    loaded = load_engine(tmp_path, max_batched_tokens=48)
    loaded.core.runner.decoder.calls = LAYER_KERNELS
    found = generate(loaded, PROMPTS[:3], greedy_params(8))
    assert [tokens_of(d) for d in found] == [greedy(model, p, 8) for p in PROMPTS[:3]]


def test_keys_and_values_lie_where_torch_puts_them() -> None:
    shape = KvShape(2, 2, 20, 8, torch.float32)
    heads, rows = 4, 3
    qkv = normal(rows, (heads + 4) * 20)
    angles = normal(rows, 10, seed=3)
    turns = torch.cat((angles.cos(), angles.cos()), 1), torch.cat((-angles.sin(), angles.sin()), 1)
    mine, torchs = KvCache(shape, 4, CPU), KvCache(shape, 4, CPU)
    slots = mine.slot_index(torch.tensor([1, 4, 2]), torch.tensor([0, 7, 3]))
    queries, keys = LAYER_KERNELS.turn_and_store(qkv, turns, None, 0.25, 1e-5, 1, slots, mine)
    by_head = qkv.view(rows, heads + 4, 20)
    swapped = torch.cat((by_head[..., 10:], by_head[..., :10]), -1)
    turned = by_head * turns[0][:, None] + swapped * turns[1][:, None]
    torchs.store(1, slots, turned[:, heads : heads + 2], by_head[:, heads + 2 :])
    torch.testing.assert_close(queries, turned[:, :heads] * 0.25)
    torch.testing.assert_close(keys, turned[:, heads : heads + 2])
    torch.testing.assert_close(mine.pool, torchs.pool)


@pytest.mark.usefixtures("paged")
def test_the_start_takes_them_where_they_are_right_and_faster(
    llama: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loaded, _ = with_graphs(llama[0])
    runner, graphs = loaded.core.runner, graphs_of(loaded)
    torchs, seconds = runner.decoder.calls, [2.0, 1.0]

    def fastest(call: Any, device: torch.device) -> float:
        call()
        return seconds[1 if runner.decoder.calls is LAYER_KERNELS else 0]

    monkeypatch.setattr(step_probe, "fastest", fastest)

    def trial() -> tuple[bool, list[str]]:
        """Whether they are taken, and what is told."""
        runner.decoder.calls = torchs
        told = [str(trial).split(", off")[0] for trial in try_calls(runner, graphs)]
        assert runner.decoder.calls in (LAYER_KERNELS, torchs)
        return runner.decoder.calls is LAYER_KERNELS, told

    assert trial() == (True, ["layer-kernels 1000000 µs instead of 2000000 by torch's calls"])
    assert len(graphs) == 1  # recorded with them

    seconds.reverse()
    assert trial() == (False, ["layer-kernels 2000000 µs instead of 1000000 by torch's calls"])
    assert not len(graphs)

    seconds.reverse()
    monkeypatch.setattr(LAYER_KERNELS, "gated", lambda gate_up: gated(gate_up).neg_())
    assert not trial()[0]

    def fails(gate_up: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(LAYER_KERNELS, "gated", fails)
    assert trial() == (False, [])
    assert "kernels between a layer's products do not run here: Failed to find C compiler" in caplog.text
    assert not graphs.failed


@pytest.mark.usefixtures("paged")
def test_a_cache_of_codes_is_not_for_them(llama: tuple[Path, Any]) -> None:
    loaded, _ = with_graphs(llama[0], kv_dtype="int8")
    assert try_calls(loaded.core.runner, graphs_of(loaded)) == []
    assert loaded.core.runner.decoder.calls is not LAYER_KERNELS
