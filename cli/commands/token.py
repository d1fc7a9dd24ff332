"""`busbar token create | list | rotate | revoke`."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING

import click

from busbar.cli.options import FiniteRange
from busbar.cli.output import columns, emit, output_option, wire
from busbar.cli.session import Session, connected

if TYPE_CHECKING:
    from busbar.cli.results import Token

SCOPES = ("rest", "inference")
PERIODS = ("day", "week", "month")


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


class Budget(click.ParamType[tuple[float, str]]):
    """Money per period, written as COST/PERIOD."""

    name = "budget"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[float, str]:
        cost, _, period = str(value).partition("/")
        try:
            amount = float(cost)
        except ValueError:
            amount = -1.0
        if period not in PERIODS or not 0 <= amount < float("inf"):
            self.fail(
                f"{value!r}: write COST/PERIOD, for example 20/day; periods are {', '.join(PERIODS)}",
                param,
                ctx,
            )
        return amount, period


@click.group(
    epilog="""\b
Examples:
  busbar token create --scopes inference --description "the chat app"
  busbar token list
  busbar token rotate TOKEN_ID
  busbar token revoke TOKEN_ID
"""
)
def token() -> None:
    """Create, list, rotate and revoke API tokens.

    One kind of token serves REST (scope rest) and the OpenAI API (scope inference).
    """


@token.command(
    epilog="""\b
Examples:
  busbar token create --scopes inference
  export OPENAI_API_KEY=$(busbar token create --scopes inference)
  busbar token create --subject ann --role user --tenant research --expires-in-days 30
  busbar token create --scopes inference --tokens-per-minute 50000 --budget 20/day
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
@click.option("--description", default="", metavar="TEXT", help="A description to recognise it by.")
@click.option(
    "--tenant", metavar="NAME", help="Tenant that its inference counts for [default: your only one]."
)
@click.option(
    "--expires-in-days",
    type=FiniteRange(min=0, min_open=True),
    metavar="DAYS",
    help="Default: as the server says (90).",
)
@click.option(
    "--requests-per-minute",
    type=click.IntRange(min=1),
    metavar="N",
    help="Most requests of inference in any 60 seconds.",
)
@click.option(
    "--tokens-per-minute",
    type=click.IntRange(min=1),
    metavar="N",
    help="Most prompt and output tokens of the requests in any 60 seconds.",
)
@click.option(
    "--budget",
    "budgets",
    type=Budget(),
    multiple=True,
    metavar="COST/PERIOD",
    help="Most money per day, week or month, at the services' prices; may be repeated.",
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
    requests_per_minute: int | None,
    tokens_per_minute: int | None,
    budgets: tuple[tuple[float, str], ...],
    subject: str | None,
    role: str,
    output: str,
) -> None:
    """Make a token and print it; it is not shown again.

    Standard output contains only the token. Limits are of inference with this token; those of the Tenant's
    spec.inference apply as well.
    """
    from busbar.cli.results import TokenBudget, TokenLimits  # loads pydantic, which --help does without

    limits = TokenLimits(
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        budgets=[TokenBudget(period=period, cost=cost) for cost, period in budgets] or None,
    )
    made = session.client.create_token(
        scopes=scopes,
        description=description,
        tenant=tenant,
        expires_in_days=expires_in_days,
        subject=subject,
        role=role,
        limits=limits if limits != TokenLimits() else None,
    )
    emit("table" if output == "text" else output, made.to_wire(), lambda: made.token, [])
    if output == "text":
        click.echo(f"Keep it: it is not shown again. Its id is {made.info.id}.", err=True)


@token.command(
    "list",
    epilog="""\b
Examples:
  busbar token list
  busbar token list --state live -o name
  busbar token list --subject ann --limit 20
""",
)
@click.option("--subject", metavar="NAME", help="For admins: only this person's.")
@click.option(
    "--state", type=click.Choice(["live", "ended"]), help="Only live ones, or only revoked and expired ones."
)
@click.option(
    "--limit", type=click.IntRange(min=1), metavar="N", help="At most N, the newest [default: all of them]."
)
@output_option
@connected
def list_tokens(
    session: Session, subject: str | None, state: str | None, limit: int | None, output: str
) -> None:
    """List your tokens (admins: all users' tokens), newest first. Their texts are not stored anywhere."""
    found = list(islice(session.client.tokens(subject=subject, state=state), limit))
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
        "limits",
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
                    _state(t),
                    str(t.limits) if t.limits else None,
                    t.description,
                )
                for t in found
            ],
        )

    emit(output, {"items": wire(found)}, table, [t.id for t in found])


def _state(listed: Token) -> str:
    if listed.revoked_at is not None:
        return "revoked"
    over = listed.expires_at is not None and listed.expires_at <= datetime.now(UTC)
    return "expired" if over else "valid"


@token.command(
    epilog="""\b
Examples:
  busbar token rotate 3f2a9c > new-token.txt
  busbar token rotate 3f2a9c --overlap-hours 0
"""
)
@click.argument("token_id", metavar="ID")
@click.option(
    "--overlap-hours",
    type=FiniteRange(min=0, max=720),
    default=24,
    show_default=True,
    metavar="HOURS",
    help="How long the former token stays valid; 0: not at all.",
)
@connected
def rotate(session: Session, token_id: str, overlap_hours: float) -> None:
    """Make a token like another one, which ends after an overlap, and print the new one; it is not shown again.

    The new one has the same owner, scopes, tenant, description and limits, and lives as long as the other was made for.
    What was spent of its limits is not carried over. Standard output contains only the token.
    """
    made = session.client.rotate_token(token_id, overlap_hours)
    click.echo(made.token)
    ends = made.former.expires_at
    click.echo(
        f"Keep it: it is not shown again. Its id is {made.info.id}. Token {token_id} "
        + (f"ends at {ends:%Y-%m-%d %H:%M} UTC." if overlap_hours and ends else "has ended."),
        err=True,
    )


@token.command(
    epilog="""\b
Examples:
  busbar token revoke 3f2a9c
  busbar token revoke --subject ann
  busbar token revoke --everyone
"""
)
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option("--subject", metavar="NAME", help="All of this person (yourself; for admins anybody).")
@click.option("--everyone", is_flag=True, help="For admins: all of everybody.")
@connected
def revoke(session: Session, ids: tuple[str, ...], subject: str | None, everyone: bool) -> None:
    """End tokens by their ids, or all live ones of a person or of everybody.

    Inference with them stops within a minute. --subject and --everyone end browser sessions too, and leave the
    token in use here.
    """
    if (len(ids) > 0) + (subject is not None) + everyone != 1:
        raise click.UsageError("say which: ids, --subject NAME, or --everyone")
    for each in ids:
        session.client.revoke_token(each)
        click.echo(f"token {each} revoked")
    if not ids:
        count = session.client.revoke_tokens(subject)
        click.echo(f"{count} tokens of {subject or 'everybody'} revoked")
