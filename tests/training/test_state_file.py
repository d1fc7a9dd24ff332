"""Files of state: checksums that join, writes past the page cache, and disks that cannot or will not."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import shutil
import sys
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.training.states import GivenBlocks, layout_of, write_state
from tests.training.test_checkpoint import FACTS, folder_with, tensors

from busbar.workloads.machine import checksum, direct_file
from busbar.workloads.machine.checksum import combine, crc32
from busbar.workloads.machine.direct_file import PAGE, DirectFile, NoRoom
from busbar.workloads.training.checkpoint import CheckpointFolder
from busbar.workloads.training.errors import CheckpointError, NotFinite
from busbar.workloads.training.layout import Layout
from busbar.workloads.training.state_file import is_finite


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_checksums_of_parts_join_to_that_of_the_whole(first: bytes, second: bytes) -> None:
    assert combine(crc32(first), crc32(second), len(second)) == zlib.crc32(first + second)


def test_the_library_that_uses_the_cpus_instructions_gives_the_same_numbers_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, function = checksum._fastest()
    assert (name, function) == (checksum.LIBRARY, crc32)
    assert function(b"busbar") == zlib.crc32(b"busbar")
    monkeypatch.setitem(sys.modules, "isal.isal_zlib", None)
    assert checksum._fastest() == ("zlib", zlib.crc32)


def pages(count: int) -> torch.Tensor:
    """Random bytes that begin at a page."""
    memory = torch.frombuffer(mmap.mmap(-1, count * PAGE), dtype=torch.uint8)
    return memory.copy_(torch.randint(256, (count * PAGE,), dtype=torch.uint8))


@pytest.mark.parametrize(("start", "length"), [(0, 3 * PAGE), (0, 3 * PAGE + 100), (1, 2 * PAGE), (0, 77)])
def test_any_bytes_arrive_whether_they_are_aligned_or_not(start: int, length: int, tmp_path: Path) -> None:
    data = pages(4)[start : start + length]
    with DirectFile(tmp_path / "state", PAGE + length) as file:
        file.write(data, PAGE)
        file.write(pages(1), 0)
    assert (tmp_path / "state").read_bytes()[PAGE:] == data.numpy().tobytes()


def refuse_to_open(path: Any, flags: int, mode: int = 0o777) -> int:
    if flags & os.O_DIRECT:
        raise OSError(errno.EINVAL, "Invalid argument")
    return OPEN(path, flags, mode)


def refuse_to_write(descriptor: int, data: memoryview, offset: int) -> int:
    if os.readlink(f"/proc/self/fd/{descriptor}") and fcntl_flags(descriptor) & os.O_DIRECT:
        raise OSError(errno.EINVAL, "Invalid argument")
    return PWRITE(descriptor, data, offset)


def fcntl_flags(descriptor: int) -> int:
    lines = Path(f"/proc/self/fdinfo/{descriptor}").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("flags:")), 8)


OPEN, PWRITE = os.open, os.pwrite


@pytest.mark.parametrize(("call", "instead"), [("open", refuse_to_open), ("pwrite", refuse_to_write)])
def test_a_file_system_without_direct_writes_is_named_once_and_used(
    call: str, instead: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, call, instead)
    said: list[str] = []
    folder = CheckpointFolder(tmp_path, 3, said.append)
    layout = Layout.of([("weights/a", torch.uint8, 8 * PAGE)])
    for step in (1, 2):
        data = pages(8)
        folder.write(step, layout, GivenBlocks(torch.split(data, PAGE)), FACTS)
        loaded = folder.newest().checkpoint
        assert loaded is not None
        assert torch.equal(loaded.tensor("weights/a"), data)
    assert len(said) == 1
    assert f"{tmp_path} does not support O_DIRECT" in said[0]


def test_threads_that_are_refused_direct_writes_at_the_same_time_all_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, looked, refused, aligned = list[str](), threading.Event(), threading.Event(), direct_file._aligned

    def slow(address: int, offset: int) -> bool:
        """The second thread has seen that direct writes are supported when the first one finds that they are not."""
        if offset:
            looked.set()
            assert refused.wait(10)
        else:
            assert looked.wait(10)
        return aligned(address, offset)

    def note(text: str) -> None:
        said.append(text)
        refused.set()

    monkeypatch.setattr(direct_file, "_aligned", slow)
    monkeypatch.setattr(os, "pwrite", refuse_to_write)
    data = pages(2)
    with (
        DirectFile(tmp_path / "state", 2 * PAGE, note) as file,
        ThreadPoolExecutor(2) as threads,
    ):
        for written in [threads.submit(file.write, data[at : at + PAGE], at) for at in (0, PAGE)]:
            written.result()
    assert (tmp_path / "state").read_bytes() == data.numpy().tobytes()
    assert len(said) == 1


class Libc:
    """A C library whose `fallocate` fails `failures` times with `code`."""

    def __init__(self, code: int, failures: int) -> None:
        self.code, self.failures, self.calls = code, failures, 0
        self.real = ctypes.CDLL(None)

    def fallocate(self, *arguments: Any) -> int:
        self.calls += 1
        if self.calls <= self.failures:
            ctypes.set_errno(self.code)
            return -1
        return int(self.real.fallocate(*arguments))


def with_libc(libc: Libc, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda *arguments, **settings: libc)


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINTR])
def test_a_file_system_that_cannot_reserve_space_is_used_all_the_same(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_libc(Libc(code, 1), monkeypatch)
    folder = folder_with(tmp_path, [10])
    assert folder.steps() == [10]


@pytest.mark.parametrize(
    ("code", "failures", "kept"),
    [
        (errno.ENOSPC, 1, [40, 30, 20]),
        (errno.EDQUOT, 2, [40, 30]),
        (errno.EDQUOT, 9, [30]),
        (errno.EIO, 1, [30, 20, 10]),
    ],
)
def test_a_quota_that_is_full_costs_the_oldest_checkpoints_and_never_the_newest(
    code: int, failures: int, kept: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file system says that there is room, and then does not give it."""
    folder_with(tmp_path, [10, 20, 30])
    with_libc(Libc(code, failures), monkeypatch)
    said: list[str] = []
    folder = CheckpointFolder(tmp_path, 4, said.append)
    if 40 in kept:
        write_state(folder, 40, tensors(40), FACTS)
    else:
        with pytest.raises(CheckpointError, match=f"step 40 could not be written.*{os.strerror(code)}"):
            write_state(folder, 40, tensors(40), FACTS)
    assert folder.steps() == kept
    assert len(said) == 3 - len([step for step in kept if step != 40])
    assert folder.newest().passed_over == ()


