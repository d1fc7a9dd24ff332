"""``busbar-agent`` and ``busbar-agent guard``: settings, logs, and the end of the process.

Exit codes: 0 stopped by a signal, 1 could not start.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
import time

from busbar.kube import logs
from busbar.kube.errors import SettingsError
from busbar.operator.agent.guard import Guard
from busbar.operator.agent.probing import limited, probed
from busbar.operator.agent.server import Agent
from busbar.operator.agent.settings import Settings, load


def main() -> None:
    """The entry point."""
    if sys.argv[1:] not in ([], ["guard"]):
        print("usage: busbar-agent [guard]", file=sys.stderr)
        sys.exit(1)
    try:
        settings = load()
        logs.set_up(settings.log_format, settings.log_level)
        if sys.argv[1:]:
            _guard(settings)
        else:
            asyncio.run(_serve(settings))
    except (SettingsError, OSError) as error:
        print(f"busbar-agent: {error}", file=sys.stderr)
        sys.exit(1)


def _guard(settings: Settings) -> None:
    if not settings.heartbeat_file or not settings.set_limits:
        raise SettingsError("the guard needs BUSBAR_AGENT_HEARTBEAT_FILE and BUSBAR_AGENT_SET_LIMITS")
    stopped = threading.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: stopped.set())
    nodes = ((node.name, limited(settings, node)) for node in probed(settings))
    Guard(settings, {name: boards for name, boards in nodes if boards is not None}, time.monotonic).run(
        stopped
    )


async def _serve(settings: Settings) -> None:
    if settings.set_limits and not settings.lease_cert:
        raise SettingsError("BUSBAR_AGENT_SET_LIMITS needs BUSBAR_POWER_LEASE_CERT_FILE: who may send leases")
    if settings.pod_resources_socket and settings.backend == "simulated":
        raise SettingsError(
            "BUSBAR_AGENT_POD_RESOURCES_SOCKET is for this node's own boards; these are simulated"
        )
    try:
        agent = Agent(settings, probed(settings))
    except ValueError as error:
        raise SettingsError(f"BUSBAR_POWER_LEASE_CERT_FILE: {error}") from error
    await agent.start()
    task = asyncio.get_running_loop().create_task(agent.run())
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await agent.stop()


if __name__ == "__main__":
    main()
