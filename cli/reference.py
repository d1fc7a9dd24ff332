"""`docs/cli.md`: the reference of the command line, generated from the commands themselves."""

from __future__ import annotations

import inspect
import re

import click

from busbar.cli.errors import EXIT_CODES
from busbar.cli.main import OTHERS, OWN, busbar

PATH = "docs/cli.md"
_INTRODUCTION = """\
# The `busbar` command

Generated from the commands by `python -m tools.generate cli`; do not edit.

`busbar login URL` stores a server and a token. `BUSBAR_SERVER`, `BUSBAR_TOKEN`, `BUSBAR_NAMESPACE` and
`BUSBAR_CA_FILE` take precedence over the stored settings. `-o json|yaml|name` is for programs; messages go to
standard error. A NAME is the name of a job or a service; where both exist, write `job/NAME` or `service/NAME`.
"""


def generate() -> dict[str, str]:
    """Path to text, for `tools.generate`."""
    parts = [_INTRODUCTION, _exit_codes(), _others()]
    with click.Context(busbar, info_name="busbar") as root:
        for name in sorted(OWN):
            command = busbar.get_command(root, name)
            assert command is not None
            parts += _sections(command, root, name)
    return {PATH: "\n".join(parts)}


def _exit_codes() -> str:
    rows = "\n".join(f"| {code} | {meaning} |" for code, meaning in EXIT_CODES.items())
    return f"## Exit codes\n\n| code | meaning |\n|---|---|\n{rows}\n"


def _others() -> str:
    rows = "\n".join(f"| `busbar {name}` | {help} |" for name, help in sorted(OTHERS.items()))
    return (
        "## On this machine\n\nThese need no server; each says more with `--help`.\n\n"
        f"| command | what it does |\n|---|---|\n{rows}\n"
    )


def _sections(command: click.Command, parent: click.Context, name: str) -> list[str]:
    with click.Context(command, info_name=name, parent=parent) as context:
        parts = [_section(command, context)]
        if isinstance(command, click.Group):
            for child in command.list_commands(context):
                found = command.get_command(context, child)
                assert found is not None
                parts += _sections(found, context, child)
    return parts


def _section(command: click.Command, context: click.Context) -> str:
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    lines = [f"## {context.command_path}", "", _plain(command.help), "", f"    {usage}", ""]
    options = [
        record
        for parameter in command.get_params(context)
        if isinstance(parameter, click.Option)
        and "--help" not in parameter.opts
        and (record := parameter.get_help_record(context))
    ]
    if options:
        lines += ["| option | meaning |", "|---|---|"]
        lines += [f"| `{_cell(left)}` | {_cell(right)} |" for left, right in options]
        lines.append("")
    examples = _plain(command.epilog)
    if examples:
        body = examples.removeprefix("Examples:\n")
        commands, _, rest = body.partition("\n\n")
        lines += ["```sh", *(line.removeprefix("  ") for line in commands.splitlines()), "```", ""]
        if rest:
            lines += [rest, ""]
    return "\n".join(lines)


def _plain(text: str | None) -> str:
    return inspect.cleandoc(re.sub("\b\n?", "", text or ""))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
