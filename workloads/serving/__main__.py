"""`python -m busbar.workloads.serving`: in a pod, configured by its environment.

Without BUSBAR_SPEC it is `busbar serve`.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING

from busbar.kube import logs
from busbar.kube.contracts.workload import TERMINATION_LOG, Env
from busbar.workloads.serving.errors import ServingError
from busbar.workloads.serving.pod import from_environment
from busbar.workloads.serving.supervisor import Told, supervised
from busbar.workloads.serving.termination import write_termination_message

if TYPE_CHECKING:
    from busbar.workloads.serving.loader import Loaded
    from busbar.workloads.serving.settings import ServerSettings

log = logging.getLogger("busbar.workloads.serving")


def main() -> int:
    """The exit code of a pod's engine."""
    try:
        settings = from_environment(os.environ, sys.argv[1:])  # before torch, which takes seconds to import
        from busbar.workloads.serving import process
    except ServingError as error:
        return _failed(error)
    logs.set_up("json")

    def serve(settings: ServerSettings, told: Told) -> int:
        def on_ready(_: Loaded) -> None:
            told.serves()
            log.info("ready: %s", settings.model_id)

        try:
            return process.serve(settings, on_ready)
        except ServingError as error:
            told.ends_for(str(error))
            return _failed(error)

    return supervised(settings, serve)


def _failed(error: ServingError) -> int:
    print(f"{error.code}: {error}", file=sys.stderr)
    write_termination_message(TERMINATION_LOG, f"{error.code}: {error}")
    return error.exit_status


if __name__ == "__main__":
    if Env.SPEC in os.environ:
        sys.exit(main())
    from busbar.workloads.serving.command import serve

    serve(prog_name="busbar serve")
