"""`busbar token create | list | revoke`."""

from __future__ import annotations

import click

from busbar.cli.output import columns, emit, output_option, wire
from busbar.cli.session import Session, connected

SCOPES = ("rest", "inference")


class Scopes(click.ParamType[tuple[str, ...]]):
    """A comma-separated list of scopes."""

    name = "scopes"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        scopes = tuple(part.strip() for part in str(value).split(",") if part.strip())
        wrong = [scope for scope in scopes if scope not in SCOPES]
        if wrong or not scopes:
            self.fail(f"{value!r}: choose of {', '.join(SCOPES)}", param, ctx)
        return scopes


@click.group(
    epilog="""\b
Examples:
  busbar token create --scopes inference --description "the chat app"
  busbar token list
  busbar token revoke TOKEN_ID
"""
)
def token() -> None:
    """Create, list and revoke API tokens.

    One kind of token serves REST (scope rest) and the OpenAI API (scope inference).
    """


@token.command(
    epilog="""\b
Examples:
  busbar token create --scopes inference
  export OPENAI_API_KEY=$(busbar token create --scopes inference)
  busbar token create --subject ann --role user --tenant research --expires-in-days 30
"""
)
@click.option(
    "--scopes",
    type=Scopes(),
    default=",".join(SCOPES),
    show_default=True,
    metavar="LIST",
    help="What it may be used for.",
)
@click.option("--description", default="", metavar="TEXT", help="What it is for, to recognise it later.")
@click.option(
    "--tenant", metavar="NAME", help="Tenant that its inference counts for [default: your only one]."
)
@click.option(
    "--expires-in-days", type=click.FloatRange(min=0, min_open=True), metavar="DAYS", help="Default: never."
)
@click.option("--subject", metavar="NAME", help="For admins: whose token it is.")
@click.option(
    "--role",
    type=click.Choice(["user", "admin"]),
    default="user",
    show_default=True,
    help="For admins: what it may do.",
)
@click.option(
    "-o",
    "--output",
    type=click.Choice(["text", "json", "yaml"]),
    default="text",
    show_default=True,
    help="Form of the output.",
)
@connected
def create(
    session: Session,
    scopes: tuple[str, ...],
    description: str,
    tenant: str | None,
    expires_in_days: float | None,
    subject: str | None,
    role: str,
    output: str,
) -> None:
    """Make a token and print it, this once.

    Standard output is the token and nothing else.
    """
    made = session.client.create_token(
        scopes=scopes,
        description=description,
        tenant=tenant,
        expires_in_days=expires_in_days,
        subject=subject,
        role=role,
    )
    emit("table" if output == "text" else output, made.to_wire(), lambda: made.token, [])
    if output == "text":
        click.echo(f"Keep it: it is not shown again. Its id is {made.info.id}.", err=True)


@token.command(
    "list",
    epilog="""\b
Examples:
  busbar token list
  busbar token list -o name
""",
)
@output_option
@connected
def list_tokens(session: Session, output: str) -> None:
    """List your tokens (admins: everybody's). Their texts are not stored anywhere."""
    found = session.client.tokens()
    heads = [
        "id",
        "prefix",
        "subject",
        "role",
        "scopes",
        "tenant",
        "expires",
        "last used",
        "state",
        "description",
    ]

    def table() -> str:
        return columns(
            heads,
            [
                (
                    t.id,
                    t.prefix,
                    t.subject,
                    t.role,
                    ",".join(t.scopes),
                    t.tenant,
                    t.expires_at.date() if t.expires_at else "never",
                    t.last_used_at.strftime("%Y-%m-%d %H:%M") if t.last_used_at else "never",
                    "revoked" if t.revoked_at else "valid",
                    t.description,
                )
                for t in found
            ],
        )

    emit(output, {"items": wire(found)}, table, [t.id for t in found])


@token.command(
    epilog="""\b
Examples:
  busbar token revoke 3f2a9c
"""
)
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
@connected
def revoke(session: Session, ids: tuple[str, ...]) -> None:
    """End tokens by their ids. Inference with one stops within a minute."""
    for each in ids:
        session.client.revoke_token(each)
        click.echo(f"token {each} revoked")
