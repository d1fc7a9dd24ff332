"""The operator as a process of its own, as in its Deployment."""

from __future__ import annotations

import os
import sys
from pathlib import Path

COMMAND = [sys.executable, "-m", "busbar.operator.main"]


def environment(
    kubeconfig: Path, folder: Path, source: str = ".src", namespace: str = "default"
) -> dict[str, str]:
    """The variables of the process; its workload key is written to `folder`.

    `source` contains the package `busbar`.
    """
    key = folder / "workload-key"
    key.write_text("0123456789abcdef0123456789abcdef")
    return {
        **os.environ,
        "KUBECONFIG": str(kubeconfig),
        "BUSBAR_WORKLOAD_KEY_FILE": str(key),
        "POD_NAMESPACE": namespace,
        "POD_NAME": "operator",
        "POD_UID": "one-pod",
        "BUSBAR_OPERATOR_INTERNAL_HOST": "127.0.0.1",
        "BUSBAR_OPERATOR_INTERNAL_PORT": "0",
        "BUSBAR_OPERATOR_METRICS_PORT": "0",
        "PYTHONPATH": source,
    }
