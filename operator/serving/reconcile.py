"""The reconcile of a ModelService: replicas as bare pods, wanted by the autoscaler or by ``spec.replicas``.

A replica is one pod ``<service>-<n>``. Its admission is its creation: the pod is created gated and pinned to the
node that the plan chose, under a name that cannot exist twice; the next reconcile removes its gate. It is removed in
the opposite order: marked as draining (so that routes no longer offer it for new requests), asked to drain (streams
of our engine move to the replicas that stay), deleted
with a grace period when it is empty or its time is up; or it sleeps (``warm.py``). A drain cannot be undone, so a replica that reports that it
drains although the operator did not mark it is removed in the same way and replaced. ``spec.replicas`` is never
written.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace
from datetime import timedelta

from busbar.kube.contracts import bearers
from busbar.kube.contracts.workload import DRAIN_PATH, ReplicaRole
from busbar.kube.informer import Key
from busbar.kube.resources import PODS, SECRETS
from busbar.kube.types.reasons import Reason
from busbar.operator.decisions import Admit, Decision, Release
from busbar.operator.pods import manifests, replica_pods
from busbar.operator.pods.replica_place import place_of, placement_note
from busbar.operator.pods.silent_nodes import is_given_up
from busbar.operator.pods.unmounted import MOUNTED_WITHIN_S
from busbar.operator.serving import warm
from busbar.operator.serving.adapters import adapter_notices, ask_for_adapters
from busbar.operator.serving.conditions import new_problems
from busbar.operator.serving.crashes import crash_notices
from busbar.operator.serving.departures import departure_notices
from busbar.operator.serving.engine_mode import engine_mode
from busbar.operator.serving.kv_shares import ask_for_shares
from busbar.operator.serving.load_status import saturation_notices
from busbar.operator.serving.replicas import kept_pods, startable, wanted_indexes
from busbar.operator.serving.scaling import desired_replicas
from busbar.operator.serving.status import is_scaling, status_of
from busbar.operator.serving.view import ServiceUpdate, ServiceView
from busbar.operator.watch.projections import (
    ANNOTATION_DRAINING,
    ANNOTATION_PLACEMENT,
    ANNOTATION_UNANSWERED,
    Pod,
)
from busbar.operator.write.actions import Action, Apply, Create, Delete, LiftGate, Patch, PostToPod
from busbar.scheduler.autoscale.reach import may_answer_again


def reconcile(view: ServiceView, decisions: tuple[Decision, ...] = ()) -> ServiceUpdate:
    """See the module's head."""
    if view.service.metadata.deletion_timestamp is not None:
        return ServiceUpdate()
    lost = _lost(view)
    notices: tuple[tuple[str, str], ...] = tuple((Reason.REPLICA_REPLACED, why) for why in lost.values())
    kept, asleep = _stay(view, decisions, lost)
    slept, told = warm.steps(view, kept, asleep)
    released = {
        p.uid for p in view.pods if any(isinstance(d, Release) and d.index == p.rank for d in decisions)
    }
    notices += (*told, *warm.ended(view, kept | asleep | released | lost.keys()))
    started, modes = _start(view, decisions)
    notices += tuple((Reason.MODE_CHOSEN, why) for why in modes)
    asked = (*ask_for_shares(view), *ask_for_adapters(view))
    noted, said = _note_reach(view)
    notices += said
    actions = [
        *noted,
        *_leave(view, kept | asleep),
        *slept,
        *asked,
        *_clean(view),
        *_cap(view),
        *_lift(view),
        *started,
    ]
    desired, why, scaling = desired_replicas(
        view.service,
        view.demand,
        view.scaling,
        view.now,
        has_model=bool(view.model.uri),
        off=view.off[1] if view.off is not None else "",
        plan=view.plan,
    )
    status = status_of(replace(view, scaling=scaling), decisions, desired, why)
    if status is not None:
        notices += new_problems(view.status.conditions, status.conditions)
        notices += (*adapter_notices(view, status.adapters), *saturation_notices(view.status, status))
        notices += (*departure_notices(view.status, status), *crash_notices(view.status, status))
    scaled = why if is_scaling(view.status, desired) else None
    return ServiceUpdate(status, tuple(actions), _again(view, desired), scaling, scaled, notices)


def _again(view: ServiceView, desired: int) -> float:
    """After how many seconds the result may change without an event: a drain ends, or the service becomes idle."""
    spec = view.service.spec
    changing = (p.draining_since or p.deleting or p.unanswered_since for p in view.pods)
    if any(changing) or warm.changes_soon(view.pods):
        return min(1.0, view.settings.drain_settle_s)
    if any(p.unschedulable_since for p in view.pods):
        return min(view.settings.unschedulable_s, view.settings.usage_period_s)
    if any(p.unmounted_since for p in view.pods):
        return min(MOUNTED_WITHIN_S, view.settings.usage_period_s)
    if desired > 0 and (spec.external_replicas is None or spec.min_replicas == 0):
        return min(5.0, float(spec.scaling.idle_seconds))
    return view.settings.usage_period_s


# -- replicas ------------------------------------------------------------------------------------------


