"""What the commands of the simulators share: numbers and folders that are checked before anything runs."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn
    from rich.table import Table

WIDEST = 10_000
"""Characters of a table's line."""


class FiniteRange(click.FloatRange):
    """A number within bounds; `nan` and `inf`, which pass every comparison of `click.FloatRange`, are refused."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value} is no finite number.", param, ctx)
        return found


def make_folder(folder: Path, option: str) -> None:
    """Create a folder and see whether files can be written in it. Raises click.BadParameter."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise click.BadParameter(
            f"files cannot be written in {folder}: {error.strerror}; name another folder",
            param_hint=f"'{option}'",
        ) from error


def bar_of(*columns: ProgressColumn) -> Progress:
    """A progress bar on standard error that goes when it is done; nothing at all where that is no terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def print_table(table: Table) -> None:
    """All of a table, however narrow the terminal is: no cell is cut, and no column left out."""
    from rich.console import Console
    from rich.measure import Measurement

    console = Console()
    needed = Measurement.get(console, console.options.update_width(WIDEST), table).maximum
    console.width = max(console.width, needed)
    console.print(table)