def test_a_disk_without_room_is_found_before_a_byte_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_libc(Libc(errno.ENOSPC, 1), monkeypatch)
    with pytest.raises(NoRoom):
        DirectFile(tmp_path / "state", 1000)
    assert (tmp_path / "state").stat().st_size == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_is_found_in_any_block(bad: float, tmp_path: Path) -> None:
    state = {"weights/a": torch.zeros(5000), "m/a": torch.zeros(5000)}
    state["m/a"][4321] = bad
    folder = folder_with(tmp_path, [10])
    with pytest.raises(NotFinite, match="m/a holds numbers that are not finite"):
        write_state(folder, 20, state, FACTS)
    assert folder.steps() == [10]


def test_finite_numbers_whose_sum_is_not_are_finite() -> None:
    assert is_finite(torch.full((4,), 3e38))
    assert not is_finite(torch.tensor([float("inf"), -float("inf")]))


def test_buffers_go_back_also_when_a_write_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, data: memoryview, offset: int) -> int:
        if offset > 4 * PAGE:
            raise OSError(errno.ENOSPC, "No space left on device")
        return PWRITE(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    state = {"weights/a": torch.zeros(64 * PAGE)}
    blocks = GivenBlocks(torch.split(state["weights/a"].view(torch.uint8), PAGE))
    taken: list[object] = []
    take = blocks.take

    def counted() -> Any:
        block = take()
        taken.extend([block] if block is not None else [])
        return block

    monkeypatch.setattr(blocks, "take", counted)
    with pytest.raises(CheckpointError, match="No space left"):
        CheckpointFolder(tmp_path, 1).write(1, layout_of(state), blocks, FACTS)
    assert blocks.given_back == len(taken) < 256
    assert list(tmp_path.iterdir()) == []


def test_an_element_that_would_be_misaligned_is_no_layout() -> None:
    with pytest.raises(ValueError, match="m/a would begin at byte 2"):
        Layout.of([("weights/a", torch.bfloat16, 1), ("m/a", torch.float32, 1)])


def test_the_crash_of_a_removal_leaves_no_checkpoint_that_lacks_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old one is renamed first: what a crash leaves of it is no checkpoint, and is removed at the next start."""
    folder = folder_with(tmp_path, [10])
    with monkeypatch.context() as crashing:
        crashing.setattr(shutil, "rmtree", lambda path, ignore_errors=False: None)
        write_state(CheckpointFolder(tmp_path, 1), 20, tensors(20), FACTS)
    assert folder.steps() == [20]
    assert (tmp_path / ".tmp-removed-step-00000010").is_dir()
    assert folder.newest().passed_over == ()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-00000020"]
