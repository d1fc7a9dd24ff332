"""The system calls that give an instance its own namespaces and mounts.

Python 3.12 has ``os.unshare`` and ``os.setns``; 3.11, which Debian 12 brings, does not, and no version has
``mount``, so they are called through the C library.
"""

from __future__ import annotations

import ctypes
import os

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MS_SHARED = 1 << 20

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Move this process (for CLONE_NEWPID: its next children) into new namespaces."""
    _check(_libc.unshare(ctypes.c_int(flags)), f"unshare({flags:#x})")


def setns(descriptor: int, flags: int) -> None:
    """Enter the namespace of an open ``/proc/PID/ns/…``."""
    _check(_libc.setns(ctypes.c_int(descriptor), ctypes.c_int(flags)), f"setns({flags:#x})")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """mount(2)."""
    result = _libc.mount(
        source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode()
    )
    _check(result, f"mount {source} on {target} ({kind or 'flags'} {flags:#x})")
