"""How long `busbar --help` takes, beside a bare Python and click alone.

    python benchmarks/cli_start.py [runs]

Each is started as a process of its own; the first run of each warms the caches and is not counted. The bar is
half a second. Heavy modules that the start imported are printed too; none are expected.
"""

from __future__ import annotations

import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.cli.test_start import HEAVY

CASES = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "import click": [sys.executable, "-c", "import click"],
    "busbar --help": [sys.executable, "-m", "busbar.cli.main", "--help"],
    "busbar apply --help": [sys.executable, "-m", "busbar.cli.main", "apply", "--help"],
}


def seconds(command: list[str]) -> float:
    """Wall time of one run."""
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    print(f"Python {platform.python_version()}, {platform.machine()}, median (least) of {runs} runs")
    for name, command in CASES.items():
        seconds(command)
        times = [seconds(command) for _ in range(runs)]
        print(f"  {name:20} {statistics.median(times) * 1000:6.0f} ms ({min(times) * 1000:.0f})")
    code = f"import sys, busbar.cli.main; print(*[m for m in {HEAVY!r} if m in sys.modules])"
    heavy = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    print(f"  heavy modules imported: {heavy.strip() or 'none'}")


if __name__ == "__main__":
    main()
