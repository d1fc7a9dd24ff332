"""The `busbar` command: before a command runs, it only parses the command line.

`busbar --help` must answer at once, so each command is named here with its one line of help and imported only when it
runs or its own help is shown. Commands of other parts (`up`, `train`, `serve`, …) come from the entry point group
`busbar.commands`; other packages may add theirs.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from busbar.cli.ending import (
    CLOSED_PIPE,
    INTERRUPTED,
    ClosedPipe,
    Terminated,
    drop_closed_streams,
    end_at_once_when_interrupted,
    end_on_sigterm,
    pipe_watched,
)
from busbar.cli.errors import EXIT_CODES, BusbarError
from busbar.cli.lazy import LazyGroup

OWN = {
    "adapters": ("busbar.cli.commands.adapters:adapters", "List, load and unload a service's LoRA adapters."),
    "apply": ("busbar.cli.commands.apply:apply", "Create or change jobs and services from files."),
    "backup": ("busbar.cli.commands.backup:backup", "For admins: write objects and database to a file."),
    "batch": ("busbar.cli.commands.batch:batch", "Run a file of requests as a batch, and get the answers."),
    "bench": ("busbar.cli.commands.bench:bench", "Measure an OpenAI endpoint under load."),
    "budget": ("busbar.cli.commands.budget:budget", "Show what is used and left of budgets."),
    "cancel": ("busbar.cli.commands.cancel:cancel", "Suspend: save the state, release all resources."),
    "completion": ("busbar.cli.commands.completion:completion", "Print the shell's completion script."),
    "delete": ("busbar.cli.commands.delete:delete", "Delete jobs and services; outputs stay."),
    "describe": (
        "busbar.cli.commands.describe:describe",
        "Show one object: state, reason, progress, events.",
    ),
    "list": (
        "busbar.cli.commands.listing:listing",
        "List jobs, services, pools, profiles, nodes, models or tenants.",
    ),
    "login": ("busbar.cli.commands.login:login", "Store a server and a token."),
    "logs": ("busbar.cli.commands.logs:logs", "Print a job's or service's log."),
    "power": ("busbar.cli.commands.power:power", "Show what feeds and nodes draw."),
    "preview": ("busbar.cli.commands.preview:preview", "Show where a job would run, when, at what cost."),
    "restore": (
        "busbar.cli.commands.backup:restore",
        "For admins: restore a backup into a new installation.",
    ),
    "resume": ("busbar.cli.commands.cancel:resume", "Undo a cancel; continue from the last checkpoint."),
    "scale": ("busbar.cli.commands.scale:scale", "Set a service's replicas."),
    "service": ("busbar.cli.commands.service:service", "Plan the replicas of a model service for a load."),
    "token": ("busbar.cli.commands.token:token", "Create, list and revoke API tokens."),
    "usage": ("busbar.cli.commands.usage:usage", "Show usage by tenant, model, key or day."),
}
OTHERS = {
    "up": "Start the one-machine cluster with Busbar on it.",
    "down": "End the one-machine cluster and clean up.",
    "status": "Show what runs on this machine, and what it uses.",
    "plan": "Show what a training job needs, and how fast it would be.",
    "train": "Train on this machine, without Kubernetes.",
    "serve": "Serve a model on this machine, without Kubernetes.",
    "simulate": "Replay jobs through the scheduler, also beside a service, or a row of servers on one feed.",
    "simulate-serving": "Replay requests through the serving engine's scheduler, without a model.",
    "plan-capacity": "Plan which GPUs a service needs for a load.",
}

_EPILOG = "\b\nExit codes:\n" + "\n".join(f"  {code}  {meaning}" for code, meaning in EXIT_CODES.items())


class _Busbar(LazyGroup):
    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with pipe_watched():  # `--help` is printed here
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        with pipe_watched():
            return super().invoke(ctx)


@click.group(
    cls=_Busbar,
    own=OWN,
    others=OTHERS,
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(package_name="busbar")
def busbar() -> None:
    """Train and serve models on every GPU you own.

    \b
    Begin:
      busbar login https://busbar.example
      busbar preview -f job.yaml
      busbar apply -f job.yaml --wait
      busbar logs -f my-job
    """


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; its exit code."""
    try:
        with pipe_watched():
            return _answer(arguments)
    except ClosedPipe:
        drop_closed_streams()
        return CLOSED_PIPE


def _answer(arguments: Sequence[str] | None) -> int:
    """As `run`, with errors told. Raises ClosedPipe or BrokenPipeError where nobody reads what is told."""
    try:
        code = _carry_out(arguments)
        if sys.stdout is not None:  # None: the caller has closed it
            sys.stdout.flush()
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("stopped", err=True)
        return INTERRUPTED
    except Terminated as end:
        click.echo("stopped", err=True)
        return end.code
    except BusbarError as error:
        click.echo(f"Error: {error.message}", err=True)
        return error.exit_code
    except BrokenPipeError:
        raise
    except OSError as error:
        where = "" if error.filename is None else f"{error.filename}: "
        click.echo(f"Error: {where}{error.strerror or error}", err=True)
        return 1
    return code


def _carry_out(arguments: Sequence[str] | None) -> int:
    try:
        code = busbar.main(
            None if arguments is None else list(arguments), prog_name="busbar", standalone_mode=False
        )
    except (ClosedPipe, Terminated):
        raise
    except SystemExit as end:  # of a command with exit codes of its own
        code = end.code
    return code if isinstance(code, int) else 0


def main() -> None:
    """Entry point."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal or file in another encoding than UTF-8 has not every character.
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
    if sys.stdin is None:  # the caller has closed it: there is nothing to read
        sys.stdin = open(os.devnull)  # noqa: SIM115 - for as long as the process lives
    end_on_sigterm()
    code = run()
    end_at_once_when_interrupted()
    sys.exit(code)


if __name__ == "__main__":
    main()
