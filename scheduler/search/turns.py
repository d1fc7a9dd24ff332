"""When jobs that are larger than their tenant's share have their turn beside smaller jobs: they have the share in time.

A job asks for its tenant's share and `excess` times as much on top. If the tenant waits `excess` times as long as the job
runs, run / (wait + run) is what it is entitled to of what the job takes. So the first such job is passed by smaller ones
for `excess` times its expected duration, at most `Policy.patience` times (`Round.is_patient`). After each one the next waits
for `excess` times the time that the one before ran: it has a reservation by then, which remembers when its turn is
(`Reservation.turn_s`; a restarted operator does not know it, and the next may start one turn early). Without that, a
tenant whose gangs of an hour take all nodes one after the other leaves the others a twelfth of the time.
"""

from __future__ import annotations

from .round import Round
from .state import Assignment


def turn_s(round_: Round, assignment: Assignment, known_s: float = 0.0) -> float:
    """When the waiting job has its turn after jobs of its tenant that are larger than the share; 0: there were none, or it
    may take their place.

    Args:
        known_s: what its reservation says; while such a job runs it is counted anew.
    """
    excess = round_.shares.excess(assignment)
    if excess <= 0 or round_.outranks_one(assignment):
        return 0.0
    found = known_s
    for other in round_.assignments.values():
        if other.job.tenant != assignment.job.tenant:
            continue
        if other.placement is not None and other.job.run is not None and round_.shares.excess(other) > 0:
            known = other.job.remaining_work is not None
            end_s = round_.stay(other)[0] if known else round_.now
            found = max(found, end_s + excess * (end_s - other.started_at_s))
    return found
