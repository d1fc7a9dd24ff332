"""The last words of a replica's container, which the operator reads."""

from __future__ import annotations

import json
import logging

from busbar.kube.contracts.workload import TERMINATION_LIMIT_BYTES

log = logging.getLogger(__name__)


def write_termination_message(path: str, message: str) -> None:
    """Silent where there is no such file."""
    text = json.dumps({"kind": "serving", "message": message}, ensure_ascii=False)
    try:
        with open(path, "r+b") as file:
            file.write(text.encode()[:TERMINATION_LIMIT_BYTES])
            file.truncate()  # a server that was before this one in the container may have left a longer one
    except OSError:
        log.debug("no termination log at %s", path)
