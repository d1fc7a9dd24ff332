"""Files that outlive the process: replaced atomically, overwritten in place, or mapped into memory."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path

from busbar.gateway.errors import SpoolError


def write_atomically(path: Path, data: bytes) -> None:
    """Replace `path` by `data`, durable when this returns. Readable by the owner only."""
    fresh = path.with_name(path.name + ".new")
    handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)
    fsync_folder(path.parent)


def overwrite(path: Path, data: bytes) -> None:
    """Write a few bytes over a file that had as many, durable when this returns.

    They lie in one sector, so a power failure leaves the old or the new ones; and no block is taken for them, so a full
    disk does not refuse them (file systems that copy on write may).
    """
    handle = os.open(path, os.O_WRONLY)
    try:
        os.pwrite(handle, data, 0)
        os.fsync(handle)
    finally:
        os.close(handle)


def fsync_folder(folder: Path) -> None:
    """Make names created, replaced or removed in `folder` durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def map_file(path: Path, size_of: Callable[[int], int]) -> mmap.mmap:
    """A file as memory, made where there is none. `size_of` turns its old size into its new one, in bytes.

    Raises SpoolError when the disk refuses.
    """
    size = 0
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            size = size_of(os.fstat(handle).st_size)
            os.truncate(handle, size)
            # Real blocks now: a store into a hole of a full disk would be a SIGBUS later.
            os.posix_fallocate(handle, 0, size)
            return mmap.mmap(handle, size)
        finally:
            os.close(handle)
    except OSError as error:
        raise SpoolError(f"{path}: {error}; the gateway needs {size >> 20} MiB there") from error