def _start(view: ServiceView, decisions: tuple[Decision, ...]) -> tuple[list[Action], list[str]]:
    """Creates the pods that the plan admitted; and why they get another engine mode than the usual one."""
    if view.off is not None or not view.model.uri or view.missing_claims:
        return [], []
    wanted = set(wanted_indexes(view.service, view.pods)) - {p.rank for p in view.pods} - view.holders.keys()
    if view.budget.why:
        wanted = set(sorted(wanted)[: startable(view.service, view.pods, view.budget)])
    actions: list[Action] = []
    reasons: dict[str, None] = {}
    for decision in decisions:
        if not isinstance(decision, Admit) or decision.index not in wanted:
            continue
        pool = view.pools.get(decision.placement.pool)
        choice = engine_mode(view.service, view.model.made_by, pool)
        if choice is not None and choice.reason:
            reasons[choice.reason] = None
        body = replica_pods.service_pod(
            view.service,
            index=decision.index,
            model_uri=view.model.uri,
            placement=decision.placement,
            pool=pool,
            rendering=view.rendering,
            mode="" if choice is None else choice.mode,
        )
        key = Key(view.service.metadata.namespace or "", body["metadata"]["name"])
        actions.append(Create(PODS, key, body))
    secret = manifests.bearers_secret(view.service, view.rendering)
    if actions and secret is not None:
        actions.insert(0, Apply(SECRETS, secret))
    return actions, list(reasons)


def _cap(view: ServiceView) -> list[Action]:
    """Notes the power caps that the status has at the replicas: the agents of their nodes are told by these notes."""
    rows = {row.pool: row.power_cap_percent or 100 for row in view.status.pools or ()}
    actions: list[Action] = []
    for pod in view.pods:
        place = place_of(pod)
        if place is None or pod.ended or pod.deleting or place.pool not in rows:
            continue
        if rows[place.pool] != round(100 * place.power_cap):
            note = placement_note(replace(place, power_cap=rows[place.pool] / 100))
            actions.append(
                Patch(PODS, pod.key, {"metadata": {"annotations": {ANNOTATION_PLACEMENT: note}}}, pod.uid)
            )
    return actions


def _lift(view: ServiceView) -> list[Action]:
    kept = {p.uid for p in kept_pods(view.service, view.pods)}
    return [LiftGate(p.key, p.uid, p.gate_index) for p in view.pods if p.gated and p.uid in kept]


def _clean(view: ServiceView) -> list[Action]:
    """Removes replicas that ended, that their node cannot run, or whose node is lost; the next round plans them again."""
    ended = [p for p in view.pods if (p.ended or _misplaced(view, p)) and not p.deleting]
    lost = [p for p in view.pods if _is_lost(view, p)]  # their nodes confirm nothing
    return [
        *(Delete(PODS, p.key, p.uid) for p in ended if p not in lost),
        *(Delete(PODS, p.key, p.uid, 0) for p in lost),
    ]


def _misplaced(view: ServiceView, pod: Pod) -> bool:
    """Whether kube-scheduler has not found room for it on the planned node for too long: the node is full or gone."""
    since = pod.unschedulable_since
    stuck = timedelta(seconds=view.settings.unschedulable_s)
    return not pod.node and since is not None and view.now - since > stuck


def _is_lost(view: ServiceView, pod: Pod) -> bool:
    """Whether the replica is given up with its node, although it may still answer somebody."""
    return is_given_up(pod, view.silent, view.now, view.settings.node_lost_s)


def _lost(view: ServiceView) -> dict[str, str]:
    """Replicas that can serve no requests any more although they should, by pod uid: why they are replaced."""
    uid, rendering = view.service.metadata.uid, view.rendering
    keys = (rendering.workload_key, *filter(None, [rendering.former_workload_key]))
    next_one = _next_of_former_key(view)
    lost: dict[str, str] = {}
    for pod in view.pods:
        if pod.draining_since is not None or pod.deleting or pod.ended:
            continue
        reading = view.readings.get(pod.uid)
        if reading is not None and reading.draining:
            why = "drains although the operator did not ask it to"
        elif pod.bearers and bearers.key_of(pod.bearers, uid, keys) is None:
            why = "was made under another workload key, so nobody can call it"
        elif pod is next_one:
            why = "was made under the former workload key"
        elif _is_lost(view, pod):
            why = f"is on node {pod.place}, which does not answer"
        else:
            continue
        lost[pod.uid] = f"Replica {pod.key.name} {why}; it is replaced."
    return lost


def _next_of_former_key(view: ServiceView) -> Pod | None:
    """The replica that is replaced next while the workload key is rotated: one at a time, and only while all that are wanted
    take requests. The only replica of a service stays until the former key is taken away."""
    key = view.rendering.former_workload_key
    serving = {p.rank for p in view.pods if p.takes_requests}
    wanted = set(wanted_indexes(view.service, view.pods))
    if not key or len(serving) < 2 or not wanted <= serving or any(p.leaving for p in view.pods):
        return None
    former = bearers.secret_name(key, view.service.metadata.uid)
    old = [p for p in view.pods if p.bearers == former]
    return min(old, key=lambda p: (not p.parked, p.rank), default=None)


