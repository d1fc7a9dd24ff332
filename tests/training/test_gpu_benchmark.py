"""The benchmark script for a GPU machine: its small configuration runs here without a GPU and needs only torch."""

from __future__ import annotations

import gc
import importlib.util
import json
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from benchmarks.gpu.training_ways import Decoder

from busbar.workloads.machine.streams import make_repeatable
from busbar.workloads.training import optimizer, tiled_mlp
from busbar.workloads.training.norm import clip_factor

SCRIPT = Path(__file__).parents[2] / "benchmarks/gpu/training.py"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    found = importlib.util.spec_from_file_location("gpu_training_benchmark", SCRIPT)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    monkeypatch.setitem(sys.modules, found.name, module)
    monkeypatch.setattr(sys, "path", list(sys.path))
    found.loader.exec_module(module)
    return module


@pytest.fixture
def miniature(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, Any]]:
    """Runs the script without a GPU; its result."""

    def run(*options: str) -> dict[str, Any]:
        output = tmp_path / "result.json"
        monkeypatch.setattr(benchmark.torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(sys, "argv", ["training.py", *options, "--output", str(output)])
        assert benchmark.main() == 0
        found: dict[str, Any] = json.loads(output.read_text())
        return found

    return run


def test_the_miniature_is_bit_equal_and_claims_no_gpu(miniature: Callable[..., dict[str, Any]]) -> None:
    result = miniature()
    assert result["bitEqual"] is True
    assert result["miniature"] is True
    assert result["machine"]["gpu"] is None
    assert result["machine"]["device"] == "cpu"
    assert set(result["ways"]) == {"plain", "resident", "half", "offload", "blocking", "stream", "fsdp2"}
    assert set(result["ways"]["offload"]["timesAsFastAs"]) == {"fsdp2"}
    assert "equality" not in result["ways"]["fsdp2"]
    assert set(result["limits"]) == {"matmulTflops", "hostCopyGBps"}  # there is no link to measure
    assert (
        result["ways"]["offload"]["linkBytesPerStep"]
        == 2 * result["ways"]["offload"]["plan"]["host"]["optimizer"]
    )
    assert result["ways"]["resident"]["linkBytesPerStep"] == 0
    assert result["ways"]["stream"]["plan"]["mode"] == "parameter-offload"
    assert result["ways"]["stream"]["linkBytesPerStep"] > 2 * 4 * result["parameters"]


def test_tiles_and_sums_in_float32_are_near_the_plain_loop(
    miniature: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiled_mlp, "mlp_tile_rows", lambda tokens: 20)
    found = miniature("--ways", "plain,recompute,tiles,sums", "--dtype", "bfloat16")["ways"]
    assert found["recompute"]["equality"]["weightsEqual"] is True
    for name in ("tiles", "sums"):
        assert "equality" not in found[name]
        assert 0 < found[name]["lossesDifferBy"] < 0.01
    gradients = {name: way["plan"]["device"]["gradients"] for name, way in found.items() if "plan" in way}
    assert gradients["sums"] == 2 * gradients["recompute"]


def test_the_ways_without_a_backward_pass_are_equal_to_each_other(
    miniature: Callable[..., dict[str, Any]],
) -> None:
    ways = ["--ways", "plain,zeroth,zeroth-stream", "--dtype", "bfloat16"]
    found = miniature(*ways)["ways"]
    assert found["zeroth-stream"]["equality"] == {
        "with": "zeroth",
        "lossesEqual": True,
        "firstDifferentStep": None,
        "weightsEqual": True,
        "differentParameters": 0,
    }
    assert found["zeroth-stream"]["linkBytesPerStep"] > 0
    assert "gradients" not in found["zeroth"]["plan"]["device"]


def test_swapped_inputs_are_equal_and_reduced_moments_move_fewer_bytes(
    miniature: Callable[..., dict[str, Any]],
) -> None:
    ways = ["--ways", "plain,recompute,swap,offload,bf16,int8", "--dtype", "bfloat16"]
    found = miniature(*ways)["ways"]
    assert found["swap"]["equality"]["weightsEqual"] is found["recompute"]["equality"]["weightsEqual"] is True
    assert found["swap"]["linkBytesPerStep"] == 2 * found["swap"]["plan"]["host"]["activations"] > 0
    assert "equality" not in found["int8"]
    moved = [found[name]["linkBytesPerStep"] for name in ("offload", "bf16", "int8")]
    assert moved[0] * 6 == moved[1] * 10
    assert moved[2] < 0.42 * moved[0]


def test_bfloat16_is_equal_too_and_a_checkpoint_is_measured_beside_torch_save(
    miniature: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    ways = ["--ways", "plain,auto,offload", "--dtype", "bfloat16", "--checkpoint", str(tmp_path / "scratch")]
    result = miniature(*ways)
    assert (result["bitEqual"], result["dtype"]) == (True, "bfloat16")
    measured = result["ways"]["offload"]["checkpoint"]
    assert measured["bytes"] > 12 * result["parameters"]
    assert 0 < measured["blockedSeconds"] <= measured["durableSeconds"]


class Runtime:
    """Records the script's calls to the CUDA runtime."""

    def __init__(self) -> None:
        self.registered: set[int] = set()
        self.most = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert address not in self.registered
        self.registered.add(address)
        self.most = max(self.most, len(self.registered))
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.registered.remove(address)
        return 0


def test_pinned_pages_are_let_go_before_the_next_way_begins(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = Runtime()
    monkeypatch.setattr(benchmark.torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(benchmark.torch.cuda, "synchronize", lambda: None)
    cpu = benchmark.torch.device("cpu")
    for name in ("half", "offload"):
        way = benchmark.make(name, Decoder(benchmark.SHAPES["miniature"]), cpu)
        way.host_arena.pin()
        assert len(runtime.registered) == 1
        way.close()
        assert not runtime.registered
        way.host_arena.unpin()  # a second call has no effect
    assert runtime.most == 1


def test_a_gpu_is_asked_for_repeatable_kernels_without_exception(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda *given: asked.append(given))
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    make_repeatable(torch.device("cpu"))
    assert asked == []
    make_repeatable(torch.device("cuda"))
    assert asked == [(True,)]
    assert getattr(torch.utils.deterministic, "fill_uninitialized_memory") is False  # noqa: B009


def test_a_difference_is_found_and_located(benchmark: ModuleType) -> None:
    import torch

    one = benchmark.Outcome("plain", [1.0, 2.0], [torch.zeros(2), torch.ones(2)], {})
    other = benchmark.Outcome("offload", [1.0, 2.5], [torch.zeros(2), torch.tensor([1.0, 1.5])], {})
    found = benchmark.compare(one, other)
    assert (found["firstDifferentStep"], found["differentParameters"]) == (2, 1)
    assert not found["weightsEqual"]


def test_the_engines_core_needs_only_torch() -> None:
    code = (
        "import sys\n"
        "for name in ('pydantic', 'transformers', 'tokenizers', 'safetensors', 'click'):\n"
        "    sys.modules[name] = None\n"
        "import busbar.workloads.training.optimizer, busbar.workloads.machine.streams\n"
    )
    root = SCRIPT.parents[2] / ".src"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(root)!r})\n{code}"], check=False
    )
    assert done.returncode == 0


def test_what_updates_read_is_held_while_they_are_under_way(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a GPU updates are only queued when `step` returns: memory let go then is written to by the next forward pass.
    made: list[weakref.ref[torch.Tensor]] = []

    def recorded(limit: float, total: torch.Tensor) -> torch.Tensor:
        factor = clip_factor(limit, total)
        made.append(weakref.ref(factor))
        return factor

    monkeypatch.setattr(optimizer, "clip_factor", recorded)
    shape = benchmark.SHAPES["miniature"]
    way = benchmark.make("offload", Decoder(shape), torch.device("cpu"))
    first, second, *_ = benchmark.batches(shape, torch.device("cpu"))
    way.step(first)
    way.drain()  # the queue of a CPU lets go of what it has done
    gc.collect()
    assert made[0]() is not None
    way.step(second)
    way.drain()
    gc.collect()
    assert made[0]() is None
    assert made[1]() is not None
    way.close()
