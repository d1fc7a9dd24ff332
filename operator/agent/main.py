"""``busbar-agent``: settings, logs, and the end of the process. Exit codes: 0 stopped by a signal, 1 could not start."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys

from busbar.kube import logs
from busbar.kube.errors import SettingsError
from busbar.operator.agent.server import Agent, probed
from busbar.operator.agent.settings import Settings, load


def main() -> None:
    """The entry point."""
    try:
        settings = load()
        logs.set_up(settings.log_format, settings.log_level)
        asyncio.run(_serve(settings))
    except (SettingsError, OSError) as error:
        print(f"busbar-agent: {error}", file=sys.stderr)
        sys.exit(1)


async def _serve(settings: Settings) -> None:
    agent = Agent(settings, probed(settings))
    await agent.start()
    task = asyncio.get_running_loop().create_task(agent.run())
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await agent.stop()


if __name__ == "__main__":
    main()
