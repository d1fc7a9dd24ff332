"""Weights that are ready to compute with, in a folder that outlives the engine's process (`--keep-weights`).

    first start     each tensor is made from the checkpoint, written to NAME.weights, and used from there
    later starts    NAME.weights is mapped: nothing is read, joined, coded or packed

On a CPU the file's pages are the weights, so that in a file system in memory they are there once; on a GPU the file is a copy in
host memory. NAME.json says what is in the file and of what it was made; it is renamed to its name when the file is complete. A
file of another model, dtype, form or engine, one that was cut or changed, and one that another user may write to is not
used: the weights are made anew, and the log says why. Where the folder cannot be used, or has no room, the engine serves with
its weights in its own memory.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import json
import logging
import mmap
import os
import platform
import stat
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import IO, Any

import torch

from busbar.workloads.machine.limits import host_limit_bytes
from busbar.workloads.serving import (
    checkpoint,
    experts,
    integer_linear,
    linear,
    tensor_bytes,
    weightcodes,
    weights,
)
from busbar.workloads.serving.architecture import Architecture
from busbar.workloads.serving.identity import model_identity
from busbar.workloads.serving.linear import Make
from busbar.workloads.serving.tensor_bytes import bytes_of, can_map_packed, description_of, tensor_on
from busbar.workloads.serving.weightcodes import WeightForm
from busbar.workloads.serving.weights import Weights, load_weights

log = logging.getLogger(__name__)
MAKERS = (checkpoint, experts, integer_linear, linear, tensor_bytes, weightcodes, weights)
"""What makes tensors and names them: where these modules differ, a tensor of the same name may be another one."""
ENGINE = hashlib.blake2b(
    b"".join(Path(str(module.__file__)).read_bytes() for module in MAKERS), digest_size=16
).hexdigest()
"""Of the code that was loaded; files may be replaced while the supervisor runs."""
MIB = 2**20
MADV_POPULATE_READ = 22
"""Of Linux; Python's `mmap` does not name it."""
MAPPED_AT_ONCE = 16 * MIB
"""Whole pages. The engine's thread waits for no more of it where it maps or frees memory of its own."""
LOCK_S = 10.0
"""An engine whose front is gone ends sooner (`engine_process.STEP_S` for its step)."""
Key = Mapping[str, object]


