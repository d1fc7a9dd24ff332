"""How many replicas a service should have: a pure decision from its demand.

    target, state = decide(scaling, demand, state, now)

Up at once: requests that wait or run now decide. Down slowly: only after the lower number has been enough for
`down_after_s`, one step at a time. To zero: after `idle_s` without any request, if the minimum allows it. A
request at zero wakes one replica immediately.
"""

from .replicas import Demand, Scaling, ScalingState, decide

__all__ = ["Demand", "Scaling", "ScalingState", "decide"]
