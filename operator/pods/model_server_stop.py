"""The preStop hook of an engine that is not ours: it ends when nothing runs there any more, or its time is up.

A replica that the operator removes was drained before. One that somebody else deletes (an eviction, a drained node) gets
SIGTERM at once, at which vLLM ends the streams that run. The hook holds the signal back: the gateway sends nothing to a
pod that is being deleted, so after a moment for its routes only what runs is waited for. A server that takes long to
answer is busy; one that cannot be reached has ended. It needs python3, which these engines
run on; where it is missing the kubelet says so in an event, and stops the container as without a hook.

SGLang sets its gauges with each batch of prompts, each fortieth step and when it has nothing to do, so a stream of less than
forty steps may not be seen; at SIGTERM SGLang itself ends only when its requests have, within the grace period of the pod.
"""

from __future__ import annotations

from typing import Any

from busbar.kube.types.engines import ForeignEngine

SETTLE_S = 2
"""Until the gateway has routes without the pod."""

_SCRIPT = """\
import socket, sys, time, urllib.request
url, settle_s, limit_s = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
end = time.monotonic() + limit_s
time.sleep(settle_s)
gauges = GAUGES
while time.monotonic() < end:
    try:
        lines = urllib.request.urlopen(url, timeout=2).read().decode().splitlines()
    except OSError as error:
        if isinstance(getattr(error, "reason", error), socket.timeout):
            continue
        break
    if not any(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(gauges)):
        break
    time.sleep(0.5)
"""


def pre_stop(engine: ForeignEngine, port: int, limit_s: int) -> dict[str, Any]:
    """The container's `lifecycle`; `limit_s` is the most that it waits."""
    script = _SCRIPT.replace("GAUGES", repr(tuple(f"{name}{{" for name in engine.metrics.in_hand)))
    url = f"http://127.0.0.1:{port}/metrics"
    return {"preStop": {"exec": {"command": ["python3", "-c", script, url, str(SETTLE_S), str(limit_s)]}}}
