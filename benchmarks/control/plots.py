"""Plots of what `queues.py` measured; of a kept result without measuring again.

    python benchmarks/control/plots.py RESULT.json FILE

Drawn of each row: CPU time of each part and of all else on the machine, writes by kind, and each part's peak of memory.
FILE's ending says its format (png, svg, pdf).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from benchmarks.control.watching import MOMENTS, Watcher

Row = Mapping[str, Any]
APART = ("leases", "events")
OTHERS = "others"
SMALL = 0.02
"""Kinds of writes that are less than this share in every row are drawn as one, `others`."""


def lives(watched: Mapping[str, Watcher], path: Path) -> None:
    """How many were admitted, ran and had ended, over time."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(watched), 1, figsize=(8, 3 * len(watched)), squeeze=False)
    for axis, (name, watcher) in zip(axes[:, 0], watched.items(), strict=True):
        for what in MOMENTS:
            moments = sorted(watcher.at[what].values())
            axis.step(moments, range(1, len(moments) + 1), where="post", label=what)
        axis.set(title=name, xlabel="seconds", ylabel="so far")
        axis.legend()
    figure.tight_layout()
    figure.savefig(path)


def use(rows: Sequence[Row], path: Path) -> None:
    """CPU time, writes and memory of each row."""
    import matplotlib.pyplot as plt

    panels = {
        "CPU ms per pod": [cpu(row) for row in rows],
        "writes per pod, without leases and events": writes(rows),
        "peak of memory, MiB": [memory(row) for row in rows],
    }
    figure, axes = plt.subplots(len(panels), 1, figsize=(10, 2 + 0.4 * len(panels) * (len(rows) + 1)))
    for axis, (title, bars) in zip(axes, panels.items(), strict=True):
        parts = sorted({name for bar in bars for name in bar}, key=lambda name: (name == OTHERS, name))
        left = [0.0] * len(rows)
        for number, part in enumerate(parts):
            widths = [bar.get(part, 0.0) for bar in bars]
            colour = "lightgrey" if part == OTHERS else plt.get_cmap("tab20")(number)
            axis.barh([row["row"] for row in rows], widths, left=left, label=part, color=colour)
            left = [begin + width for begin, width in zip(left, widths, strict=True)]
        axis.invert_yaxis()
        axis.set(title=title)
        axis.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    figure.savefig(path)


def pods(row: Row) -> int:
    """Of the row's jobs; a storm's second tenant has some beside those that `pods` counts, and all of them end."""
    ended: Mapping[str, int] = row["ended"]
    return max(1, int(row["pods"]), sum(ended.values()))


def cpu(row: Row) -> dict[str, float]:
    """CPU time of each part. What all else used is a difference of two counters: a little below 0 is nothing."""
    return {part: 1000 * max(0.0, seconds) / pods(row) for part, seconds in row["cpu_s"].items()}


def memory(row: Row) -> dict[str, float]:
    """MiB of each part."""
    own = row.get("operator_peak_mib")
    return {**({} if own is None else {"operator": float(own)}), **row["peak_mib"]}


def writes(rows: Sequence[Row]) -> list[dict[str, float]]:
    """Writes of one pod by kind, without what KWOK wrote twice."""
    found = []
    for row in rows:
        made = Counter({kind: n for kind, n in row["writes"].items() if kind.split("/")[0] not in APART})
        made["pods/status"] -= row["kwok_repeats"]
        found.append({kind: n / pods(row) for kind, n in made.items()})
    large = {kind for bar in found for kind, n in bar.items() if n >= SMALL * sum(bar.values())}
    return [
        {
            **{kind: n for kind, n in bar.items() if kind in large},
            OTHERS: sum(n for kind, n in bar.items() if kind not in large),
        }
        for bar in found
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("result", type=Path, metavar="RESULT.json", help="what `queues.py --output` wrote")
    parser.add_argument("file", type=Path, metavar="FILE", help="the plot")
    given = parser.parse_args()
    rows = json.loads(given.result.read_text()).get("rows")
    if not rows or any({"cpu_s", "peak_mib", "writes"} - row.keys() for row in rows):
        parser.error(f"{given.result} is no result of queues.py")
    use(rows, given.file)


if __name__ == "__main__":
    main()
