"""No stream lost: engines end and streams move while clients stream, and every answer is compared.

    python benchmarks/serving_resume.py [--events 200] [--minutes M] [--out benchmarks/results/serving_resume.json]

Two engine processes stand behind a gateway process. Clients stream greedy, seeded and penalised requests without a
pause, some with stop strings, logprobs or two choices. Event after event, by turns, ends one engine with SIGKILL, moves
the streams of one to the other, ends one with SIGTERM and hardly any time to drain, and scales one down as the operator
does it; another takes the place of one that has ended (`tests/gateway/disturbance.py`). An answer counts
as failed when it ends with an error or never; as changed when text, logprobs, finish reasons or usage differ from
those of an undisturbed run of the same request. The tokens on the key's account must be those of the answers.
`--minutes` ends the run early; the result says how many events there were.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import platform
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.gateway.disturbance import Event

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--events", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    result = run(given.events, given.minutes, given.clients, given.max_tokens)
    text = json.dumps(result, indent=2)
    print(text)
    if given.out:
        given.out.write_text(text + "\n")
    sys.exit(0 if result["held"] else 1)


def run(count: int, minutes: float, clients: int, max_tokens: int) -> dict[str, Any]:
    # Here and not above: an engine process imports this file, and needs none of them.
    import torch
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
    from tests.gateway.disturbance import Disturbance
    from tests.serving.models import save_model

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(folder / "model", num_hidden_layers=8)
        (folder / "state").mkdir()
        disturbance = Disturbance(folder / "state", folder / "model", clients, max_tokens)
        with Progress("events", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()) as bar:
            task = bar.add_task("", total=count)
            events = happenings(count, time.monotonic() + 60 * minutes)
            report = asyncio.run(disturbance.run(events, lambda: bar.advance(task)))
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    held = not report.failed and not report.changed and not report.broken and report.resumed > 0
    held = held and report.moved["copied"] > 0
    stalls = sorted(report.stalls) or [0.0]
    quantiles = {q: stalls[int(q * (len(stalls) - 1))] for q in (0.5, 0.9, 1.0)}
    return {
        "command": "python " + " ".join(["benchmarks/serving_resume.py", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "clients": clients,
        "held": held and report.counted == report.expected,
        **{
            each.name: getattr(report, each.name)
            for each in dataclasses.fields(report)
            if each.name != "stalls"
        },
        "copiedStreams": len(report.stalls),
        "stallSecondsAtSource": quantiles,
        "cpu_seconds_of_clients_and_gateway": round(sum(each.ru_utime + each.ru_stime for each in used), 1),
    }


def happenings(count: int, end: float) -> Iterator[Event]:
    """Events of all kinds by turns, `count` in all or until the monotonic time `end`."""
    from tests.gateway.disturbance import Event

    turns = (Event.KILL, Event.MIGRATE, Event.TERMINATE, Event.MIGRATE, Event.SCALE_DOWN)
    for number in range(count):
        if time.monotonic() > end:
            return
        yield turns[number % len(turns)]


if __name__ == "__main__":
    main()
