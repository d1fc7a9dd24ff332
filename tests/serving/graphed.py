"""An engine on a CPU whose decoding steps are graphs; for `PAGED` a test uses the fixture `paged`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.serving.engines import load_engine

from busbar.workloads.serving.block_attention import InPlace
from busbar.workloads.serving.graphs import Compute, DecodeGraphs
from busbar.workloads.serving.loader import Loaded
from busbar.workloads.serving.paged_decode import PAGED

LENGTHS = (5, 63, 90, 17, 40)
PROMPTS = [[3 + (i * 7 + j) % 90 for j in range(length)] for i, length in enumerate(LENGTHS)]


class Again:
    """Records by computing on the same tensors again."""

    def __init__(self) -> None:
        self.recorded = self.replayed = self.forgotten = 0
        self.problem: Exception | None = None

    def __call__(self, compute: Compute) -> Compute:
        if self.problem is not None:
            raise self.problem
        self.recorded += 1
        compute()

        def again() -> None:
            self.replayed += 1
            compute()

        return again

    def forget(self) -> None:
        self.forgotten += 1


def with_graphs(
    folder: Path, most_rows: int = 8, way: InPlace = PAGED, **changes: Any
) -> tuple[Loaded, Again]:
    loaded, recorder = load_engine(folder, max_batched_tokens=48, **changes), Again()
    runner = loaded.core.runner
    runner.decoder.in_place = way
    runner.graphs = DecodeGraphs(runner.decoder, runner.cache, most_rows, recorder)
    return loaded, recorder


def graphs_of(loaded: Loaded) -> DecodeGraphs:
    graphs = loaded.core.runner.graphs
    assert graphs is not None
    return graphs
