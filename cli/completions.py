"""Names of jobs and services for shell completion.

The server is asked with a short time limit, and a failure gives no names: completion must never print an error into
a command line.
"""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem

PATIENCE_S = 2.0


def objects(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """References that begin with the typed text."""
    from busbar.cli.errors import BusbarError
    from busbar.cli.session import Session

    try:
        session = Session(ctx.params.get("server"), ctx.params.get("namespace"), PATIENCE_S)
        try:
            return _items(session, incomplete)
        finally:
            session.close()
    except BusbarError:
        return []


def _items(session: object, incomplete: str) -> list[CompletionItem]:
    from busbar.cli.results import KINDS
    from busbar.cli.session import Session

    assert isinstance(session, Session)
    namespace = session.namespace()
    with_kind = "/" in incomplete
    found = [each for kind in KINDS for each in session.client.listing(kind, namespace)]
    names = [(each.reference if with_kind else each.name, each.phase) for each in found]
    return [CompletionItem(name, help=phase) for name, phase in names if name.startswith(incomplete)]
