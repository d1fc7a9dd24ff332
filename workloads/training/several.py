"""Several adapters of one model in one job, one after another: each is the run that it would be in a job of its own.

So the memory is that of one adapter beside one base, and losses and results are equal bit for bit to those of single runs.
Each has a subfolder of the output and of the checkpoints by its name. What is finished is written down beside its
checkpoints, and a job that is started again goes on with the adapter at which it was.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from busbar.kube.contracts.workload import AdapterProgressReport, TrainingStatus
from busbar.workloads.training.control import Control
from busbar.workloads.training.durable import replace_text
from busbar.workloads.training.report import Reporter
from busbar.workloads.training.run import DONE, Run, Session, attempt
from busbar.workloads.training.status import Status

FINISHED = "finished.json"
_SUMS = ("tokens", "lostSteps", "skippedSteps", "badRows", "replayedSteps", "replayMismatches")


def train_all(
    parts: Sequence[Run], status: SeveralStatus, control: Control, reporter: Reporter
) -> tuple[int, Session | None]:
    """Trains what is not finished. The exit code of the first that does not end well, or DONE."""
    session: Session | None = None
    for number, part in enumerate(parts):
        if (facts := finished(part)) is not None:
            reporter.note(f"adapter {part.part} is finished already: {part.places.output}")
            status.skip(number, facts)
            continue
        code, session = attempt(part, status.begin(number), control, _Named(reporter, part.part))
        if code != DONE:
            return code, session
        write_down(part, status.end(number))
        gc.collect()  # cycles would keep the model
    status.over(f"{len(parts)} adapters are trained; they are in {parts[0].places.output.parent}")
    return DONE, session


def finished(part: Run) -> Mapping[str, Any] | None:
    """What was written down of a part whose result is there; None: it is to be trained."""
    from busbar.workloads.training.adapter import CONFIG
    from busbar.workloads.training.export import ADAPTER

    try:
        found = json.loads((part.places.checkpoints / FINISHED).read_text())
        is_this = (
            found["identity"] == part.spec.identity
            and found["steps"] == part.spec.steps
            and (part.checkpoint.adopt or found["run"] == part.owner)
        )
        AdapterProgressReport.model_validate(found["report"])
        float(found["finishedAt"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    output = part.places.output
    written = output / ADAPTER if part.spec.adapter is not None and part.spec.adapter.merge else output
    return dict(found) if is_this and (written / CONFIG).is_file() else None


def write_down(part: Run, report: AdapterProgressReport) -> None:
    """That the result of the part is written."""
    facts = {
        "run": part.owner,
        "identity": part.spec.identity,
        "steps": part.spec.steps,
        "finishedAt": time.time(),
        "report": report.model_dump(mode="json", by_alias=True),
    }
    text = json.dumps(facts, indent=2, sort_keys=True) + "\n"
    replace_text(part.places.checkpoints / FINISHED, text)


class _Named:
    """The job's reporter, with the adapter's name."""

    def __init__(self, reporter: Reporter, name: str) -> None:
        self._reporter, self._name = reporter, name
        self.share, self.step = reporter.share, reporter.step

    def phase(self, name: str, message: str) -> None:
        self._reporter.phase(name, f"adapter {self._name}: {message}")

    def note(self, message: str) -> None:
        self._reporter.note(f"adapter {self._name}: {message}")

    def error(self, message: str) -> None:
        self._reporter.error(f"adapter {self._name}: {message}")

    def close(self) -> None:
        return


class SeveralStatus(Status):
    """One status over those of the parts; steps count through all of them."""

    def __init__(self, parts: Sequence[Run], clock: Any = time.time) -> None:
        super().__init__(clock)
        self._rows = [AdapterProgressReport(name=part.part, steps=part.spec.steps) for part in parts]
        self._at, self._of = -1, Status(clock)
        self._sums = dict.fromkeys(_SUMS, 0)
        """Over the parts that have ended in this process."""
        self._is_counted = False
        """Whether the present part is in it."""
        self._stored: Mapping[str, Any] | None = None
        """As a checkpoint of the whole: what was finished last."""
        self._is_over = False

    def begin(self, number: int) -> Status:
        """The status of the part that begins."""
        made = Status(self._clock)
        with self._lock:
            self._at, self._of, self._is_counted = number, made, False
        return made

    def skip(self, number: int, facts: Mapping[str, Any]) -> None:
        """A part was finished before this process."""
        with self._lock:
            self._rows[number] = AdapterProgressReport.model_validate(facts["report"])
            self._at, self._of, self._is_counted = number, Status(self._clock), False
            self._of.update(phase="Done", step=self._rows[number].steps, message="finished before")
            self._stored = _checkpoint(self._before(number + 1), float(facts["finishedAt"]))

    def end(self, number: int) -> AdapterProgressReport:
        """The part has ended well."""
        said = self._of.to_json(losses=False)
        with self._lock:
            self._rows[number] = row = self._row(number, said).model_copy(update={"finished": True})
            self._sums = {name: count + said[name] for name, count in self._sums.items()}
            self._is_counted = True
            self._stored = _checkpoint(self._before(number + 1), self._clock())
        return row

    def over(self, message: str) -> None:
        with self._lock:
            self._is_over = True
        self._of.update(message=message)

    @property
    def phase(self) -> str:
        return str(self.to_json(losses=False)["phase"])

    @property
    def step(self) -> int:
        return int(self.to_json(losses=False)["step"])

    def traffic(self) -> tuple[dict[str, int], float]:
        return self._of.traffic()

    def checkpoint_age_s(self) -> float | None:
        return self._of.checkpoint_age_s()

    def to_json(self, *, losses: bool = True) -> dict[str, Any]:
        with self._lock:
            at, part, counted, sums = self._at, self._of, self._is_counted, dict(self._sums)
            rows, stored, is_over = list(self._rows), self._stored, self._is_over
        said, before = part.to_json(losses=losses), self._before(max(at, 0))
        if at >= 0 and not rows[at].finished:
            rows[at] = self._row(at, said)
        said["step"] += before
        said["totalSteps"] = self._before(len(rows))
        for name, count in sums.items():
            said[name] = count if counted else count + said[name]
        if said["checkpoint"] is not None:
            said["checkpoint"]["step"] += before
        else:
            said["checkpoint"] = None if stored is None else dict(stored)
        if said["resumedFromStep"] is not None:
            said["resumedFromStep"] += before
        if losses:
            said["losses"] = [[step + before, loss] for step, loss in said["losses"]]
        if said["phase"] == "Done" and not is_over:
            said["phase"] = "Saving"
        if said["etaSeconds"] is not None and part.steady_step_s is not None:
            later = self._before(len(rows)) - self._before(at + 1)
            said["etaSeconds"] = round(said["etaSeconds"] + later * part.steady_step_s, 1)
        if at >= 0 and not is_over:
            said["message"] = f"adapter {rows[at].name} ({at + 1} of {len(rows)}): {said['message']}"[:1024]
        said["fingerprint"] = said["evaluation"] = None  # each adapter has its own
        said["adapters"] = [row.model_dump(mode="json", by_alias=True) for row in rows]
        return said

    def write_termination_message(self, path: Path) -> None:
        if path.exists():
            path.write_text(TrainingStatus.model_validate(self.to_json(losses=False)).termination_message())

    def _before(self, number: int) -> int:
        """Steps of the parts before this one."""
        return sum(row.steps for row in self._rows[:number])

    def _row(self, number: int, said: Mapping[str, Any]) -> AdapterProgressReport:
        facts = {name: said[name] for name in ("step", "loss", "evaluation", "fingerprint")}
        row = self._rows[number]
        return AdapterProgressReport.model_validate({"name": row.name, "steps": row.steps, **facts})


def _checkpoint(step: int, at_s: float) -> dict[str, Any]:
    moment = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(at_s))
    return {"step": step, "savedAt": moment, "bytes": 0}


def status_of(run: Run) -> Status:
    """The status for a run."""
    return SeveralStatus(run.parts) if run.parts else Status()
