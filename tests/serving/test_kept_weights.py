"""Weights that outlive the engine: mapped by the next one where they are the same, and made anew where they are not."""

from __future__ import annotations

import errno
import gc
import json
import logging
import mmap
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.serving.engines import generate, greedy_params, load_engine, tokens_of
from tests.serving.models import save_model
from tests.serving.streamed import streamed_settings

from busbar.workloads.serving import kept_weights
from busbar.workloads.serving.checkpoint import Checkpoint
from busbar.workloads.serving.errors import MemoryTooSmall
from busbar.workloads.serving.kept_weights import KeptFolder, KeptWeights
from busbar.workloads.serving.loader import Loaded
from busbar.workloads.serving.sleeping import SleepLevel, fall_asleep, wake
from busbar.workloads.serving.stream_load import WeightReader
from busbar.workloads.serving.stream_plan import StreamPlan
from busbar.workloads.serving.tensor_bytes import can_map_packed

PROMPTS = [list(range(20, 60)), list(range(90, 107))]
MAPPED = "weights are mapped from"
KEPT = "weights are kept in"
ANEW = "are not used, but made anew"


def answers(loaded: Loaded) -> list[list[int]]:
    return [tokens_of(each) for each in generate(loaded, PROMPTS, greedy_params(16, ignore_eos=True))]


def run(folder: Path, keep: Path | None, **changes: Any) -> list[list[int]]:
    """The answers of an engine that has ended."""
    found = answers(load_engine(folder, keep_dir=keep, **changes))
    gc.collect()  # it holds the lock of the folder
    return found


@pytest.fixture(autouse=True)
def every_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


@pytest.fixture
def folder(llama: tuple[Path, Any], tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama[0], tmp_path / "model"))


@pytest.fixture
def keep(tmp_path: Path) -> Path:
    return tmp_path / "kept"


@pytest.mark.parametrize(
    ("family", "model", "engine"),
    [
        ("llama", {}, {}),
        ("llama", {"tie_word_embeddings": True}, {}),
        ("qwen2", {}, {"dtype": "bfloat16"}),
        ("qwen3", {}, {"weights_dtype": "int8"}),
        ("qwen2", {}, {"weights_dtype": "int4"}),
        ("qwen3_moe", {}, {}),
        ("mixtral", {}, {"weights_dtype": "int8"}),
    ],
)
def test_the_next_engine_reads_no_tensor_and_gives_the_same_tokens(
    tmp_path: Path,
    keep: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    family: str,
    model: dict[str, Any],
    engine: dict[str, Any],
) -> None:
    folder = tmp_path / "model"
    save_model(folder, family, **model)
    without = run(folder, None, **engine)
    assert run(folder, keep, **engine) == without
    assert KEPT in caplog.text

    def unread(self: Checkpoint, name: str) -> torch.Tensor:
        raise AssertionError(f"{name} was read")

    monkeypatch.setattr(Checkpoint, "__getitem__", unread)
    assert run(folder, keep, **engine) == without
    assert MAPPED in caplog.text


