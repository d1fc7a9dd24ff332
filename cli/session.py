"""The parts that most commands need: a client, the namespace, and the objects that their arguments name.

`connected` gives a command the options `--server` and `--namespace` and a `Session` as its first argument.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

import click

from busbar.cli import config
from busbar.cli.errors import BusbarError, NotFound, UsageProblem

if TYPE_CHECKING:
    from busbar.cli.batches import BatchClient
    from busbar.cli.client import Client
    from busbar.cli.results import Kind, Object

P = ParamSpec("P")
R = TypeVar("R")


class Session:
    """One run of one command."""

    def __init__(self, server: str | None, namespace: str | None, timeout_s: float | None = None) -> None:
        self._given_server = server
        self._given_namespace = namespace
        self._timeout_s = timeout_s
        self._config = config.load()
        self._client: Client | None = None

    @property
    def client(self) -> Client:
        """The connection, opened at first use. Raises NotAuthorised without a login."""
        if self._client is None:
            from busbar.cli.client import Client

            known = self._known()
            server, token = known.required()
            self._client = Client(server, token, ca_file=known.ca_file, timeout_s=self._timeout_s)
        return self._client

    def gateway(self, url: str | None) -> BatchClient:
        """A connection to the OpenAI API at `url`, or where the server says that it is."""
        from busbar.cli.batches import BatchClient

        known = self._known()
        return BatchClient(url or self.client.gateway(), known.required()[1], ca_file=known.ca_file)

    def _known(self) -> config.Config:
        known = self._config
        if self._given_server and self._given_server.rstrip("/") != (known.server or "").rstrip("/"):
            # A stored token belongs to the stored server and is not shown to another.
            import os
            from dataclasses import replace

            return replace(known, server=self._given_server, token=os.environ.get("BUSBAR_TOKEN"))
        return known

    @property
    def given_namespace(self) -> str | None:
        """The namespace of the option, without any default."""
        return self._given_namespace

    def namespace(self) -> str:
        """The namespace of the option, of the configuration, or the caller's only one. Raises UsageProblem."""
        chosen = self._given_namespace or self._config.namespace
        if chosen:
            return chosen
        mine = self.client.me().namespaces
        if len(mine) == 1:
            return mine[0]
        told = f"yours are {', '.join(mine)}" if mine else "you are a member of none"
        raise UsageProblem(f"Which namespace? Say --namespace NAME or set BUSBAR_NAMESPACE; {told}.")

    def find(self, reference: str, only: Kind | None = None) -> Object:
        """The object that `name` or `kind/name` refers to. Raises NotFound, or UsageProblem when it is ambiguous."""
        from busbar.cli.results import KINDS

        kind, name = parse_reference(reference)
        if kind is not None and only is not None and kind is not only:
            raise UsageProblem(f"{reference}: this command is for {only.name} objects")
        namespace = self.namespace()
        kinds = [kind or only] if kind or only else list(KINDS)
        found = []
        for each in kinds:
            assert each is not None
            try:
                found.append(self.client.get(each, namespace, name))
            except NotFound:
                continue
        if not found:
            what = f"{kinds[0].name} {name!r}" if len(kinds) == 1 and kinds[0] else f"job or service {name!r}"
            raise NotFound(
                f"There is no {what} in the namespace {namespace!r}. `busbar list` shows what there is."
            )
        if len(found) > 1:
            raise UsageProblem(f"{name!r} is a job and a service; say job/{name} or service/{name}.")
        return found[0]

    def close(self) -> None:
        if self._client is not None:
            self._client.close()


def parse_reference(reference: str) -> tuple[Kind | None, str]:
    """(`kind`, name) of `kind/name`; kind None of a bare name. Raises UsageProblem for an unknown kind."""
    from busbar.cli.results import KINDS

    word, slash, name = reference.rpartition("/")
    if not slash:
        return None, reference
    for kind in KINDS:
        if word.lower().removesuffix(".busbar.dev") in kind.aliases:
            return kind, name
    raise UsageProblem(f"{reference}: {word!r} is not a kind; write job/{name} or service/{name}")


def _told(error: ValueError) -> BusbarError | None:
    """A part of an object that is read where it is shown, and is not of its type: what the server answered is at fault."""
    from pydantic import ValidationError

    from busbar.cli.answers import unexpected_field

    return unexpected_field(error) if isinstance(error, ValidationError) else None


def connected(command: Callable[Concatenate[Session, P], R]) -> Callable[P, R]:
    """Give a command `--server`, `--namespace` and a Session."""

    @click.option("--server", metavar="URL", help="A server other than that of `busbar login`.")
    @click.option(
        "-n",
        "--namespace",
        metavar="NAME",
        help="Namespace [default: BUSBAR_NAMESPACE, login's, your only one].",
    )
    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        server, namespace = kwargs.pop("server"), kwargs.pop("namespace")
        session = Session(
            server if isinstance(server, str) else None, namespace if isinstance(namespace, str) else None
        )
        try:
            return command(session, *args, **kwargs)
        except ValueError as error:
            if (told := _told(error)) is None:
                raise
            raise told from error
        finally:
            session.close()

    return wrapped
