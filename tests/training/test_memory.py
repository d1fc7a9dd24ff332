"""Arenas, limits, and the streams that copy an arena's content."""

from __future__ import annotations

import gc
import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from busbar.workloads.machine.limits import RESERVE_BYTES, PeakMeter, host_limit_bytes
from busbar.workloads.machine.streams import (
    CallerStream,
    DeviceWorker,
    Stream,
    WorkerStream,
    enforce_device_limit,
)
from busbar.workloads.training.arena import Arena
from busbar.workloads.training.errors import OutOfArena

CPU = torch.device("cpu")
MIB = 2**20


def test_an_arena_carves_zeroed_disjoint_tensors_and_knows_their_owners() -> None:
    arena = Arena("device", {"parameters": 1024, "staging": 512}, CPU)
    first = arena.carve("parameters", 100, torch.float32)
    second = arena.carve("staging", 64, torch.float32)
    first.fill_(1.0)
    assert torch.equal(second, torch.zeros(64))
    assert arena.used == {"parameters": 512, "staging": 256}
    assert first.data_ptr() % 64 == second.data_ptr() % 64 == 0


def test_an_arena_refuses_more_than_the_owner_was_granted() -> None:
    arena = Arena("device", {"parameters": 512, "staging": 4096}, CPU)
    arena.carve("parameters", 100, torch.float32)
    with pytest.raises(OutOfArena, match="parameters asks for 256 bytes more than its plan left"):
        arena.carve("parameters", 1, torch.float32)


def test_a_reserved_owner_is_accounted_and_held_to_its_grant() -> None:
    arena = Arena("device", {"activations": 1000}, CPU, reserved=("activations",))
    arena.observe("activations", 900)
    arena.observe("activations", 300)
    assert arena.peak["activations"] == 900
    with pytest.raises(OutOfArena):
        arena.observe("activations", 1001)
    with pytest.raises(OutOfArena):
        arena.carve("activations", 1, torch.float32)


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("files", "expected_mib"),
    [
        ({"memory.max": "2147483648\n", "memory.current": "1073741824\n"}, 1024),
        ({"memory/memory.limit_in_bytes": "1073741824\n", "memory/memory.usage_in_bytes": "0\n"}, 1024),
        (
            {
                "memory.max": "2147483648\n",
                "memory.current": "2147483648\n",
                "memory.stat": "anon 1\ninactive_file 805306368\nactive_file 268435456\nfile 1073741824\n",
            },
            1024,
        ),
        (
            {
                "memory/memory.limit_in_bytes": "2147483648\n",
                "memory/memory.usage_in_bytes": "2147483648\n",
                "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 1073741824\ntotal_active_file 0\n",
            },
            1024,
        ),
        ({"memory.max": "max\n", "memory.current": "5\n"}, 4096),
        (
            {"memory/memory.limit_in_bytes": "9223372036854771712\n", "memory/memory.usage_in_bytes": "0"},
            4096,
        ),
        ({}, 4096),
    ],
    ids=[
        "cgroup v2",
        "cgroup v1",
        "v2, half of it file pages",
        "v1, half of it file pages",
        "v2 without limit",
        "v1 without limit",
        "no cgroup",
    ],
)
def test_the_host_limit_is_the_smaller_of_cgroup_and_free_memory(
    files: dict[str, str], expected_mib: int, tmp_path: Path
) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9999999 kB\nMemAvailable: 4194304 kB\n")
    found = host_limit_bytes(write(tmp_path / "cgroup", files), meminfo, membership=tmp_path / "absent")
    assert found == expected_mib * 2**20 - RESERVE_BYTES


