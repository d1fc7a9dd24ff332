"""Copies of a gang's state in the memory of its pods with parities: what they cost, and how fast a lost rank is rebuilt.

    python benchmarks/training_parity.py --output benchmarks/results/training_parity.json

2 and 4 ranks (gloo, one thread each) copy a state of --mib each to memory, turn by turn without and with parities. Printed
are the CPU seconds of all ranks for a copy and their ratio; the seconds of the exchange beside those of sending the same
bytes in the same pieces and adding nothing up, which is the least that can be reached; and the memory beside that of one
copy, n / (n - parity). Then `parity` ranks lose their memory: seconds until all have the copy verified again, beside those
in which no rank has lost it, and beside the bytes that a lost rank has to receive.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gang_here import run_gang
from benchmarks.result import circumstances, publish

from busbar.workloads.machine.streams import Event
from busbar.workloads.training.demand import PARITY_PIECE_BYTES
from busbar.workloads.training.gang_copies import GangCopies
from busbar.workloads.training.layout import Extent, Layout
from busbar.workloads.training.memory_copy import MemoryCopies
from busbar.workloads.training.parity import Stripes
from busbar.workloads.training.ranks import Beside, Gang
from busbar.workloads.training.state_file import Block

GANGS = ((2, 1), (4, 1), (4, 2))
BLOCK_BYTES = 2**22


class Done(Event):
    def wait(self) -> None:
        return

    def is_set(self) -> bool:
        return True


class State:
    """Blocks of a state in memory."""

    def __init__(self, data: torch.Tensor) -> None:
        starts = range(0, data.numel(), BLOCK_BYTES)
        self._blocks = [Block(start, data[start : start + BLOCK_BYTES], Done(), data) for start in starts]

    def take(self) -> Block | None:
        try:
            return self._blocks.pop()
        except IndexError:
            return None

    def give_back(self, block: Block) -> None:
        return


def measure(gang: Gang, parity: int, mib: int, rounds: int) -> dict[str, float]:
    """The figures of one rank."""
    elements = mib * 2**18
    layout = Layout.of(
        [("m/a", torch.float32, elements)], {"m/a": Extent(gang.rank * elements, gang.size * elements)}
    )
    data = torch.randn(elements, generator=torch.Generator().manual_seed(gang.rank)).view(torch.uint8)
    peers, stripes = gang.beside(), Stripes(gang.size, parity)
    plain = GangCopies(MemoryCopies(), Stripes(gang.size, 0), peers, "plain")
    memory = MemoryCopies()
    copies = GangCopies(memory, stripes, peers, "parity")
    seconds: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}

    def take(name: str, work: Callable[[], object]) -> None:
        gang.gather(name)  # all begin together
        used, started = time.process_time(), time.perf_counter()
        work()
        gang.gather(name)
        seconds.setdefault(name, []).append(time.perf_counter() - started)
        cpu.setdefault(name, []).append(time.process_time() - used)

    for step in range(1, 2 * rounds + 1):
        take("plain", partial(plain.write, step, layout, State(data), {}))
        take("parity", partial(copies.write, step, layout, State(data), {}))
        take("exchange", partial(_exchange, peers, stripes, mib * 2**20))
    held = sum(os.stat(path).st_blocks * 512 for path in (memory.slots[0].state, memory.slots[0].parity))
    for _ in range(rounds):
        take("whole", partial(_check, copies, 2 * rounds))
        if gang.rank < parity:
            copies = GangCopies(MemoryCopies(), stripes, peers, "parity")
        take("rebuilt", partial(_check, copies, 2 * rounds))
    return {
        **{f"{name}Seconds": statistics.median(each) for name, each in seconds.items()},
        **{f"{name}CpuSeconds": statistics.median(each) for name, each in cpu.items()},
        "heldBytes": held,
        "stateBytes": layout.size,
    }


def _exchange(peers: Beside, stripes: Stripes, size: int) -> None:
    """Send and receive what a copy with parities does, as it does."""
    sent, received = (torch.zeros(PARITY_PIECE_BYTES, dtype=torch.uint8) for _ in range(2))
    for start in range(0, stripes.chunk_bytes(size), PARITY_PIECE_BYTES):
        left = min(PARITY_PIECE_BYTES, stripes.chunk_bytes(size) - start)
        for offset, _, _ in stripes.sent():
            to, source = (peers.rank + offset) % stripes.ranks, (peers.rank - offset) % stripes.ranks
            peers.exchange(sent[:left], to, received[:left], source)


def _check(copies: GangCopies, step: int) -> None:
    loaded, _ = copies.newest()
    if loaded is None or loaded.step != step:
        raise RuntimeError("the newest copy is not found")


def report(each: list[dict[str, float]], parity: int) -> dict[str, Any]:
    ranks = len(each)

    def all_of(name: str) -> float:
        return sum(rank[name] for rank in each)

    plain, with_parity = all_of("plainCpuSeconds"), all_of("parityCpuSeconds")
    seconds = {
        name: each[0][f"{name}Seconds"] for name in ("plain", "parity", "exchange", "whole", "rebuilt")
    }
    receives = ranks * each[0]["stateBytes"]  # of a lost rank: all other parts of each of its stripes
    return {
        "ranks": ranks,
        "parity": parity,
        "heldTimes": round(each[0]["heldBytes"] / each[0]["stateBytes"], 4),
        "heldTimesByFormula": round(ranks / (ranks - parity), 4),
        "cpuSecondsOfACopy": round(plain, 3),
        "cpuSecondsWithParity": round(with_parity, 3),
        "cpuRatio": round(with_parity / plain, 3),
        "sentBytesOfARank": parity * int(each[0]["stateBytes"]),
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        "parityOverExchange": round((seconds["parity"] - seconds["plain"]) / seconds["exchange"], 3),
        "rebuiltBytesPerSecond": round(receives * parity / max(1e-9, seconds["rebuilt"] - seconds["whole"])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=128, help="state of a rank")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    found = []
    with Progress() as bar:
        task = bar.add_task("gangs", total=len(GANGS))
        for ranks, parity in GANGS:
            found.append(report(run_gang(ranks, measure, parity, given.mib, given.rounds), parity))
            bar.advance(task)
    result = {
        **circumstances(),
        "mibOfARank": given.mib,
        "gangs": found,
    }
    publish(result, given.output)


if __name__ == "__main__":
    main()
