"""The ways to decode on a GPU, on a CPU: the kernel by Triton's interpreter (`conftest.py`), torch's paged attention by a
stand-in. What they compute, not how fast."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.serving.compiled_kernel import VARIANTS
from tests.serving.engines import generate, greedy_params, load_engine, tokens_of
from tests.serving.models import greedy

from busbar.workloads.serving import decode_kernel, kvcodes, paged_decode, probe
from busbar.workloads.serving.attention import TiledProduct
from busbar.workloads.serving.block_attention import InPlace
from busbar.workloads.serving.kvcache import KvShape
from busbar.workloads.serving.probe import (
    LAYOUTS,
    TOLERANCE,
    Trial,
    choose_in_place,
    time_decoding,
    try_blocks,
)

SHAPE = KvShape(3, 2, 16, 8, torch.float32)


@pytest.mark.parametrize(
    ("shape", "heads", "layouts"),
    [
        (SHAPE, 4, LAYOUTS),
        (SHAPE, 2, [((2,), 0, 1)]),  # one token, one query of a head
        (
            replace(SHAPE, kv_heads=1),
            24,
            [((1, 2, 3), 9, 1), ((4, 5), 6, 1)],
        ),  # more queries than a product's least
        (SHAPE, 4, [((1, 2, 3 + i), 9 + i % 3, 1) for i in range(5)] + [((1, 9), 6, 1)]),  # shared blocks
        (replace(SHAPE, head_dim=24), 6, LAYOUTS),  # no powers of two
        (replace(SHAPE, block_tokens=64), 4, [((3, 1, 9, 4, 2), 16, 1), ((5,), 3, 1)]),  # several shares
        (
            replace(SHAPE, block_tokens=64),
            4,
            [((3, 1), 4, 1), ((5,), 0, 1)],
        ),  # a context ends behind a tile's first token
        (replace(SHAPE, form=kvcodes.INT8), 4, LAYOUTS),
        (replace(SHAPE, form=kvcodes.INT4), 4, LAYOUTS),
        (
            replace(SHAPE, form=kvcodes.INT4, head_dim=24),
            6,
            [((1, 2, 3 + i), 9 + i % 3, 1) for i in range(3)],
        ),
        (replace(SHAPE, form=kvcodes.INT8, dtype=torch.float16, block_tokens=64), 4, [((3, 1, 4), 9, 1)]),
        (
            replace(SHAPE, dtype=torch.float16, head_dim=64),
            8,
            LAYOUTS,
        ),  # the interpreter multiplies no bfloat16
    ],
)
def test_the_kernel_attends_as_float64_does(
    shape: KvShape, heads: int, layouts: list[tuple[tuple[int, ...], int, int]]
) -> None:
    trial = try_blocks(shape, heads, layouts, decode_kernel.KERNEL)
    assert trial.max_error < (1e-5 if shape.dtype == torch.float32 else TOLERANCE[shape.dtype])


@given(st.integers(1, 300), st.integers(1, 16), st.integers(1, 200_000), st.integers(1, 600))
def test_shares_cover_a_context_and_do_not_exceed_the_programs_asked_for(
    rows: int, kv_heads: int, longest: int, programs: int
) -> None:
    share, splits = decode_kernel.shares_of(rows, kv_heads, longest, programs)
    assert share % decode_kernel.TILE == 0
    assert (splits - 1) * share < longest <= splits * share
    assert splits == 1 or splits * rows * kv_heads <= programs


def test_shares_of_nothing_add_nothing() -> None:
    mixed = torch.randn(2, 3, 4, 16, generator=torch.Generator().manual_seed(0))
    logs = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))
    logs[0, 1:] = float("-inf")
    out = decode_kernel.merge_splits(mixed, logs, torch.empty(2, 4, 16))
    assert torch.equal(out[0], mixed[0, 0])
    expected = (mixed[1] * torch.softmax(logs[1], 0)[..., None]).sum(0)
    torch.testing.assert_close(out[1], expected)


def test_greedy_tokens_equal_transformers(llama: tuple[Path, Any]) -> None:
    folder, model = llama
    loaded = load_engine(folder, max_batched_tokens=48)
    loaded.core.runner.decoder.in_place = decode_kernel.KERNEL
    prompts = [[3 + (i * 7 + j) % 90 for j in range(length)] for i, length in enumerate((5, 63, 90))]
    found = generate(loaded, prompts, greedy_params(12))
    assert [tokens_of(d) for d in found] == [greedy(model, p, 12) for p in prompts]


def test_triton_compiles_the_kernels_for_gpus(tmp_path: Path) -> None:
    """For the processors of a T4, an A100 and an H100, which need not be there."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    del environment["TRITON_INTERPRET"]
    ran = subprocess.run(
        [sys.executable, "-m", "tests.serving.compiled_kernel", "75:fp16", "80:bf16", "90:bf16"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert set(found) == {"75", "80", "90"}
    for shared in found.values():
        assert set(shared) == set(VARIANTS)
        assert max(shared.values()) <= 48 * 1024  # what every GPU gives a program without being asked


@pytest.mark.usefixtures("paged")
@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages_of_torchs_attention_are_the_blocks_of_the_pool(heads: int, dtype: torch.dtype) -> None:
    trial = try_blocks(replace(SHAPE, dtype=dtype), heads, LAYOUTS, paged_decode.PAGED)
    assert trial.max_error < (1e-5 if dtype == torch.float32 else TOLERANCE[dtype])


def gpu_choice(shape: KvShape = SHAPE) -> tuple[str | None, list[str]]:
    """What `choose_in_place` would take for a GPU, computed on the CPU."""
    chosen, trials = choose_in_place(shape, 4, torch.device("cuda"), TiledProduct())
    return None if chosen is None else chosen.name, [trial.name for trial in trials]


class Times:
    """Seconds that the ways of a GPU are said to take; gathering takes two."""

    def __init__(self) -> None:
        self.of = {"paged-varlen": 1.0, "split-kv-kernel": 0.5}


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch, paged: None) -> Times:
    """The trials of a GPU compute here, and take these times."""
    times = Times()

    def blocks(shape: KvShape, heads: int, way: InPlace, device: torch.device) -> Trial:
        return try_blocks(shape, heads, way=way)

    def decoding(
        shape: KvShape, heads: int, device: torch.device, way: InPlace, *rest: Any
    ) -> tuple[float, float]:
        within, gathered = time_decoding(shape, heads, torch.device("cpu"), way, *rest)
        assert within > 0 < gathered
        return times.of[way.name], 2.0

    monkeypatch.setattr(probe, "TIMED", (2, 24))
    monkeypatch.setattr(probe, "try_blocks", blocks)
    monkeypatch.setattr(probe, "time_decoding", decoding)
    return times


BOTH = ["paged-varlen", "split-kv-kernel"]


def test_a_gpu_takes_the_fastest_way_that_is_faster_than_gathering(times: Times) -> None:
    assert gpu_choice() == ("split-kv-kernel", BOTH)
    times.of["paged-varlen"] = 0.25
    assert gpu_choice() == ("paged-varlen", BOTH)
    times.of = {"paged-varlen": 2.5, "split-kv-kernel": 3.0}
    assert gpu_choice() == (None, BOTH)


def test_what_was_tried_is_told() -> None:
    assert str(Trial("fused-sdpa", 2e-4, 12.2)) == "fused-sdpa 12 µs, off by 0.0002"
    assert (
        str(Trial("paged-varlen", 2e-4, 12.2, (80, "gathered")))
        == "paged-varlen 12 µs instead of 80 gathered, off by 0.0002"
    )
    assert str(Trial("blocks-in-place", 2e-7)) == "blocks-in-place, off by 2e-07"


def test_a_gpu_takes_no_way_that_is_wrong(times: Times, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_kernel, "merge_splits", lambda mixed, logs, out: out.fill_(1.0))
    assert gpu_choice() == ("paged-varlen", BOTH)


def test_a_gpu_does_without_what_does_not_run_there(
    times: Times, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for form in (kvcodes.INT8, kvcodes.INT4):
        assert gpu_choice(replace(SHAPE, form=form)) == ("split-kv-kernel", ["split-kv-kernel"])
    assert not caplog.messages

    def no_compiler(*_: object, **__: object) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(decode_kernel, "_attend_shares", {})
    assert gpu_choice() == ("paged-varlen", ["paged-varlen"])
    monkeypatch.setattr(paged_decode, "varlen_attn", no_compiler)
    assert gpu_choice() == (None, [])
    assert "paged-varlen does not run here: Failed to find C compiler" in caplog.text
