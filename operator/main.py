"""``busbar-operator``: settings, login, logs, and the end of the process.

Exit codes: 0 after SIGTERM or SIGINT, 1 when something must be put right by a person (settings, login), 3 when
the lease was lost. A container that ends is started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time

from busbar.kube.errors import ConfigError
from busbar.kube.login import find_login
from busbar.operator.errors import Fenced, SettingsError
from busbar.operator.settings import from_environ

LOST_LEASE = 3
END_S = 10.0


class JsonLines(logging.Formatter):
    """One JSON object per line, so that logs can be searched by field."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created)),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def end_soon(code: int) -> None:
    """Ends the process after a while, whatever hangs: one that has lost its lease must not linger."""
    timer = threading.Timer(END_S, os._exit, (code,))
    timer.daemon = True
    timer.start()


def main() -> None:
    """The entry point."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("kopf").setLevel(logging.ERROR)  # it warns of each retry
    try:
        settings, login = from_environ(), find_login()
    except (SettingsError, ConfigError) as error:
        print(f"busbar-operator: {error}", file=sys.stderr)
        sys.exit(1)
    # Imported late: a wrong setting is told before half a second of imports.
    from busbar.operator.app import Operator

    async def run() -> None:
        loop = asyncio.get_running_loop()
        operator = loop.create_task(Operator(login, settings, on_lost=lambda: end_soon(LOST_LEASE)).run())

        def stop() -> None:
            end_soon(0)
            operator.cancel()

        for name in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(name, stop)
        with contextlib.suppress(asyncio.CancelledError):
            await operator

    try:
        asyncio.run(run())
    except* Fenced as lost:
        print(f"busbar-operator: {lost.exceptions[0]}", file=sys.stderr)
        sys.exit(LOST_LEASE)


if __name__ == "__main__":
    main()
