"""`busbar-api`: the entry point of the API process.

    busbar-api [serve]                 REST, portal and internal port, until SIGTERM
    busbar-api migrate [--to REV]      move the database to a revision ("head" by default, "base" empties it)
    busbar-api token create --subject NAME [--role admin|user] [--scopes rest,inference] [--tenant T]
                                       the first login: prints the token, once, on standard output

`serve` migrates first, in a child process: what Alembic needs in memory is gone again before serving. On a full disk it
says so every `AGAIN_S` seconds, and begins when there is room.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import shutil
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

from busbar.api.errors import ApiError
from busbar.api.settings import Settings, load
from busbar.kube import logs
from busbar.kube.errors import SettingsError

MAX_DAYS = 36_500
NO_ROOM = 75
"""Exit code of a migration on a full disk (EX_TEMPFAIL of sysexits.h)."""
AGAIN_S = 10.0
LEAST_BYTES = 1 << 20
"""SQLite needs some tenths of it beside its file to open a database."""
log = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns the exit code: 0 done, 1 failed, 2 wrong usage."""
    arguments = _parser().parse_args(argv)
    try:
        settings = load(os.environ, needs_secret=arguments.command in (None, "serve"))
        logs.set_up(settings.log_format, settings.log_level)
        logging.getLogger("alembic").setLevel(logging.WARNING)
        if arguments.command == "migrate":
            return _migrate(settings, arguments.to)
        if arguments.command == "token":
            return asyncio.run(_create_token(settings, arguments))
        return _serve(settings)
    except (SettingsError, ApiError, ValueError) as error:
        print(f"busbar-api: {error}", file=sys.stderr)
        return 2 if isinstance(error, SettingsError) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="busbar-api", description="REST, portal and login of Busbar.")
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("serve", help="serve until SIGTERM (the default)")
    migrate = commands.add_parser("migrate", help="bring the database to the newest schema")
    migrate.add_argument("--to", default="head", help='a revision, "head" or "base"')
    token = commands.add_parser("token", help="make tokens without a running API")
    create = token.add_subparsers(dest="action", required=True).add_parser("create", help="make a token")
    create.add_argument("--subject", required=True, help="whose; the name that Tenant.spec.members uses")
    create.add_argument("--role", choices=("admin", "user"), default="user")
    create.add_argument("--scopes", default="rest,inference", help="comma-separated: rest, inference")
    create.add_argument(
        "--tenant", help="tenant that inference counts for; default: the only one of the subject"
    )
    create.add_argument("--description", default="made at the command line")
    create.add_argument("--expires-in-days", type=_days, help="default: the setting TOKEN_DAYS")
    return parser


def _days(text: str) -> float:
    days = float(text)
    if not 0 < days <= MAX_DAYS:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and {MAX_DAYS} days")
    return days


def _migrate(settings: Settings, revision: str) -> int:
    from sqlalchemy.exc import SQLAlchemyError

    from busbar.api.database.engine import disk_is_full
    from busbar.api.database.migrate import file_of, migrate

    try:
        asyncio.run(migrate(settings.database_url, revision))
    except (SQLAlchemyError, OSError) as error:
        file = file_of(settings.database_url)
        if file is None or not (disk_is_full(error) or _is_full(file)):
            raise
        print(f"busbar-api: the disk of {file} is full; make room there", file=sys.stderr)
        return NO_ROOM
    return 0


def _is_full(file: Path) -> bool:
    """SQLite that cannot make its files beside the database calls it an I/O error."""
    return shutil.disk_usage(file.parent).free < LEAST_BYTES


async def _create_token(settings: Settings, arguments: argparse.Namespace) -> int:
    from busbar.api.access.audit import Audit
    from busbar.api.access.identity import CallerRole, Scope
    from busbar.api.access.token_rules import TokenRules
    from busbar.api.access.tokens import Tokens
    from busbar.api.database.engine import Database

    scopes = [Scope(name.strip()) for name in arguments.scopes.split(",") if name.strip()]
    days = arguments.expires_in_days
    database = Database(settings.database_url)
    try:
        async with Audit(database).write(
            "command-line", "create", "Token", name=arguments.subject, source="command-line"
        ):
            text, token = await Tokens(database).create(
                arguments.subject,
                created_by="command-line",
                role=CallerRole(arguments.role),
                scopes=scopes,
                tenant=arguments.tenant,
                description=arguments.description,
                lifetime=TokenRules.of(settings).lifetime(timedelta(days=days) if days is not None else None),
            )
    finally:
        await database.close()
    print(f"token {token.id} of {token.subject} ({token.role}); it is shown this once:", file=sys.stderr)
    print(text)
    return 0


def _serve(settings: Settings) -> int:
    command = [sys.executable, "-m", "busbar.api.main", "migrate"]
    while (done := subprocess.run(command, check=False)).returncode == NO_ROOM:
        log.error(
            "the database's disk is full: nothing is served before there is room; looking again in %.0f s",
            AGAIN_S,
        )
        time.sleep(AGAIN_S)
    done.check_returncode()
    from busbar.api.serve import serve

    asyncio.run(serve(settings))
    return 0


if __name__ == "__main__":
    sys.exit(main())
