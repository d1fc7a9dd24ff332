"""``busbar-operator``: settings, login, logs, and the end of the process.

Exit codes: 0 after SIGTERM or SIGINT, 1 when a person must correct something (settings, login) or after a fault.
Kubernetes restarts a container that ends. A lost lease ends nothing: where another process took it, this one stands by.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
import threading
import time
from asyncio import sslproto

from busbar.kube import logs
from busbar.kube.errors import ConfigError, SettingsError
from busbar.kube.login import find_login
from busbar.operator.settings import load

END_S = 10.0
TLS_RECORD_BYTES = 16 * 1024
COLLECT_AT = (20_000, 20, 20)
"""Python's collector of cycles runs after so many new objects, and looks at older ones each 20th time.

The default of 700 takes a tenth of the operator's CPU time: what the caches keep is many objects and no cycles.
"""


def end_soon() -> None:
    """Ends the process after ``END_S`` even if a task hangs: it was told to stop, and is killed soon in any case."""
    timer = threading.Timer(END_S, os._exit, (0,))
    timer.daemon = True
    timer.start()


def read_records() -> None:
    """Reads what comes encrypted into buffers of one TLS record, which a read returns no more than.

    asyncio asks for 256 KiB each time, which is taken from the system and given back to it, and keeps as much per connection.
    """
    sslproto.SSLProtocol.max_size = TLS_RECORD_BYTES


def collect_seldom() -> None:
    """Lets the collector run less often, and leave out what was imported: that stays until the end."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_AT)


def main() -> None:
    """The entry point."""
    try:
        settings, login = load(), find_login()
    except (SettingsError, ConfigError) as error:
        print(f"busbar-operator: {error}", file=sys.stderr)
        sys.exit(1)
    logs.set_up(settings.log_format, settings.log_level)
    logging.getLogger("kopf").setLevel(logging.ERROR)  # Kopf warns at each retry
    # Imported late: a wrong setting is reported before half a second of imports.
    from busbar.operator.app import Operator, lead

    collect_seldom()
    read_records()
    started_at = time.time()

    async def run() -> None:
        loop = asyncio.get_running_loop()
        operator = loop.create_task(lead(lambda: Operator(login, settings, started_at=started_at)))

        def stop() -> None:
            end_soon()
            operator.cancel()

        for name in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(name, stop)
        with contextlib.suppress(asyncio.CancelledError):
            await operator

    asyncio.run(run())


if __name__ == "__main__":
    main()