def test_products_that_are_not_packed_are_kept_as_well(
    folder: Path, keep: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("busbar.workloads.serving.weights.can_pack", lambda device, dtype: False)
    first = run(folder, keep)
    assert run(folder, keep) == first == run(folder, None)
    assert caplog.text.count(MAPPED) == 1


def resident_kib(path: Path) -> int:
    """Of what this process has mapped of the file."""
    text = Path("/proc/self/smaps").read_text().partition(f"{path}\n")[2]
    return int(text.partition("Rss:")[2].split()[0])


@pytest.mark.parametrize("at_once", [mmap.PAGESIZE, 16 * 2**20])
def test_mapped_pages_are_entered_before_a_step_needs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(kept_weights, "MAPPED_AT_ONCE", at_once)
    path = tmp_path / "file"
    path.write_bytes(bytes(2**20 + 5))
    with path.open("rb") as file:
        memory = kept_weights._map(file.fileno(), 0, 2**20 + 5)
    assert resident_kib(path) == 0
    kept_weights._map_pages(memory)
    assert resident_kib(path) == 1028
    assert memory.sum() == 0


def cut(folder: Path, keep: Path) -> None:
    path = keep / "model.weights"
    os.truncate(path, path.stat().st_size - 1)


def change_one_byte(folder: Path, keep: Path) -> None:
    path = keep / "model.weights"
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    path.write_bytes(data)


def tear_the_list(folder: Path, keep: Path) -> None:
    path = keep / "model.json"
    path.write_text(path.read_text()[:-20])


def name_more_than_there_is(folder: Path, keep: Path) -> None:
    path = keep / "model.json"
    document = json.loads(path.read_text())
    document["pieces"]["norm"]["offset"] += 2**20
    path.write_text(json.dumps(document))


def let_others_write(folder: Path, keep: Path) -> None:
    (keep / "model.weights").chmod(0o666)


def link_elsewhere(folder: Path, keep: Path) -> None:
    moved = keep.with_name("elsewhere")
    (keep / "model.weights").rename(moved)
    (keep / "model.weights").symlink_to(moved)


def give_the_model_another_date(folder: Path, keep: Path) -> None:
    os.utime(folder / "model.safetensors", ns=(1, 1))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (cut, "was cut or changed"),
        (change_one_byte, "was cut or changed"),
        (tear_the_list, "model.json is no JSON"),
        (name_more_than_there_is, "names more than the file holds"),
        (let_others_write, "may write to model.weights"),
        (link_elsewhere, "Too many levels of symbolic links"),
        (give_the_model_another_date, "made with another files"),
    ],
)
def test_what_is_not_as_it_was_left_is_made_anew(
    folder: Path,
    keep: Path,
    caplog: pytest.LogCaptureFixture,
    change: Callable[[Path, Path], None],
    why: str,
) -> None:
    first = run(folder, keep)
    change(folder, keep)
    caplog.clear()
    assert run(folder, keep) == first
    assert ANEW in caplog.text
    assert why in caplog.text
    caplog.clear()
    assert run(folder, keep) == first
    assert MAPPED in caplog.text


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"dtype": "bfloat16"}, "another dtype"), ({"weights_dtype": "int8"}, "another weights-dtype")],
)
def test_weights_in_another_form_are_made_anew(
    folder: Path, keep: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, str], why: str
) -> None:
    run(folder, keep)
    assert run(folder, keep, **changes) == run(folder, None, **changes)
    assert why in caplog.text


