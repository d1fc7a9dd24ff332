"""A click group that knows its commands by name and imports them one at a time."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import click

GROUP = "busbar.commands"


class LazyGroup(click.Group):
    """Own commands from a table, others from the entry point group `busbar.commands`.

    Listing commands imports none of them: the help lines are in the tables.
    """

    def __init__(
        self, *args: Any, own: Mapping[str, tuple[str, str]], others: Mapping[str, str], **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._own = own
        self._others = others

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*self._own, *_installed()})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self._own:
            return _load(cmd_name, self._own[cmd_name][0])
        entry = _installed().get(cmd_name)
        return _load(cmd_name, entry.value) if entry else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        installed = _installed()
        others = [
            (name, self._others.get(name, f"(from {_package(entry)})"))
            for name, entry in sorted(installed.items())
            if name not in self._own
        ]
        with formatter.section("Commands"):
            formatter.write_dl([(name, help) for name, (_, help) in sorted(self._own.items())])
        if others:
            with formatter.section("On this machine"):
                formatter.write_dl(others)


def _installed() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist else entry.value.partition(":")[0]


def _load(name: str, target: str) -> click.Command:
    """The command at `module:attribute`; raises ClickException that says what is missing."""
    module, _, attribute = target.partition(":")
    try:
        command = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"`busbar {name}` needs the Python package {error.name!r}, which is not installed.{_advice(name)}"
        ) from error
    if not isinstance(command, click.Command):
        raise click.ClickException(
            f"{target} is not a click command; report this to the package that provides it"
        )
    return command


def _advice(name: str) -> str:
    extra = {
        "plan": "scheduler",
        "plan-capacity": "scheduler",
        "train": "workloads",
        "serve": "workloads",
        "simulate": "scheduler",
    }.get(name)
    return f" Install it with: pip install 'busbar[{extra}]'" if extra else ""
