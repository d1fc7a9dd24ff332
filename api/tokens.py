"""Tokens: `bb_` and 32 random bytes, shown once. The database holds the prefix and the SHA-256 only.

A fast hash is right here: the secret has 256 bits, so guessing is hopeless and every request may be checked.
One table serves REST and inference; the scopes say which.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import RowMapping, and_, or_, select, update

from busbar.api.clock import Clock, utc_now
from busbar.api.database import tables
from busbar.api.database.engine import Database
from busbar.api.database.types import storable
from busbar.api.errors import NotFound
from busbar.api.identity import Caller, Role, Scope, Source, check_subject
from busbar.kube.contracts.keys import digest_of, new_token, shown_prefix_of

LAST_USED_EVERY = timedelta(minutes=1)


@dataclass(frozen=True)
class Token:
    """What is known of a token afterwards."""

    id: str
    subject: str
    description: str
    prefix: str
    role: Role
    scopes: frozenset[Scope]
    tenant: str | None
    hidden: bool
    created_at: datetime
    created_by: str
    expires_at: datetime | None
    last_used_at: datetime | None
    revoked_at: datetime | None
    groups: tuple[str, ...] = ()
    """The owner's groups, as of their last login by OpenID Connect."""


class Tokens:
    """The token table."""

    def __init__(self, database: Database, clock: Clock = utc_now) -> None:
        self._db = database
        self._now = clock

    async def create(
        self,
        subject: str,
        *,
        created_by: str,
        role: Role = Role.USER,
        scopes: Sequence[Scope] = (Scope.REST, Scope.INFERENCE),
        tenant: str | None = None,
        description: str = "",
        lifetime: timedelta | None = None,
        hidden: bool = False,
    ) -> tuple[str, Token]:
        """A new token and its record; the text is not kept anywhere.

        Args:
            hidden: left out of lists (the short-lived keys behind the portal's try-it box).

        Raises:
            Invalid: the subject's name is reserved or malformed.
        """
        check_subject(subject)
        now = self._now()
        text = new_token()
        values: dict[str, Any] = {
            "id": secrets.token_hex(8),
            "subject": subject,
            "description": storable(description, 200),
            "prefix": shown_prefix_of(text),
            "sha256": digest_of(text),
            "role": role.value,
            "scopes": sorted(scope.value for scope in set(scopes)),
            "tenant": storable(tenant, 253) if tenant is not None else None,
            "hidden": hidden,
            "created_at": now,
            "created_by": created_by,
            "expires_at": now + lifetime if lifetime is not None else None,
        }
        async with self._db.write() as tx:
            await remember_subject(self._db, tx, subject, Source.TOKEN, None, now)
            await tx.execute(tables.tokens.insert().values(**values))
        return text, _token({**values, "last_used_at": None, "revoked_at": None, "groups": []})

    async def find(self, sha256: str) -> Token | None:
        """The live token with this hash; None when unknown, expired or revoked."""
        query = (
            select(tables.tokens, tables.subjects.c.groups)
            .join(tables.subjects, tables.subjects.c.name == tables.tokens.c.subject)
            .where(tables.tokens.c.sha256 == sha256, self._alive())
        )
        async with self._db.read() as db:
            row = (await db.execute(query)).mappings().first()
        return _token(row) if row else None

    async def used(self, token: Token) -> None:
        """Note the use, at most once a minute: a look-up must not cost a write."""
        now = self._now()
        if token.last_used_at is not None and now - token.last_used_at < LAST_USED_EVERY:
            return
        async with self._db.write() as tx:
            await tx.execute(
                update(tables.tokens).where(tables.tokens.c.id == token.id).values(last_used_at=now)
            )

    async def listing(self, subject: str | None) -> list[Token]:
        """Tokens of one person, or of all; newest first, without hidden ones."""
        query = (
            select(tables.tokens, tables.subjects.c.groups)
            .join(tables.subjects, tables.subjects.c.name == tables.tokens.c.subject)
            .where(tables.tokens.c.hidden.is_(False))
            .order_by(tables.tokens.c.created_at.desc())
            .limit(500)
        )
        if subject is not None:
            query = query.where(tables.tokens.c.subject == subject)
        async with self._db.read() as db:
            rows = (await db.execute(query)).mappings().all()
        return [_token(row) for row in rows]

    async def revoke(self, token_id: str, *, owner: str | None) -> Token:
        """End a token and the sessions that began with it. `owner` None: anybody's (admins).

        Raises:
            NotFound: no such token, or it is somebody else's.
        """
        where = [tables.tokens.c.id == token_id]
        if owner is not None:
            where.append(tables.tokens.c.subject == owner)
        query = select(tables.tokens).where(*where)
        async with self._db.write() as tx:
            row = (await tx.execute(query)).mappings().first()
            if row is None:
                raise NotFound(f"token {token_id} does not exist")
            if row["revoked_at"] is None:
                await tx.execute(
                    update(tables.tokens).where(tables.tokens.c.id == token_id).values(revoked_at=self._now())
                )
            await tx.execute(tables.sessions.delete().where(tables.sessions.c.token_id == token_id))
        return _token({**row, "groups": []})

    async def prune_hidden(self) -> None:
        """Forget hidden keys that have expired."""
        gone = [tables.tokens.c.hidden.is_(True), tables.tokens.c.expires_at <= self._now()]
        async with self._db.write() as tx:
            await tx.execute(tables.tokens.delete().where(*gone))

    def _alive(self) -> Any:
        now = self._now()
        return and_(
            tables.tokens.c.revoked_at.is_(None),
            or_(tables.tokens.c.expires_at.is_(None), tables.tokens.c.expires_at > now),
        )


async def remember_subject(
    db: Database, tx: Any, name: str, source: Source, groups: Sequence[str] | None, now: datetime
) -> None:
    """Keep the subject's row current; `groups` None leaves the recorded groups alone."""
    statement = db.upsert(tables.subjects).values(
        name=name, groups=list(groups or ()), source=source.value, first_seen=now, last_seen=now
    )
    changes: dict[str, Any] = {"last_seen": now}
    if groups is not None:
        changes |= {"groups": list(groups), "source": source.value}
    await tx.execute(statement.on_conflict_do_update(index_elements=["name"], set_=changes))


def caller_of(token: Token) -> Caller:
    """The caller that a token stands for."""
    return Caller(
        subject=token.subject,
        groups=token.groups,
        role=token.role,
        scopes=token.scopes,
        source=Source.TOKEN,
        token_id=token.id,
        tenant=token.tenant,
    )


def _token(row: RowMapping | dict[str, Any]) -> Token:
    return Token(
        id=row["id"],
        subject=row["subject"],
        description=row["description"],
        prefix=row["prefix"],
        role=Role(row["role"]),
        scopes=frozenset(Scope(s) for s in row["scopes"]),
        tenant=row["tenant"],
        hidden=row["hidden"],
        created_at=row["created_at"],
        created_by=row["created_by"],
        expires_at=row["expires_at"],
        last_used_at=row["last_used_at"],
        revoked_at=row["revoked_at"],
        groups=tuple(row["groups"]),
    )
