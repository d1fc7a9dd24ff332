"""Checkpoints of a gang: every rank writes its own extents, and a checkpoint counts when all have written.

On disk:

    step-00000050/state-0-of-2.safetensors    the slices of rank 0, and the random states
    step-00000050/state-0-of-2.json           their extents and checksums
    step-00000050/manifest.json               step, identity, counters, the whole size of every tensor, and the
                                              checksum of each rank's .json

Writing: each rank writes its two files into one temporary folder, durably, and says so. When all have, rank 0 writes
the manifest, renames the folder and tells the others; any rank's failure is the failure of all. Reading: each rank
verifies its share of the files, and what one rank cannot read all pass over. The ranks that read may be more or fewer
than those that wrote, and a single process writes and reads the same tensors in one file.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from busbar.workloads.training.checkpoint import CheckpointFolder, Found, _replace, write_document
from busbar.workloads.training.durable import fsync
from busbar.workloads.training.errors import CheckpointError, NotFinite
from busbar.workloads.training.layout import Layout
from busbar.workloads.training.loaded import MANIFEST, Loaded, read, shard_name
from busbar.workloads.training.meeting import Meeting
from busbar.workloads.training.ranks import Ranks
from busbar.workloads.training.state_file import Blocks, write_state


class GangFolder(CheckpointFolder):
    """The folder of checkpoints that all ranks share; each calls the same methods in the same order."""

    def __init__(
        self,
        path: Path,
        keep: int,
        ranks: Ranks,
        meeting: Meeting,
        session: str,
        note: Callable[[str], object] = lambda text: None,
        confirm: Callable[[], object] = lambda: None,
    ) -> None:
        """`session` names this start of the gang, on all ranks alike."""
        super().__init__(path, keep, note, confirm)
        self._ranks, self._meeting, self._session = ranks, meeting, session
        self._writes = 0

    def write(self, step: int, layout: Layout, blocks: Blocks, facts: Mapping[str, Any]) -> int:
        """Make the checkpoint of `step` durable on all ranks; returns its bytes. Raises CheckpointError."""
        self._writes += 1
        key = f"{self._session}/write-{self._writes}"
        target = self._folder(step)
        temporary = self.path / f".tmp-{target.name}-{self._session}"
        failure: Exception | None = None
        said: dict[str, Any] = {}
        try:
            self._begin(key, temporary, layout)
            said = self._write_own(temporary, step, layout, blocks)
        except Exception as problem:
            failure = problem
            said = {
                "problem": f"rank {self._ranks.rank}: {problem}",
                "diverged": isinstance(problem, NotFinite),
            }
        self._meeting.tell(f"{key}/{self._ranks.rank}", json.dumps(said))
        if self._ranks.rank == 0:
            verdict = self._commit(key, temporary, step, layout, facts)
            self._meeting.tell(key, json.dumps(verdict))
        else:
            verdict = json.loads(self._meeting.hear(key))
        if "problem" not in verdict:
            return int(verdict["size"])
        if verdict["diverged"]:
            raise NotFinite(str(verdict["problem"])) from failure
        if failure is not None and not isinstance(failure, OSError | CheckpointError):
            raise failure
        raise self._failed(step, verdict["problem"]) from failure

    def _begin(self, key: str, temporary: Path, layout: Layout) -> None:
        """Rank 0 makes the folder, and room; the others wait for it."""
        if self._ranks.rank != 0:
            self._meeting.hear(f"{key}/room")
            return
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            self._make_room(layout.size * self._ranks.size)
        finally:
            self._meeting.tell(f"{key}/room", "made")

    def _write_own(self, temporary: Path, step: int, layout: Layout, blocks: Blocks) -> dict[str, Any]:
        path = temporary / shard_name(self._ranks.rank, self._ranks.size)
        checksums = write_state(path, step, layout, blocks, self._note_once, self.pace.moved)
        extents = {name: (extent.start, extent.whole) for name, extent in layout.extents.items()}
        document = path.with_suffix(".json")
        crc32 = write_document(document, {"tensors": checksums, "extents": extents})
        return {"crc32": crc32, "size": path.stat().st_size + document.stat().st_size}

    def _commit(
        self, key: str, temporary: Path, step: int, layout: Layout, facts: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Rank 0: wait for all, then commit; returns the size, or what failed."""
        said = [json.loads(self._meeting.hear(f"{key}/{rank}")) for rank in range(self._ranks.size)]
        problems = [each for each in said if "problem" in each]
        try:
            if problems:
                return max(problems, key=lambda each: bool(each["diverged"]))
            body = {**facts, "step": step, "savedAt": time.time(), "elements": dict(layout.elements)}
            write_document(temporary / MANIFEST, {**body, "ranks": [each["crc32"] for each in said]})
            fsync(temporary)
            size = sum(each["size"] for each in said) + (temporary / MANIFEST).stat().st_size
            self._confirm()
            _replace(temporary, self._folder(step))
        except (OSError, CheckpointError) as problem:
            return {"problem": f"rank 0: {problem}", "diverged": False}
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return {"size": size}

    def remove_old(self, written: int) -> None:
        """By rank 0 alone."""
        if self._ranks.rank == 0:
            super().remove_old(written)

    def newest_step(self) -> int:
        """As rank 0 sees it."""
        return self._ranks.gather(super().newest_step())[0]

    def newest(self) -> Found:
        """The newest checkpoint that every rank reads. Half-written ones are removed."""
        if self._ranks.rank == 0:
            self._remove_leftovers()
        passed_over: list[str] = []
        for step in self._ranks.gather(self.steps())[0]:
            loaded, problem = self._verify(step)
            problems = [each for each in self._ranks.gather(problem) if each]
            if loaded is not None and not problems:
                return Found(loaded, tuple(passed_over))
            passed_over.append("; ".join(dict.fromkeys(problems)))
            self._damaged.add(step)
        return Found(None, tuple(passed_over))

    def _verify(self, step: int) -> tuple[Loaded | None, str]:
        """Read this rank's share of a checkpoint."""
        try:
            return read(self._folder(step), lambda index: index % self._ranks.size == self._ranks.rank), ""
        except CheckpointError as problem:
            return None, str(problem)
