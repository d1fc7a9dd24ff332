"""Files that survive a power failure."""

from __future__ import annotations

import os
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Writes a file that has its old content or the new one, whenever the power fails."""
    temporary = path.with_name(f".tmp-{path.name}")
    temporary.write_text(text)
    fsync(temporary)
    temporary.rename(path)
    fsync(path.parent)


def fsync(path: Path) -> None:
    """Make a file, or the entries of a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
