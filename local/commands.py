"""``busbar up``, ``busbar down`` and ``busbar status``."""

from __future__ import annotations

import json
import sys
from typing import NoReturn

import click
from click.core import ParameterSource

NAME = click.option("--name", default="busbar", show_default=True, help="Which instance; each is a cluster.")
UNREAD = {
    "--current": ("--name", "--build-only", "--no-sim", "--nodes", "--internet"),
    "--build-only": ("--no-sim", "--nodes"),
    "--no-sim": ("--nodes",),
}
"""Options of `up` that nothing reads beside the first one."""


@click.command()
@NAME
@click.option("--build-only", is_flag=True, help="Compile programs and build images; start nothing.")
@click.option("--no-sim", is_flag=True, help="No simulated nodes, tenants and jobs.")
@click.option("--nodes", multiple=True, metavar="TYPE=N", help="Number of simulated nodes, e.g. H100=2.")
@click.option("--internet", is_flag=True, help="Let pods and image pulls out to the internet.")
@click.option("--current", is_flag=True, help="Use the cluster that KUBECONFIG names instead.")
@click.option("--registry", help="With --current: where that cluster pulls images from.")
def up(
    name: str,
    build_only: bool,
    no_sim: bool,
    nodes: tuple[str, ...],
    internet: bool,
    current: bool,
    registry: str | None,
) -> None:
    """Start (or update) the platform on this machine: a real Kubernetes with Busbar on it.

    The first time compiles Kubernetes and builds two images (about 15 to 20 minutes on two cores); later
    starts take less than 90 seconds, and a change in Busbar's source is rolled out by running it again.

    \b
    Examples:
      busbar up
      busbar up --name second --no-sim
      busbar up --nodes H100=2 --nodes V100=0
      busbar up --internet
      busbar up --build-only
      busbar up --current --registry registry.example/team
    """
    from busbar.local import status as status_of
    from busbar.local import up as bringing_up
    from busbar.local.errors import LocalError
    from busbar.local.progress import say

    check_options(click.get_current_context())
    counts = parse_counts(nodes)
    try:
        if registry is not None:
            bringing_up.install_on_current(registry, say)
            return
        wishes = bringing_up.Wishes(
            name, build_only=build_only, simulate=not no_sim, internet=internet, nodes=counts
        )
        instance = bringing_up.up(wishes)
    except LocalError as error:
        fail("up", error)
    if instance is not None:
        say("")
        say(f"portal      {status_of.portal_url(instance)}")
        say(f"models      {status_of.gateway_url(instance)}/v1")
        say(f"kubernetes  export KUBECONFIG={instance.kubeconfig}")


@click.command()
@NAME
@click.option(
    "--purge", is_flag=True, help="Also delete the instance's data: objects, volumes, images' layers."
)
def down(name: str, purge: bool) -> None:
    """Stop the cluster and remove everything it made on this machine; people's data stays.

    Works also when the cluster crashed.

    \b
    Examples:
      busbar down
      busbar down --name second --purge
    """
    from busbar.local import teardown
    from busbar.local.errors import LocalError

    try:
        teardown.down(name, purge=purge)
    except LocalError as error:
        fail("down", error)


@click.command()
@NAME
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text", help="Format.")
def status(name: str, output: str) -> None:
    """What runs, what it uses, its addresses and its logs.

    Exits with 3 when the instance is not running.

    \b
    Examples:
      busbar status
      busbar status -o json
      export KUBECONFIG=$(busbar status -o json | python3 -c 'import json,sys; print(json.load(sys.stdin)["kubeconfig"])')
    """
    from busbar.local.errors import LocalError
    from busbar.local.instance import load, names
    from busbar.local.status import collect, render

    try:
        instance = load(name)
    except LocalError as error:
        fail("status", error)
    if instance is None:
        others = f" (there are: {', '.join(names())})" if names() else ""
        click.echo(f"no instance called {name!r} was started here{others}; `busbar up` starts one", err=True)
        sys.exit(3)
    facts = collect(instance)
    click.echo(json.dumps(facts, indent=2) if output == "json" else render(facts))
    if not facts["running"]:
        sys.exit(3)


def check_options(context: click.Context) -> None:
    """Refuse options of `up` that would be without effect.

    Raises:
        click.UsageError: two options contradict each other, or one needs another.
    """
    sources = {p.opts[0]: context.get_parameter_source(str(p.name)) for p in context.command.params}
    given = {option for option, source in sources.items() if source is ParameterSource.COMMANDLINE}
    for first, others in UNREAD.items():
        for other in others:
            if {first, other} <= given:
                raise click.UsageError(f"{other} has no effect with {first}: leave one of the two out")
    if "--current" in given and not context.params["registry"]:
        raise click.UsageError("--current needs --registry: where your cluster pulls images from")
    if "--registry" in given and "--current" not in given:
        raise click.UsageError(
            "--registry needs --current: the cluster of this machine has a registry of its own"
        )


def parse_counts(nodes: tuple[str, ...]) -> dict[str, int]:
    """``("H100=2",)`` as {"H100": 2}.

    Raises:
        click.UsageError: not of that form, an unknown type, or one that is named twice.
    """
    from busbar.local.simulated import MODELS

    known = {model.accelerator for model in MODELS}
    counts: dict[str, int] = {}
    for text in nodes:
        accelerator, _, number = text.partition("=")
        if accelerator not in known or not number.isdecimal() or int(number) > 64:
            kinds = ", ".join(sorted(known))
            raise click.UsageError(f"--nodes {text}: write TYPE=N with TYPE one of {kinds} and N up to 64")
        if accelerator in counts:
            raise click.UsageError(
                f"--nodes {text}: write each TYPE=N once, and {accelerator} is there twice"
            )
        counts[accelerator] = int(number)
    return counts


def fail(command: str, error: Exception) -> NoReturn:
    """Print the error and exit with 1."""
    click.echo(f"busbar {command}: {error}", err=True)
    sys.exit(1)
