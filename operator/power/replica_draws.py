"""What the boards of replicas draw now, beside what their engines count. Pure.

Where it is known which boards a replica of the platform's own engine holds, and it shares none, it counts by itself. Elsewhere
a node counts if replicas of one class, size and mode hold all boards that pods hold there. These are taken to be the ones
that draw most, as a board that nobody holds idles.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from busbar.kube.contracts.workload import PhaseSteps, ServingStatus
from busbar.operator.power.board_holders import Boards
from busbar.operator.power.board_limits import OwnBoards, own_boards
from busbar.operator.power.own_replicas import OwnReplicas
from busbar.operator.power.readings import Metered, Reading
from busbar.operator.profiles.phase_draws import DrawPlace, ReplicaDraw
from busbar.operator.watch.projections import Pod


def replica_draws(
    readings: Mapping[str, Reading],
    pods: Iterable[Pod],
    told: Mapping[str, ServingStatus],
    own: OwnReplicas,
    fresh_from_s: float,
    boards: Mapping[str, Boards] = MappingProxyType({}),
) -> list[ReplicaDraw]:
    """Of this moment, one for each replica whose boards are known, and one for each node of which nobody says it.

    Args:
        told: what serving pods said last, by uid.
        fresh_from_s: readings of before count for nothing.
        boards: who holds them, by node of which it is known.
    """
    on: dict[str, list[Pod]] = {}
    for pod in pods:
        reading = readings.get(pod.node)
        if reading is None or reading.at_s < fresh_from_s or reading.is_simulated:
            continue
        if pod.requests.devices and not pod.ended:
            on.setdefault(pod.node, []).append(pod)
    draws: list[ReplicaDraw | None] = []
    for node, here in on.items():
        reading, holders = readings[node], boards.get(node)
        if holders is None:
            draws.append(_draw(node, own_boards(reading, here, None), here, told, own))
            continue
        alone = {uuid: keys for uuid, keys in holders.items() if len(keys) == 1}
        draws += [_draw(node, own_boards(reading, (pod,), alone), [pod], told, own) for pod in here]
    return [draw for draw in draws if draw is not None]


def _draw(
    node: str, at: OwnBoards, here: Sequence[Pod], told: Mapping[str, ServingStatus], own: OwnReplicas
) -> ReplicaDraw | None:
    """Of replicas on a node that hold these boards, or some of them where nobody says which."""
    places, steps = set(), []
    for pod in here:
        known = _told(pod, told.get(pod.uid), own)
        if known is None:
            return None
        places.add(known[0])
        steps.append(known[1])
    boards: list[Metered] = sorted(at.boards, key=lambda board: -board.watts)
    held = boards[: sum(pod.requests.device_count for pod in here)]
    part = at.common
    if len(places) > 1 or part is None or not held:
        return None
    return ReplicaDraw(
        name="/".join([node, *sorted(pod.uid for pod in here)]),
        place=places.pop(),
        part=part,
        board_w=math.fsum(board.watts for board in held) / len(held),
        board_max_w=max(board.nameplate_w for board in held),
        prefill_s=math.fsum(each.prefill.seconds for each in steps) / len(steps),
        decode_s=math.fsum(each.decode.seconds for each in steps) / len(steps),
    )


def _told(pod: Pod, reading: ServingStatus | None, own: OwnReplicas) -> tuple[DrawPlace, PhaseSteps] | None:
    """None: it is no replica of our engine, or it tells nothing."""
    place = own.place(pod)
    if place is None or reading is None or reading.report is None or reading.phase_steps is None:
        return None
    report = reading.report
    count = max(1, place.per_pod.accelerators_m // 1000)
    return DrawPlace(report.workload_class, place.accelerator, count, report.mode), reading.phase_steps
