"""Long rows in parts, so that an interrupted run resumes where it stopped.

A part is a file of JSON lines in the machine's folder for temporary files. The folder's name is a digest of the
planner's sources, of the row's own, of the data and of the policy: results of other code or data are never reused. A
line is written as soon as it is computed; a line cut off by a crash is dropped and computed again.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import busbar.scheduler

BESIDE = Path(__file__).parent


def folder(case: str, *depends: object) -> Path:
    """The folder for the parts of this case, for this code and these inputs. Paths are compared by content."""
    digest = hashlib.sha256()
    planner = sorted(Path(busbar.scheduler.__file__).parent.rglob("*.py"))
    for path in [*planner, *sorted(BESIDE.glob("*.py")), *(d for d in depends if isinstance(d, Path))]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update(repr([d for d in depends if not isinstance(d, Path)]).encode())
    found = Path(tempfile.gettempdir()) / f"busbar-{case}-{digest.hexdigest()[:16]}"
    found.mkdir(exist_ok=True)
    return found


def lines(path: Path) -> list[Any]:
    """The lines of a part so far."""
    if not path.exists():
        return []
    whole = path.read_text().rpartition("\n")[0]
    path.write_text(whole + "\n" if whole else "")
    return [json.loads(line) for line in whole.splitlines()]


def kept(path: Path, made: Iterable[Any]) -> list[Any]:
    """A part that is reused only when it is complete."""
    if not path.exists():
        unfinished = path.with_suffix(".part")
        with unfinished.open("w") as file:
            file.writelines(json.dumps(item) + "\n" for item in made)
        unfinished.rename(path)
    return lines(path)
