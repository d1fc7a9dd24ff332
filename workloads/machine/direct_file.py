"""Large files that are written and read past the page cache.

O_DIRECT moves whole pages between page-aligned memory and the disk without a copy. What is not aligned (the end of a
file, or memory that begins inside a page) goes through the page cache, as everything does on a file system that does not
support O_DIRECT. A file that is larger than the memory limit of its reader must not go through the cache: the kernel would
evict each page before it is read again.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from uuid import uuid4

import torch

PAGE = 4096
_NOT_SUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)


class BusyClock:
    """Seconds in which at least one thread was inside of it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._since = self._total = 0.0

    @property
    def seconds(self) -> float:
        """Of stretches that have ended."""
        with self._lock:
            return self._total

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._since = time.monotonic()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._total += time.monotonic() - self._since


class NoRoom(OSError):
    """The file system did not reserve the space of the file. Nothing has been written."""


def page_memory(size: int) -> torch.Tensor:
    """uint8 [size] on the host, zeros that begin at a page. They take memory when they are written to."""
    return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)


class DirectFile:
    """A new file of `size` bytes, whose space is reserved, written by several threads. Raises OSError, NoRoom if there is no space.

    Args:
        note: told once if the file system does not support O_DIRECT.
    """

    _access = os.O_WRONLY

    def __init__(self, path: Path, size: int, note: Callable[[str], object] = lambda text: None) -> None:
        self._path, self._note = path, note
        self.busy = BusyClock()
        """While the disk has something to write."""
        self._buffered = os.open(path, self._access | os.O_CREAT | os.O_TRUNC, 0o644)
        self._opened = [self._buffered]
        self._direct: int | None = None  # None: not supported
        self._changing = threading.Lock()
        try:
            _reserve(self._buffered, size)
            self._open_directly()
        except OSError:
            self._close()
            raise

    def _open_directly(self) -> None:
        try:
            self._direct = os.open(self._path, self._access | os.O_DIRECT)
            self._opened.append(self._direct)
        except OSError as problem:
            if problem.errno not in _NOT_SUPPORTED:
                raise
            self._say_unsupported()

    def write(self, data: torch.Tensor, offset: int) -> None:
        """Write `data`, uint8 on the host, at `offset`. Several threads may."""
        with self.busy:
            self._write(data, offset)

    def _write(self, data: torch.Tensor, offset: int) -> None:
        room = data.numpy().data
        done = 0
        while done < len(room):
            pages, direct = (len(room) - done) // PAGE * PAGE, self._direct
            if direct is not None and pages and _aligned(data.data_ptr() + done, offset + done):
                done += self._write_direct(direct, room[done : done + pages], offset + done)
            else:
                done += os.pwrite(self._buffered, room[done:], offset + done)

    def _write_direct(self, descriptor: int, data: memoryview, offset: int) -> int:
        try:
            return os.pwrite(descriptor, data, offset)
        except OSError as problem:
            self._use_page_cache(problem)
        return 0

    def _use_page_cache(self, problem: OSError) -> None:
        if problem.errno != errno.EINVAL:
            raise problem
        with self._changing:
            was, self._direct = self._direct, None  # closed at the end: another thread may be using it
        if was is not None:
            self._say_unsupported()

    @property
    def _place(self) -> Path:
        """For people: the folder that they know; a checkpoint's own has a temporary name."""
        return self._path.parent.parent

    def _say_unsupported(self) -> None:
        self._note(
            f"the file system of {self._place} does not support O_DIRECT: files are written through the page "
            "cache, which takes memory and is slower"
        )

    def __enter__(self) -> DirectFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Make the file durable, unless its writing failed."""
        try:
            if problem is None:
                with self.busy:
                    os.fsync(self._buffered)
        finally:
            self._close()

    def _close(self) -> None:
        for descriptor in self._opened:
            os.close(descriptor)


class ScratchFile(DirectFile):
    """Bytes on a disk for as long as they are used: they are zero at first, and written and read in any order.

    The file has no name, so that nothing is left of it when the process ends, however it does. Nothing in it is durable.
    Ranges that share a page are never written by two threads at once. Raises OSError, NoRoom if there is no space.
    """

    _access = os.O_RDWR

    def __init__(self, folder: Path, size: int, note: Callable[[str], object] = lambda text: None) -> None:
        path = folder / f".busbar-scratch-{os.getpid()}-{uuid4().hex[:8]}"
        try:
            super().__init__(path, size, note)
        finally:
            path.unlink(missing_ok=True)

    @property
    def _place(self) -> Path:
        return self._path.parent

    def read(self, into: torch.Tensor, offset: int) -> None:
        """Fill `into`, uint8 on the host, with what stands at `offset`. Several threads may."""
        room = into.numpy().data
        done = 0
        while done < len(room):
            pages, direct = (len(room) - done) // PAGE * PAGE, self._direct
            if direct is not None and pages and _aligned(into.data_ptr() + done, offset + done):
                count = self._read_direct(direct, room[done : done + pages], offset + done)
            else:
                count = os.preadv(self._buffered, [room[done:]], offset + done)
                if count == 0:
                    raise EOFError("a read beyond the end of a scratch file")
                os.posix_fadvise(self._buffered, offset + done, count, os.POSIX_FADV_DONTNEED)
            done += count

    def _read_direct(self, descriptor: int, room: memoryview, offset: int) -> int:
        try:
            return os.preadv(descriptor, [room], offset)
        except OSError as problem:
            self._use_page_cache(problem)
        return 0

    def close(self) -> None:
        """Give the bytes back to the disk. No other thread may use the file then."""
        self._close()


class DirectReader:
    """A file that is open for reading, by several threads. Raises OSError.

    Args:
        note: told once if the file system does not support O_DIRECT. What was read is dropped from the page cache then.
    """

    def __init__(self, path: Path, note: Callable[[str], object] = lambda text: None) -> None:
        self._path, self._note = path, note
        self._direct = True
        self._changing = threading.Lock()
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        except OSError as problem:
            if problem.errno not in _NOT_SUPPORTED:
                raise
            self._file = os.open(path, os.O_RDONLY)
            self._use_page_cache()
        self._opened: tuple[int, int] = self._state()

    @property
    def size(self) -> int:
        """Bytes, when it was opened."""
        return self._opened[0]

    @property
    def changed(self) -> bool:
        """Whether anybody has written to the file, or cut it, since it was opened."""
        return self._state() != self._opened

    def read(self, into: torch.Tensor, offset: int) -> int:
        """Fills `into`, uint8 on the host that begins at a page and is whole pages long, from `offset`, a whole number of
        pages. Returns the bytes that the file had there: fewer where it ends."""
        room, done = into.numpy().data, 0
        while done < len(room):
            direct = self._direct
            try:
                count = os.preadv(self._file, [room[done:]], offset + done)
            except OSError as problem:
                if problem.errno != errno.EINVAL or not direct:
                    raise
                self._use_page_cache()
                continue
            if count == 0:
                break
            if not self._direct:
                os.posix_fadvise(self._file, offset + done, count, os.POSIX_FADV_DONTNEED)
            done += count
        return done

    def close(self) -> None:
        os.close(self._file)

    def _state(self) -> tuple[int, int]:
        found = os.fstat(self._file)
        return found.st_size, found.st_mtime_ns

    def _use_page_cache(self) -> None:
        """The same descriptor from now on without O_DIRECT: other threads may be reading with it."""
        with self._changing:
            was, self._direct = self._direct, False
            fcntl.fcntl(self._file, fcntl.F_SETFL, fcntl.fcntl(self._file, fcntl.F_GETFL) & ~os.O_DIRECT)
        if not was:
            return
        self._note(
            f"the file system of {self._path.parent} does not support O_DIRECT: {self._path.name} is read through the page "
            "cache, which is slower"
        )


def _aligned(address: int, offset: int) -> bool:
    return address % PAGE == 0 and offset % PAGE == 0


def _reserve(descriptor: int, size: int) -> None:
    """Have the file system set the space aside: a full disk is found before anything is written.

    The system call itself, because C libraries write to every page where the file system cannot reserve.
    """
    if size == 0:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    while libc.fallocate(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(size)) != 0:
        code = ctypes.get_errno()
        if code in (errno.ENOSPC, errno.EDQUOT):
            raise NoRoom(code, os.strerror(code))
        if code == errno.EINTR:
            continue
        if code not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise OSError(code, os.strerror(code))
        os.ftruncate(descriptor, size)
        return
