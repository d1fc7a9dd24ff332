"""`busbar login`."""

from __future__ import annotations

import os
import sys

import click

from busbar.cli import config


@click.command(
    epilog="""\b
Examples:
  busbar login https://busbar.example             asks for the token
  busbar login http://127.0.0.1:30080 < token.txt
  busbar login https://busbar.example --ca-file ca.pem --namespace team-a
"""
)
@click.argument("server", metavar="URL")
@click.option("-n", "--namespace", metavar="NAME", help="Namespace that commands use from now on.")
@click.option(
    "--ca-file",
    type=click.Path(exists=True, dir_okay=False, resolve_path=True),
    help="Certificates to trust.",
)
def login(server: str, namespace: str | None, ca_file: str | None) -> None:
    """Check a token at a server and store both for later commands.

    The token comes from a prompt, from standard input, or from BUSBAR_TOKEN; never from the command line, where
    other users could read it. It is stored in ${XDG_CONFIG_HOME:-~/.config}/busbar/config.yaml, readable by you
    only.
    """
    from urllib.parse import urlsplit

    from busbar.cli.client import Client
    from busbar.cli.errors import NotAuthorised, NotFound

    token = _token()
    if not token:
        raise NotAuthorised(
            "No token was given. Get one in the portal under Tokens, or from your administrator."
        )
    with Client(server, token, ca_file=ca_file) as client:
        me = client.me()
    if namespace and not me.admin and namespace not in me.namespaces:
        raise NotFound(f"{namespace!r} is not one of your namespaces: {', '.join(me.namespaces) or 'none'}.")
    parts = urlsplit(server)
    if parts.scheme == "http" and parts.hostname not in ("localhost", "127.0.0.1", "::1"):
        click.echo("Warning: plain HTTP; others on the way can read the token.", err=True)
    file = config.save(
        config.Config(server=server.rstrip("/"), token=token, namespace=namespace, ca_file=ca_file)
    )
    where = f", namespaces {', '.join(me.namespaces)}" if me.namespaces else ""
    click.echo(f"Logged in at {server} as {me.subject}{' (admin)' if me.admin else ''}{where}.")
    click.echo(f"Stored in {file}.", err=True)


def _token() -> str:
    given = os.environ.get("BUSBAR_TOKEN")
    if given:
        return given.strip()
    if sys.stdin.isatty():
        return str(click.prompt("Token", hide_input=True, err=True)).strip()
    return sys.stdin.readline().strip()
