"""What the scripts of this folder print and keep: what was measured, by which command, where and beside how much else."""

from __future__ import annotations

import asyncio
import json
import os
import platform
from collections.abc import Coroutine
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


def publish(command: str, measured: Coroutine[Any, Any, dict[str, Any]], output: Path | None) -> None:
    """Measure, print the result as JSON, and write it to `output` if that is named. The machine's load before and after
    tells how much ran beside it."""
    load_before = round(os.getloadavg()[0], 1)
    found = {
        "command": command,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load_before": load_before,
        **asyncio.run(measured),
        "load_after": round(os.getloadavg()[0], 1),
    }
    text = json.dumps(found, indent=2)
    print(text)
    if output is not None:
        output.write_text(text + "\n")
