"""What every result says beside its figures, and where it goes."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch


def circumstances() -> dict[str, Any]:
    """Command, moment, machine, its load, and versions."""
    words = iter(sys.argv)
    asked = [word for word in words if word != "--output" or next(words, None) is None]
    return {
        "command": " ".join(["python", *asked]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"cpus": os.cpu_count(), "processor": platform.processor() or platform.machine()},
        "load": os.getloadavg()[0],
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }


def publish(result: Mapping[str, Any], output: Path | None) -> None:
    """Print it, and write it to `output`."""
    text = json.dumps(result, indent=2) + "\n"
    if output is not None:
        output.write_text(text)
    sys.stdout.write(text)