@dataclass(frozen=True)
class Piece:
    """A tensor in the file."""

    offset: int
    """Whole pages."""
    bytes: int
    dtype: str
    shape: tuple[int, ...]
    description: str
    """Of a layout of oneDNN's; empty: a plain tensor."""

    @property
    def is_codes(self) -> bool:
        return self.dtype == "int8"

    def on(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor on its bytes."""
        return tensor_on(memory, getattr(torch, self.dtype), self.shape, self.description)

    def fits(self, size: int) -> bool:
        """Whether it lies in a file of this size, and has the bytes of its shape."""
        plain = prod(self.shape) * getattr(torch, self.dtype).itemsize
        return self.offset % mmap.PAGESIZE == 0 and plain <= self.bytes and self.offset + self.bytes <= size


class Unusable(Exception):
    """What is kept cannot be used; the message says why."""


class KeptFolder:
    """The folder. One engine uses it at a time: it holds a lock, which the kernel takes from a process that ends."""

    def __init__(self, path: Path, lock: int) -> None:
        self._path = path
        self._unlock = weakref.finalize(self, os.close, lock)

    @classmethod
    def open(cls, path: Path) -> KeptFolder | None:
        """Made if it is not there. None where it cannot be used, and the log says why."""
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = path.stat()
            if not _is_own(found):
                raise Unusable(f"another user than {os.getuid()} may write to it")
            lock = os.open(path / ".lock", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if not _is_locked(lock):
                os.close(lock)
                raise Unusable("another engine uses it")
        except (OSError, Unusable) as problem:
            log.warning("weights are not kept in %s: %s", path, _why(problem))
            return None
        for left in path.glob(".*.part"):  # of an engine that was killed while it loaded
            left.unlink(missing_ok=True)
        return cls(path, lock)

    @property
    def held_bytes(self) -> int:
        """Of the files that are there, which loading uses or removes."""
        found = 0
        for file in self._path.glob("*.weights"):
            with suppress(OSError):
                found += file.stat().st_size
        return found

    def load(
        self,
        name: str,
        folder: Path,
        arch: Architecture,
        device: torch.device,
        dtype: torch.dtype,
        form: WeightForm | None,
    ) -> Weights:
        """As `load_weights`, from and into the file of this name."""
        key = key_of(folder, device, dtype, form)
        with KeptWeights(self._path, name, key, device) as kept:
            return load_weights(folder, arch, device, dtype, form, kept)

    def clear(self) -> None:
        """Removes what is kept."""
        for file in (*self._path.glob("*.json"), *self._path.glob("*.weights")):
            file.unlink(missing_ok=True)

    def close(self) -> None:
        """Another engine may use it. What is mapped stays."""
        self._unlock()


class KeptWeights:
    """The tensors of a model by their names (`linear.Keep`), for the time of loading it."""

    def __init__(self, folder: Path, name: str, key: Key, device: torch.device) -> None:
        self._file, self._list = folder / f"{name}.weights", folder / f"{name}.json"
        self._key, self._on_gpu, self._device = key, device.type != "cpu", device
        self._pieces: dict[str, Piece] = {}
        self._mapped: torch.Tensor | None = None
        self._new: int | None = None
        self._end = 0

    def __enter__(self) -> KeptWeights:
        try:
            self._pieces, self._mapped = self._found()
            log.info("weights are mapped from %s, %d MiB", self._file, len(self._mapped) // MIB)
        except FileNotFoundError:
            self._begin()
        except (OSError, Unusable) as problem:
            log.warning("weights in %s are not used, but made anew: %s", self._file, _why(problem))
            self._begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._new is not None:
            if problem is None:
                self._complete()
            else:
                self._give_up()

    def __call__(self, name: str, make: Make) -> torch.Tensor:
        if self._mapped is not None:
            piece = self._pieces.get(name)
            if piece is None:
                return make()
            found = piece.on(self._mapped[piece.offset : piece.offset + piece.bytes])
            return found.to(self._device) if self._on_gpu else found
        tensor = make()
        if self._new is None:
            return tensor
        try:
            return self._stored(name, tensor, self._new)
        except (OSError, Unusable) as problem:
            told, done = _why(problem), self._end // MIB
            log.warning("weights are not kept in %s: %s, after %d MiB", self._file.parent, told, done)
            self._give_up()
            return tensor

    def _found(self) -> tuple[dict[str, Piece], torch.Tensor]:
        """What an earlier process kept. Raises OSError, Unusable."""
        document = _read(self._list)
        with _opened(self._file) as file:
            state = os.fstat(file.fileno())
            try:
                if document["key"] != json.loads(json.dumps(self._key)):
                    changed = sorted(k for k, v in self._key.items() if document["key"].get(k) != _plain(v))
                    raise Unusable(f"they were made with another {', '.join(changed)}")
                if [state.st_size, state.st_mtime_ns] != document["state"] or not state.st_size:
                    raise Unusable("the file was cut or changed")
                pieces = {
                    name: Piece(**each | {"shape": tuple(each["shape"])})
                    for name, each in document["pieces"].items()
                }
                fits = all(each.fits(state.st_size) for each in pieces.values())
            except (KeyError, TypeError, AttributeError, ValueError) as error:
                raise Unusable(f"{self._list.name} is not a list of weights") from error
            if not fits:
                raise Unusable(f"{self._list.name} names more than the file holds")
            kinds = {each.is_codes for each in pieces.values() if each.description}
            if not all(map(can_map_packed, kinds)):
                raise Unusable("packed weights cannot be mapped by this version of torch")
            mapped = _map(file.fileno(), 0, state.st_size)
        if not self._on_gpu:
            Thread(target=_map_pages, args=(mapped,), daemon=True).start()
        return pieces, mapped

    def _begin(self) -> None:
        """A new file, in the place of one that is not used."""
        try:
            for path in (self._list, self._file, self._part):
                path.unlink(missing_ok=True)
            self._new = os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        except OSError as problem:
            log.warning("weights are not kept in %s: %s", self._file.parent, _why(problem))

    def _stored(self, name: str, tensor: torch.Tensor, file: int) -> torch.Tensor:
        """What is used: on a CPU the bytes in the file. Raises OSError, Unusable."""
        if tensor.is_mkldnn and not can_map_packed(tensor.dtype == torch.int8):
            raise Unusable("packed weights cannot be mapped by this version of torch")
        host = tensor.cpu() if self._on_gpu else tensor
        data = bytes_of(host)
        piece = Piece(
            self._end,
            len(data),
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
            description_of(host),
        )
        room = host_limit_bytes() if self._on_gpu else None
        if room is not None and room < len(data):
            raise Unusable("a copy of weights that a GPU has needs as much host memory")
        os.posix_fallocate(file, piece.offset, len(data))  # or a full file system ends the process later
        done = 0
        while done < len(data):
            done += os.pwrite(file, data[done:], piece.offset + done)
        self._pieces[name] = piece
        self._end = -(-(piece.offset + piece.bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        return tensor if self._on_gpu else piece.on(_map(file, piece.offset, piece.bytes))

    def _complete(self) -> None:
        assert self._new is not None
        try:
            os.fsync(self._new)
            state = os.fstat(self._new)
            document = {
                "key": self._key,
                "state": [state.st_size, state.st_mtime_ns],
                "pieces": {name: asdict(piece) for name, piece in self._pieces.items()},
            }
            os.replace(self._part, self._file)
            written = self._list.with_name(f".{self._list.name}.part")
            written.touch(mode=0o600)
            written.write_text(json.dumps(document))
            os.replace(written, self._list)
            log.info("weights are kept in %s, %d MiB", self._file, state.st_size // MIB)
        except OSError as problem:
            log.warning("weights are not kept in %s: %s", self._file.parent, _why(problem))
            self._file.unlink(missing_ok=True)
        self._close()

    def _give_up(self) -> None:
        """What is mapped stays in use, without a name."""
        self._part.unlink(missing_ok=True)
        self._close()

    def _close(self) -> None:
        if self._new is not None:
            os.close(self._new)
            self._new = None

    @property
    def _part(self) -> Path:
        return self._file.with_name(f".{self._file.name}.part")


def key_of(
    folder: Path, device: torch.device, dtype: torch.dtype, form: WeightForm | None
) -> dict[str, object]:
    """Of what weights are made, and for what."""
    files = sorted(folder.glob("*.safetensors"))
    found = [(file.name, state.st_size, state.st_mtime_ns) for file in files for state in (file.stat(),)]
    return {
        "engine": ENGINE,
        "torch": torch.__version__,
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "model": model_identity(folder),
        "files": found,
        "device": device.type,
        "dtype": str(dtype),
        "weights-dtype": None if form is None else form.name,
    }


def _is_locked(file: int) -> bool:
    """Whether this process has the lock now. The engine before it, whose front was killed, may still be ending."""
    end = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:
            if time.monotonic() >= end:
                return False
            time.sleep(0.02)


def _why(problem: OSError | Unusable) -> str:
    return (problem.strerror if isinstance(problem, OSError) else None) or str(problem)


def _plain(value: object) -> object:
    """As JSON gives it back."""
    return json.loads(json.dumps(value))


def _is_own(found: os.stat_result) -> bool:
    """Whether nobody else may write to it."""
    return found.st_uid == os.getuid() and not found.st_mode & 0o022


def _opened(path: Path) -> IO[bytes]:
    """For reading. Raises OSError, Unusable."""
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb")
    found = os.fstat(file.fileno())
    if not stat.S_ISREG(found.st_mode) or not _is_own(found):
        file.close()
        raise Unusable(f"another user than {os.getuid()} may write to {path.name}")
    return file


def _read(path: Path) -> dict[str, Any]:
    """Raises OSError, Unusable."""
    with _opened(path) as file:
        try:
            document = json.load(file)
        except ValueError as error:
            raise Unusable(f"{path.name} is no JSON") from error
    if not isinstance(document, dict):
        raise Unusable(f"{path.name} is not a list of weights")
    return document


def _map(file: int, offset: int, size: int) -> torch.Tensor:
    """uint8 [size] of a file, which is not changed by what is written to it."""
    memory = mmap.mmap(file, size, access=mmap.ACCESS_COPY, offset=offset)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _map_pages(memory: torch.Tensor) -> None:
    """Enters the pages of mapped memory into the page table, beside what else a start does: else the first step does it, one
    fault after the other. A kernel older than 5.14 refuses, and they come with the first step."""
    madvise = ctypes.CDLL(None).madvise  # other threads run meanwhile, unlike with `mmap.madvise`
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for first in range(0, len(memory), MAPPED_AT_ONCE):
        size = min(MAPPED_AT_ONCE, len(memory) - first)
        if madvise(memory.data_ptr() + first, size, MADV_POPULATE_READ):
            return
