"""The taint on nodes whose boards should be limited and are not known to be. Pure.

It keeps new pods away (`NoSchedule`), and stops none. A node that a policy limits has it

* while its agent has not been heard for some seconds, or may set no limits;
* while its boards are released: they have their default limits until the first lease;
* while a board's limit in force was not read back. A board that refuses limits counts with its nameplate, and needs none.

A start of the agent, of the driver or of the machine brings it back by the first of these. A node that nothing limits
loses it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from busbar.kube.contracts.power import LeaseState
from busbar.operator.power.membership import Membership
from busbar.operator.power.readings import Reading
from busbar.operator.watch.projections import TAINT_POWER, Node
from busbar.operator.write.actions import TaintNode

TAINT = {"key": TAINT_POWER, "effect": "NoSchedule"}


def is_limited(reading: Reading | None, since_s: float) -> bool:
    """Whether limits are in force on the node's boards, as it said after `since_s`."""
    if reading is None or reading.at_s < since_s or reading.limits is None:
        return False
    if reading.limits.state is LeaseState.RELEASED:
        return False
    return all(board.refuses or board.limit_w is not None for board in reading.boards.values())


def taints(
    found: Membership, nodes: Iterable[Node], readings: Mapping[str, Reading], since_s: float, *, heard: bool
) -> list[TaintNode]:
    """The taints to put and to take away now.

    Args:
        since_s: a node that has not reported since then is silent; the clock of `Reading.at_s`.
        heard: whether every agent has had the time to report; before, no taint is put.
    """
    changes = []
    for node in nodes:
        unsafe = found.is_limited(node.name) and not is_limited(readings.get(node.name), since_s)
        if unsafe and node.power_taint < 0 and heard:
            changes.append(TaintNode(node.name, TAINT, is_first=not node.is_tainted))
        elif not unsafe and node.power_taint >= 0:
            changes.append(TaintNode(node.name, TAINT, node.power_taint))
    return changes