def test_another_model_is_made_anew(folder: Path, keep: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = run(folder, keep)
    save_model(folder, seed=1)
    after = run(folder, keep)
    assert after == run(folder, None) != before
    assert "made with another files, model" in caplog.text


def test_another_version_of_what_makes_weights_makes_them_anew(
    folder: Path, keep: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run(folder, keep)
    monkeypatch.setattr(kept_weights, "ENGINE", "other")
    run(folder, keep)
    assert "made with another engine" in caplog.text


@pytest.mark.parametrize("count", [0, 5])
def test_without_room_an_engine_serves_and_says_so(
    folder: Path, keep: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, count: int
) -> None:
    without = run(folder, None)
    calls = 0

    def reserve(file: int, offset: int, size: int) -> None:
        nonlocal calls
        calls += 1
        if calls > count:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", reserve)
    assert run(folder, keep) == without
    assert "No space left on device" in caplog.text
    assert [path.name for path in keep.iterdir()] == [".lock"]
    assert calls == count + 1, "it is not tried again"


def test_a_folder_of_others_or_of_a_running_engine_is_not_used(
    folder: Path, keep: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kept_weights, "LOCK_S", 0.1)
    first = run(folder, keep)
    keep.chmod(0o777)
    assert run(folder, keep) == first
    assert "may write to it" in caplog.text
    keep.chmod(0o700)
    held = KeptFolder.open(keep)
    assert held is not None
    assert run(folder, keep) == first
    assert "another engine uses it" in caplog.text
    held.close()
    assert run(folder, keep) == first
    assert MAPPED in caplog.text
    (keep.parent / "file").touch()
    assert run(folder, keep.parent / "file" / "below") == first
    assert "Not a directory" in caplog.text


def test_an_engine_waits_for_the_one_before_it_that_still_ends(folder: Path, keep: Path) -> None:
    first, held = run(folder, keep), KeptFolder.open(keep)
    assert held is not None
    threading.Timer(0.3, held.close).start()
    found = KeptFolder.open(keep)
    assert found is not None
    found.close()
    assert run(folder, keep) == first


def test_what_an_engine_left_that_was_killed_while_it_loaded_is_removed(folder: Path, keep: Path) -> None:
    keep.mkdir(mode=0o700)
    (keep / ".model.weights.part").write_bytes(b"half")
    (keep / ".model.json.part").write_bytes(b"half")
    run(folder, keep)
    assert sorted(path.name for path in keep.iterdir()) == [".lock", "model.json", "model.weights"]


def test_a_model_that_cannot_be_loaded_leaves_nothing(keep: Path) -> None:
    def load() -> None:
        with KeptWeights(_made(keep), "model", {}, torch.device("cpu")) as kept:
            kept("one", lambda: torch.ones(3))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        load()
    assert list(keep.iterdir()) == []


GPU = torch.device("meta")
"""Not a CPU, and on every machine: tensors there have a shape and no numbers."""


def test_a_gpus_weights_stay_where_they_are_and_the_next_ones_are_copied_there(keep: Path) -> None:
    weight = torch.randn(3, 5)
    with KeptWeights(_made(keep), "model", {"a": 1}, GPU) as kept:
        assert kept("one", lambda: weight) is weight
    with KeptWeights(keep, "model", {"a": 1}, GPU) as kept:
        found = kept("one", lambda: torch.zeros(0))
        assert (found.device, found.shape, found.dtype) == (GPU, (3, 5), torch.float32)
    with KeptWeights(keep, "model", {"a": 1}, torch.device("cpu")) as kept:
        assert torch.equal(kept("one", lambda: torch.zeros(0)), weight)


def test_a_copy_for_which_host_memory_has_no_room_is_not_made(
    keep: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    weight = torch.randn(3, 5)
    monkeypatch.setattr(kept_weights, "host_limit_bytes", lambda: 59)
    with KeptWeights(_made(keep), "model", {}, GPU) as kept:
        assert kept("one", lambda: weight) is weight
    assert "needs as much host memory" in caplog.text
    assert list(keep.iterdir()) == []


def _made(path: Path) -> Path:
    path.mkdir(mode=0o700)
    return path


def test_a_wake_without_weights_maps_them(folder: Path, keep: Path, caplog: pytest.LogCaptureFixture) -> None:
    loaded = load_engine(folder, keep_dir=keep)
    before = answers(loaded)
    fall_asleep(loaded, SleepLevel.WEIGHTS_DROPPED)
    wake(loaded)
    assert answers(loaded) == before
    assert MAPPED in caplog.text


def test_a_draft_is_kept_beside_the_model(folder: Path, keep: Path, caplog: pytest.LogCaptureFixture) -> None:
    changes = {"speculate": 3, "draft_dir": folder}
    first = run(folder, keep, **changes)
    assert run(folder, keep, **changes) == first
    assert {"model.weights", "draft.weights"} <= {path.name for path in keep.iterdir()}
    assert caplog.text.count(MAPPED) == 2


def test_memory_that_kept_weights_have_counts_as_free_for_them(
    folder: Path, keep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cgroup's usage has the pages of a file in memory."""
    needs: list[int] = []
    decide = WeightReader._decide

    def told(reader: WeightReader) -> StreamPlan | None:
        needs.append(reader.needs.resident_bytes)
        return decide(reader)

    monkeypatch.setattr(WeightReader, "_decide", told)
    run(folder, keep)
    limit = needs[0] - (keep / "model.weights").stat().st_size
    monkeypatch.setattr("busbar.workloads.serving.stream_load.host_limit_bytes", lambda reserve: limit)
    with pytest.raises(MemoryTooSmall):
        run(folder, None)
    assert run(folder, keep)


def test_weights_that_are_streamed_are_not_kept_and_leave_nothing_in_memory(
    tmp_path: Path, keep: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "model"
    save_model(folder, num_hidden_layers=4)
    first = run(folder, keep)
    settings = streamed_settings(folder, 0, tmp_path / "layers")
    loaded = load_engine(keep_dir=keep, **settings, folder=folder)
    assert loaded.streaming is not None
    assert answers(loaded) == first
    assert "streamed are not kept" in caplog.text
    assert [path.name for path in keep.iterdir()] == [".lock"]


def test_packed_weights_can_be_mapped_where_weights_are_packed() -> None:
    """The operators of torch that this relies on are there in the version that is tested."""
    assert can_map_packed(codes=False)
    assert can_map_packed(codes=True)