def _stay(
    view: ServiceView, decisions: tuple[Decision, ...], lost: Mapping[str, str]
) -> tuple[set[str], set[str]]:
    """The uids of the replicas that shall serve, and of those that shall sleep; without those that are lost or released.

    A plan takes the places of sleeping replicas only: one that was woken meanwhile keeps its own.
    """
    ordered = {d.index: d for d in decisions if isinstance(d, Release)}
    gone = {p.uid for p in view.pods if p.rank in ordered and (p.parked or not ordered[p.rank].taken)}
    gone |= lost.keys()
    kept = {p.uid for p in kept_pods(view.service, view.pods, view.readings)} - gone
    surplus = [p for p in view.pods if p.uid not in kept | gone and p.stays]
    return kept, {p.uid for p in warm.sleepers(view, surplus)}


def _leave(view: ServiceView, staying: Set[str]) -> list[Action]:
    """Marks, drains and deletes the other replicas."""
    actions: list[Action] = []
    for pod in view.pods:
        if pod.deleting and not pod.ended and pod.phase == "Running" and pod.port and not _is_lost(view, pod):
            # Somebody else deletes it; it ends with what runs there, unless that can go on elsewhere.
            drain = _drain(view, pod, staying)
            if drain.peers and pod.uid not in view.asked and pod.engine is None:
                actions.append(drain)
        if pod.ended or pod.deleting or pod.uid in staying or _is_lost(view, pod):
            continue
        if pod.draining_since is None and (pod.silent or _may_answer_again(view, pod)):
            continue
        if pod.gated or pod.phase != "Running" or not pod.port or warm.is_surely_asleep(view, pod):
            actions.append(Delete(PODS, pod.key, pod.uid))
        elif pod.draining_since is None:
            since = pod.sleep_since if pod.parked and pod.sleep_since is not None else view.now
            mark = {"metadata": {"annotations": {ANNOTATION_DRAINING: since.isoformat()}}}
            actions.append(Patch(PODS, pod.key, mark, pod.uid))
        elif pod.uid not in view.asked and pod.engine is None and not _drained(view, pod):
            actions.append(_drain(view, pod, staying))
        elif _drained(view, pod):
            grace = view.service.spec.drain_seconds + replica_pods.DRAIN_MARGIN_S
            actions.append(Delete(PODS, pod.key, pod.uid, grace))
    return actions


def _note_reach(view: ServiceView) -> tuple[list[Action], tuple[tuple[str, str], ...]]:
    """Notes at replicas that they answer nobody, or do again; and the events that say so."""
    actions: list[Action] = []
    notices: list[tuple[str, str]] = []
    for pod in view.pods:
        lost = view.reach.get(pod.uid)
        if lost is None:
            continue
        note = {ANNOTATION_UNANSWERED: view.now.isoformat() if lost else None}
        actions.append(Patch(PODS, pod.key, {"metadata": {"annotations": note}}, pod.uid))
        if lost:
            text = f"Replica {pod.key.name} leaves requests without an answer; another one starts beside it."
            notices.append((Reason.REPLICA_UNANSWERED, text))
        else:
            text = f"Replica {pod.key.name} answers again; it counts among those that serve."
            notices.append((Reason.REPLICA_ANSWERS, text))
    return actions, tuple(notices)


def _may_answer_again(view: ServiceView, pod: Pod) -> bool:
    """Whether a replica that answers nobody is left where it is: for as long as one on a silent node, and until others serve."""
    if pod.unanswered_since is None or view.off is not None:
        return False
    waited_s = (view.now - pod.unanswered_since).total_seconds()
    serving = sum(p.takes_requests for p in view.pods)
    return may_answer_again(waited_s, serving, view.status.desired_replicas or 0, view.settings.node_lost_s)


def _drain(view: ServiceView, pod: Pod, staying: Set[str]) -> PostToPod:
    """Asks a replica to take no more requests, and to hand over its streams to those that stay and know its bearer; of these to
    those that decode, if there are any."""
    able = [
        peer
        for peer in view.pods
        if peer.uid in staying and peer.uid != pod.uid and peer.takes_requests and peer.bearers == pod.bearers
    ]
    spec = view.service.spec
    decode = [p for p in able if replica_pods.replica_role(spec, p.rank) is not ReplicaRole.PREFILL]
    return PostToPod(pod.key, pod.uid, DRAIN_PATH, 5.0, peers=tuple(peer.key for peer in decode or able))


def _drained(view: ServiceView, pod: Pod) -> bool:
    """Whether no request runs there any more, or its time is up. An engine that is not ours cannot be asked to
    take no more: the gateway sends none."""
    assert pod.draining_since is not None
    waited = view.now - pod.draining_since
    if waited >= timedelta(seconds=view.service.spec.drain_seconds):
        return True
    reading = view.readings.get(pod.uid)
    if (
        waited < warm.settle_time(view, pod)
        or reading is None
        or not (reading.draining or pod.engine is not None)
    ):
        return False
    return reading.running == 0 and reading.waiting == 0
