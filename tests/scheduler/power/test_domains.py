"""Which domains are refused, each beside a neighbour that is accepted."""

from __future__ import annotations

import math

import pytest

from busbar.scheduler.errors import DomainError
from busbar.scheduler.power import Domain, DomainFault, domain_tree


def _chain(levels: int) -> tuple[Domain, ...]:
    return tuple(Domain(f"d{i}", 1000.0, f"d{i - 1}" if i else None) for i in range(levels))


ROWS = (
    (DomainFault.DUPLICATE, (Domain("a", 1), Domain("a", 2)), (Domain("a", 1), Domain("b", 2))),
    (DomainFault.BUDGET, (Domain("a", 0),), (Domain("a", 1e-3),)),
    (DomainFault.BUDGET, (Domain("a", -1),), (Domain("a", 1),)),
    (DomainFault.BUDGET, (Domain("a", math.nan),), (Domain("a", 1),)),
    (DomainFault.BUDGET, (Domain("a", 100.1e6),), (Domain("a", 100e6),)),
    (
        DomainFault.MARGIN,
        (Domain("a", 1, margin_percent=101),),
        (Domain("a", 1, margin_percent=50),),
    ),
    (DomainFault.MARGIN, (Domain("a", 1, margin_percent=-1),), (Domain("a", 1, margin_percent=0),)),
    (
        DomainFault.RIDE_THROUGH,
        (Domain("a", 1, ride_through_s=0),),
        (Domain("a", 1, ride_through_s=10),),
    ),
    (DomainFault.UNKNOWN_PARENT, (Domain("a", 1, "b"),), (Domain("a", 1, "b"), Domain("b", 1))),
    (DomainFault.CYCLE, (Domain("a", 1, "a"),), (Domain("a", 1),)),
    (DomainFault.CYCLE, (Domain("a", 1, "b"), Domain("b", 1, "a")), (Domain("a", 1, "b"), Domain("b", 1))),
    (
        DomainFault.CHILD_ABOVE_PARENT,
        (Domain("a", 2, "b"), Domain("b", 1)),
        (Domain("a", 1, "b"), Domain("b", 1)),
    ),
    (DomainFault.TOO_DEEP, _chain(6), _chain(5)),
    (
        DomainFault.NODE_TWICE,
        (Domain("a", 1, nodes=("n",)), Domain("b", 1, nodes=("n",))),
        (Domain("a", 1, nodes=("n",)), Domain("b", 1, nodes=("m",))),
    ),
    (
        DomainFault.NODE_TWICE,
        (Domain("a", 1, nodes=("n", "n")),),
        (Domain("a", 1, nodes=("n", "m")),),
    ),
)


@pytest.mark.parametrize(("fault", "refused", "accepted"), ROWS)
def test_a_refusal_has_a_reason_and_its_neighbour_is_accepted(
    fault: DomainFault, refused: tuple[Domain, ...], accepted: tuple[Domain, ...]
) -> None:
    with pytest.raises(DomainError) as error:
        domain_tree(refused)
    assert error.value.reason == fault
    assert error.value.code == "InvalidPowerDomain"
    domain_tree(accepted)


def test_members_are_counted_in_every_domain_above() -> None:
    tree = domain_tree(
        (
            Domain("rack", 1, "row", nodes=("c", "a")),
            Domain("site", 9),
            Domain("row", 3, "site", nodes=("b",)),
        )
    )
    assert tree.order == ("rack", "row", "site")
    assert tree.members == {"rack": ("a", "c"), "row": ("a", "b", "c"), "site": ("a", "b", "c")}
    assert tree.leaf_of["b"] == "row"
