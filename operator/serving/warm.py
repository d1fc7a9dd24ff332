"""Replicas that sleep instead of leaving (`spec.scaling.warm`), and wake before another one starts.

    serves ──surplus──► Settling ──no request left──► Asleep ──wanted──► Waking ──answers──► Awake: serves
                           │ wanted, its engine still awake                │ not in time
                           └──► serves                                     └──► deleted, another one starts

Where a replica stands is in an annotation of its pod (`Sleep`) and in what its engine reports, so a new operator goes on
where the last one ended. A command is sent again until the engine reports what was asked for: it is harmless where it
was done. The gateway sends requests before and after these states only. A sleeping replica holds its claim and is
charged; in the scheduler's snapshot its job yields to any that waits (`claims.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from datetime import timedelta

from busbar.kube.contracts.workload import SLEEP_PATH, WAKE_PATH
from busbar.kube.resources import PODS
from busbar.kube.types.engines import FOREIGN
from busbar.kube.types.model_service import WarmLevel
from busbar.kube.types.reasons import Reason
from busbar.operator.serving.crashes import restarts_of
from busbar.operator.serving.view import ServiceView
from busbar.operator.watch.projections import ANNOTATION_SLEEP, Pod, Sleep
from busbar.operator.write.actions import Action, Delete, Patch, PostToPod
from busbar.scheduler.autoscale.warmth import SleepChoice

Notices = list[tuple[str, str]]
_ORDER = {Sleep.ASLEEP: 0, Sleep.SETTLING: 1, Sleep.WAKING: 2}
"""Those that sleep go on sleeping before another one is put to sleep."""


def sleepers(view: ServiceView, surplus: Iterable[Pod]) -> list[Pod]:
    """Which replicas that are not wanted sleep; the others leave.

    As many as may save more than they cost (`warm_worth.py`). None sleeps while the service is off or its tenant's budget is spent, and none above `maxReplicas`.
    """
    warm = view.service.spec.scaling.warm
    if warm is None or view.off is not None or view.budget.why:
        return []
    room = view.service.spec.replica_ceiling - (view.status.desired_replicas or 0)
    able = [pod for pod in surplus if _can_sleep(view, pod)]
    able.sort(key=lambda pod: (_ORDER.get(pod.sleep, 3) if pod.sleep is not None else 3, pod.rank))
    choice = _choice(view)
    worth = choice.count if choice is not None else warm.replicas
    return able[: max(0, min(warm.replicas, worth, room))]


def ended(view: ServiceView, staying: Set[str]) -> Notices:
    """The events of replicas that have slept and leave, because it is not worth their price any more.

    Args:
        staying: uids of those that stay, and of those that leave for another reason.
    """
    choice = _choice(view)
    if choice is None or view.off is not None or view.budget.why:
        return []
    leaving = [p for p in view.pods if p.sleep is Sleep.ASLEEP and p.stays and p.uid not in staying]
    return [(Reason.SLEEP_ENDED, f"Replica {p.key.name} leaves. {choice.reason}") for p in leaving]


def _choice(view: ServiceView) -> SleepChoice | None:
    return view.warmth.choose(view.status.desired_replicas or 0) if view.warmth is not None else None


def steps(view: ServiceView, kept: Set[str], asleep: Set[str]) -> tuple[list[Action], Notices]:
    """What is done now, and the events.

    Args:
        kept: uids of the replicas that shall serve.
        asleep: uids of those that shall sleep.
    """
    actions: list[Action] = []
    notices: Notices = []
    for pod in view.pods:
        if pod.uid in view.changing:
            continue  # its answer decides
        if pod.uid in asleep:
            made, told = _to_sleep(view, pod)
        elif pod.uid in kept and (pod.sleep not in (None, Sleep.AWAKE) or _engine_sleeps(view, pod)):
            made, told = _to_wake(view, pod)
        else:
            continue
        actions += made
        notices += told
    return actions, notices


def is_surely_asleep(view: ServiceView, pod: Pod) -> bool:
    """Whether its engine said that it sleeps, so that it has no request to finish."""
    return pod.sleep is Sleep.ASLEEP and _engine_sleeps(view, pod)


def settle_time(view: ServiceView, pod: Pod) -> timedelta:
    """How long after its mark a replica may still get requests: until the gateway has routes without it. Of an
    engine that is never told (not ours), also until it was read after that."""
    settings = view.settings
    read_s = settings.poll_period_s + settings.poll_timeout_s if pod.engine is not None else 0.0
    return timedelta(seconds=settings.drain_settle_s + read_s)


def changes_soon(pods: Iterable[Pod]) -> bool:
    """Whether the result may differ in a second without an event."""
    return any(pod.sleep in (Sleep.SETTLING, Sleep.WAKING) for pod in pods)


def _to_sleep(view: ServiceView, pod: Pod) -> tuple[list[Action], Notices]:
    if not pod.parked:
        return [_mark(view, pod, Sleep.SETTLING)], []
    warm, reading = view.service.spec.scaling.warm, view.readings.get(pod.uid)
    gives_memory_back = warm is not None and warm.level is WarmLevel.SLEEPING
    engine_sleeps = _engine_sleeps(view, pod)
    if engine_sleeps and not gives_memory_back:
        return [_post(view, pod, WAKE_PATH)], []  # the spec has changed
    if engine_sleeps or not gives_memory_back:
        if pod.sleep is Sleep.ASLEEP or not (engine_sleeps or _is_quiet(view, pod)):
            return [], []
        text = f"Replica {pod.key.name} sleeps; any job that waits may take its place."
        choice = _choice(view)
        text = f"{text} {choice.reason}" if choice is not None else text
        return [_mark(view, pod, Sleep.ASLEEP)], [(Reason.REPLICA_ASLEEP, text)]
    if reading is None or not reading.ready:
        return [], []
    if pod.sleep is Sleep.ASLEEP:
        return [_mark(view, pod, Sleep.SETTLING)], []  # somebody else woke it, or the spec has changed
    return ([_post(view, pod, SLEEP_PATH)] if _is_quiet(view, pod) else []), []


def _to_wake(view: ServiceView, pod: Pod) -> tuple[list[Action], Notices]:
    reading, waited_s = view.readings.get(pod.uid), _waited(view, pod).total_seconds()
    answers = reading is not None and reading.ready and reading.sleep_level == 0
    if pod.sleep is not Sleep.WAKING:
        if answers or (reading is None and view.service.spec.engine in FOREIGN):
            return [_mark(view, pod, None)], []  # its engine never slept
        return [_mark(view, pod, Sleep.WAKING), _post(view, pod, WAKE_PATH)], []
    if answers:
        text = f"Replica {pod.key.name} woke in {waited_s:.1f} s."
        return [_mark(view, pod, Sleep.AWAKE)], [(Reason.REPLICA_WOKEN, text)]
    if reading is not None and not _engine_sleeps(view, pod):
        return [], []  # its process has ended and another one loads, as in any start
    if waited_s >= view.settings.sleep_limit_s:
        text = f"Replica {pod.key.name} did not wake in {waited_s:.0f} s; another one starts in its place."
        return [Delete(PODS, pod.key, pod.uid)], [(Reason.WAKE_FAILED, text)]
    return [_post(view, pod, WAKE_PATH)], []


def _can_sleep(view: ServiceView, pod: Pod) -> bool:
    """Whether it serves, or sleeps already. One that does not fall asleep in time leaves, as without `warm`; so does one
    that restarted, because its memory may not hold what it keeps asleep."""
    if pod.phase != "Running" or not pod.port or restarts_of(pod, view.readings):
        return False
    if pod.sleep is Sleep.SETTLING:
        limit_s = view.service.spec.drain_seconds + view.settings.sleep_limit_s
        return _waited(view, pod).total_seconds() < limit_s
    return pod.takes_requests or pod.sleep in (Sleep.ASLEEP, Sleep.WAKING)


def _engine_sleeps(view: ServiceView, pod: Pod) -> bool:
    reading = view.readings.get(pod.uid)
    return reading is not None and reading.sleep_level > 0


def _is_quiet(view: ServiceView, pod: Pod) -> bool:
    """Whether no request runs there and the gateway sends none. An engine that reports nothing has had `drainSeconds`."""
    waited, reading = _waited(view, pod), view.readings.get(pod.uid)
    if waited < settle_time(view, pod):
        return False
    if reading is None:
        is_silent = view.service.spec.engine in FOREIGN
        return is_silent and waited >= timedelta(seconds=view.service.spec.drain_seconds)
    return reading.running == 0 and reading.waiting == 0


def _waited(view: ServiceView, pod: Pod) -> timedelta:
    return view.now - (pod.sleep_since or view.now)


def _mark(view: ServiceView, pod: Pod, state: Sleep | None) -> Patch:
    """Writes where it is now. The gateway's routes follow the pod."""
    note = None if state is None else f"{state} {view.now.isoformat()}"
    return Patch(PODS, pod.key, {"metadata": {"annotations": {ANNOTATION_SLEEP: note}}}, pod.uid)


def _post(view: ServiceView, pod: Pod, path: str) -> PostToPod:
    return PostToPod(pod.key, pod.uid, path, view.settings.sleep_limit_s, repeats=True)
