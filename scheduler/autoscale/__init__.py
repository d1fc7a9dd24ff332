"""How many replicas a service should have, and of which GPU types: pure decisions.

    target, state = decide(scaling, demand, state, now)      one number, from requests in flight

Up at once: requests that wait or run now decide. Down slowly: only after the lower number has been enough for
`down_after_s`, one step at a time. To zero: after `idle_s` without any request, if the minimum allows it. A
request at zero wakes one replica immediately.

    rate = max_rate(model, bucket, slo)                      what one replica of a type sustains
    mix = cheapest(columns, load, limits)                    which types, how many, and who gets which bucket

    pool = turns.next(bucket, shares, able, wait_s, patience)    whose turn it is, by the mix's shares

    choice = warmth.choose(wanted)                           how many surplus replicas sleep instead of leaving

    changes = reach.look(replicas, now)                      which replicas answer nobody, or do again

With `demand_forecast.py` and `fleet.py` these serve the operator, for services with a latency target, and `busbar plan-capacity`.
"""

from .replicas import ALTERNATES_S, Asked, Demand, Scaling, ScalingState, decide

__all__ = ["ALTERNATES_S", "Asked", "Demand", "Scaling", "ScalingState", "decide"]