@pytest.mark.parametrize(
    ("tree", "rows", "names"),
    [
        ("", "0::/user/job\n", ("memory.max", "memory.current")),
        (
            "memory/",
            "5:memory:/user/job\n0::/other\n",
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ),
    ],
    ids=["cgroup v2", "cgroup v1"],
)
def test_the_tightest_limit_between_the_root_and_the_process_counts(
    tree: str, rows: str, names: tuple[str, str], tmp_path: Path
) -> None:
    files: dict[str, str] = {}
    for folder, mib in (("", 3000), ("user/", 1000), ("user/job/", 2000)):
        files |= {f"{tree}{folder}{names[0]}": str(mib * MIB), f"{tree}{folder}{names[1]}": str(100 * MIB)}
    root = write(tmp_path / "cgroup", files)
    (tmp_path / "membership").write_text(rows)
    (tmp_path / "meminfo").write_text("MemAvailable: 4194304 kB\n")
    assert host_limit_bytes(root, tmp_path / "meminfo", 0, tmp_path / "membership") == 900 * MIB


def test_a_stream_keeps_order_and_waits_for_events_of_another() -> None:
    first: Stream = WorkerStream("first")
    second: Stream = WorkerStream("second")
    gate, seen = threading.Event(), list[str]()
    first.submit(lambda: gate.wait(60))
    first.submit(lambda: seen.append("first"))
    second.wait(first.record())
    second.submit(lambda: seen.append("second"))
    assert seen == []
    gate.set()
    second.synchronize()
    assert seen == ["first", "second"]
    first.close()
    second.close()


def test_a_failing_copy_surfaces_to_all_who_wait_and_blocks_nobody() -> None:
    stream, other = WorkerStream("bad"), WorkerStream("other")
    skipped = list[int]()
    stream.submit(lambda: torch.zeros(2).copy_(torch.zeros(3)))
    stream.submit(lambda: skipped.append(1))
    event = stream.record()
    other.wait(event)
    other.submit(lambda: skipped.append(2))
    for wait in (event.wait, stream.synchronize, other.synchronize):
        with pytest.raises(RuntimeError, match="size"):
            wait()
    assert skipped == []
    stream.close()
    other.close()


def test_the_callers_stream_works_at_once() -> None:
    stream, seen = CallerStream(), list[int]()
    stream.submit(lambda: seen.append(1))
    stream.wait(stream.record())
    assert seen == [1]


@pytest.mark.parametrize(
    ("limit", "total", "fractions"),
    [(24 * 2**30, 96 * 2**30, [0.25]), (200, 100, [1.0]), (None, 100, []), (5, 0, [])],
)
def test_the_device_limit_is_given_to_torch_as_a_fraction(
    limit: int | None, total: int, fractions: list[float]
) -> None:
    given: list[float] = []
    enforce_device_limit(limit, total, given.append)
    assert given == fractions


def test_a_peak_is_measured_from_the_reset_on() -> None:
    """On new pages from the kernel, because an allocator may reuse memory of an earlier test."""
    gc.collect()
    meter = PeakMeter()
    with _resident(48 * MIB):
        pass
    meter.reset()
    with _resident(8 * MIB):
        assert (
            7 * MIB <= meter.peak_bytes() < 40 * MIB
        )  # the kernel counts pages in batches, up to 1 MiB late


@contextmanager
def _resident(size: int) -> Iterator[None]:
    with mmap.mmap(-1, size) as room:
        room[:: mmap.PAGESIZE] = b"1" * (size // mmap.PAGESIZE)
        yield


def test_a_worker_of_a_device_waits_for_what_it_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    class FakeStream:
        def __init__(self, device: torch.device) -> None:
            seen.append(f"made on {device}")

        def synchronize(self) -> None:
            seen.append("synchronized")

    @contextmanager
    def on(stream: FakeStream) -> Iterator[None]:
        seen.append("entered")
        yield
        seen.append("left")

    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", on)
    worker: Stream = DeviceWorker("load", torch.device("cuda", 0))
    target = torch.zeros(3)
    worker.copy(target, torch.ones(3))
    event = worker.record()
    event.wait()
    assert seen == ["made on cuda:0", "entered", "left", "synchronized"]
    assert torch.equal(target, torch.ones(3))
    worker.close()
