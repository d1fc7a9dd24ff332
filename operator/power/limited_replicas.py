"""Which replicas run on boards that policies limit, under which limits, and at which pace. Pure, but for the models it keeps.

A replica's steps differ from minute to minute, and its tokens per second with them. So its engine sums what its steps were
made of (`phaseSteps`), and its pace is the time that a step model without limits has for just these steps, over the time
that they took:

    phaseSteps ──► the cell's step model ──► seconds without limits ─┐
         └───────► seconds that they took ───────────────────────────┴─► pace, under the limit in force

The model is the one that the class's profile has for the same type, size and mode: only what no limit held enters it. A
replica keeps the model that it was compared with first. Only the ratio of two of its paces counts, so that an error of the
model that stays the same cancels out, and one that another model makes would not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType

from busbar.kube.contracts.report import ServingReport
from busbar.kube.contracts.workload import ServingStatus, StepSums
from busbar.kube.types import PerformanceProfile
from busbar.kube.types.performance_profile import StepModel
from busbar.operator.pods.manifests import KIND_SERVICE
from busbar.operator.power.board_holders import Boards
from busbar.operator.power.board_limits import in_force, own_boards
from busbar.operator.power.membership import Membership
from busbar.operator.power.own_replicas import OwnReplicas
from busbar.operator.power.readings import Reading
from busbar.operator.profiles.observations import by_class
from busbar.operator.profiles.paces import LimitedRun, Told, Work
from busbar.operator.watch.projections import Pod
from busbar.scheduler import Placement
from busbar.scheduler.power import Phase

SETTLED_STEPS = 1000
"""Of a step model that paces are told by: from so many on it follows its engine and no longer its first steps."""


class LimitedReplicas:
    """The models that replicas on limited boards are compared with, by pod."""

    def __init__(self, own: OwnReplicas, profiles: Callable[[], Iterable[PerformanceProfile]]) -> None:
        self._own, self._profiles = own, profiles
        self._models: dict[str, StepModel] = {}

    def look(
        self,
        found: Membership,
        readings: Mapping[str, Reading],
        pods: Collection[Pod],
        told: Mapping[str, ServingStatus],
        fresh_from_s: float,
        holders: Mapping[str, Boards] = MappingProxyType({}),
    ) -> list[LimitedRun]:
        """Of this moment: a run for each phase of each replica.

        Args:
            told: what serving pods said last, by uid.
            fresh_from_s: readings of before count for nothing.
            holders: who holds the boards, by node of which it is known.
        """
        if not found.limited:
            return []
        on = [pod for pod in pods if pod.node and not pod.ended and pod.requests.devices]
        held: dict[str, int] = {}
        for pod in on:
            held[pod.node] = held.get(pod.node, 0) + pod.requests.device_count
        replicas = [pod for pod in on if pod.kind == KIND_SERVICE and found.is_limited(pod.node)]
        self._pin(replicas, told)
        runs = []
        for pod in replicas:
            reading = in_force(readings.get(pod.node), fresh_from_s)
            part, binds = _limit(reading, pod, holders.get(pod.node), held[pod.node])
            for phase, work, counted in self._phases(pod, told.get(pod.uid)):
                name = f"{pod.uid}/{phase}"
                runs.append(LimitedRun(name, work, part, counted, (pod.node,), binds, pauses=True))
        return runs

    def _pin(self, replicas: Iterable[Pod], told: Mapping[str, ServingStatus]) -> None:
        """Keeps the models of replicas that are there, and looks for those of replicas that have none yet."""
        kept: dict[str, StepModel] = {}
        profiles: Mapping[str, PerformanceProfile] | None = None
        for pod in replicas:
            model, report, place = self._models.get(pod.uid), _report(told.get(pod.uid)), self._own.place(pod)
            if model is None and report is not None and place is not None:
                profiles = by_class(self._profiles()) if profiles is None else profiles
                model = _model(profiles.get(report.workload_class), place, report)
            if model is not None:
                kept[pod.uid] = model
        self._models = kept

    def _phases(self, pod: Pod, reading: ServingStatus | None) -> list[tuple[Phase, Work, Told | None]]:
        """What limits cost alike, and what the engine has counted, by phase."""
        report, place, model = _report(reading), self._own.place(pod), self._models.get(pod.uid)
        steps = None if reading is None or place is None or model is None else reading.phase_steps
        accelerator = "" if place is None else place.accelerator
        name, mode = ("", "") if report is None else (report.workload_class, report.mode)
        found: list[tuple[Phase, Work, Told | None]] = []
        for phase in (Phase.PREFILL, Phase.DECODE):
            told = None
            if steps is not None and model is not None:
                told = _told(model, steps.prefill if phase is Phase.PREFILL else steps.decode)
            found.append((phase, Work(name, accelerator, mode, phase), told))
        return found


def _limit(reading: Reading | None, pod: Pod, holders: Boards | None, held: int) -> tuple[float | None, bool]:
    """The limit of a replica's boards, and whether it holds at least half of them; where nobody says which they are, of those that
    pods hold on the node.

    Args:
        held: boards of the node that pods hold.
    """
    if reading is None:
        return None, False
    own = own_boards(reading, (pod,), holders)
    count = len(own.boards) if own.known else held
    return own.part, 0 < count <= 2 * own.at_limit


def _report(reading: ServingStatus | None) -> ServingReport | None:
    return None if reading is None else reading.report


def _told(model: StepModel, of: StepSums) -> Told:
    return Told(expected_s(model, of), of.seconds)


def expected_s(model: StepModel, of: StepSums) -> float:
    """The time that the model has for these steps."""
    return (
        model.seconds_per_step * of.steps
        + model.seconds_per_sequence * of.sequences
        + model.seconds_per_thousand_context_tokens * of.context_tokens / 1000
        + model.seconds_per_prompt_token * of.prompt_tokens
    )


def _model(profile: PerformanceProfile | None, place: Placement, report: ServingReport) -> StepModel | None:
    """What was measured in the same cell without limits; None: not enough."""
    at = (place.accelerator, max(1, place.per_pod.accelerators_m // 1000), report.mode)
    cells = (profile.status.cells if profile is not None and profile.status else None) or ()
    whole = [cell for cell in cells if cell.power_cap_percent == 100]
    found = {(cell.accelerator, cell.accelerators, cell.mode): cell.step_model for cell in whole}.get(at)
    return found if found is not None and found.steps >= SETTLED_STEPS else None
