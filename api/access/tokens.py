"""Tokens: `bb_` and 32 random bytes, shown once. The database holds the prefix and the SHA-256 only.

A fast hash is enough: the secret has 256 random bits, so it cannot be guessed, and every request must be
checked. One table serves REST and inference; the scopes tell them apart. Nothing is signed, so a token is rotated by
another one like it: both are valid until the former ends (`rotate`).
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from sqlalchemy import ColumnElement, RowMapping, and_, func, not_, or_, select, update
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from busbar.api.access.identity import Caller, CallerRole, Scope, Source, check_subject
from busbar.api.clock import Clock, utc_now
from busbar.api.database import tables
from busbar.api.database.engine import Database
from busbar.api.database.types import storable
from busbar.api.errors import Conflict, Invalid, NotFound
from busbar.kube.contracts.keys import digest_of, new_token, shown_prefix_of
from busbar.kube.types.inference import InferenceLimits

LAST_USED_EVERY = timedelta(minutes=1)


class TokenState(StrEnum):
    """Whether a token can still be used."""

    LIVE = "live"
    ENDED = "ended"
    """Revoked or expired."""


@dataclass(frozen=True)
class Token:
    """A token's record, without its text."""

    id: str
    subject: str
    description: str
    prefix: str
    role: CallerRole
    scopes: frozenset[Scope]
    tenant: str | None
    hidden: bool
    created_at: datetime
    created_by: str
    expires_at: datetime | None
    last_used_at: datetime | None
    revoked_at: datetime | None
    limits: InferenceLimits | None = None
    """Of inference with this token; its tenant's apply as well."""
    groups: tuple[str, ...] = ()
    """The owner's groups, as of their last login by OpenID Connect."""


class Tokens:
    """Writes and reads the token table."""

    def __init__(self, database: Database, clock: Clock = utc_now) -> None:
        self._db = database
        self._now = clock

    async def create(
        self,
        subject: str,
        *,
        created_by: str,
        role: CallerRole = CallerRole.USER,
        scopes: Sequence[Scope] = (Scope.REST, Scope.INFERENCE),
        tenant: str | None = None,
        description: str = "",
        lifetime: timedelta | None = None,
        hidden: bool = False,
        limits: InferenceLimits | None = None,
        limit: int | None = None,
    ) -> tuple[str, Token]:
        """A new token and its record; the text is not kept anywhere.

        Args:
            lifetime: None: it lives until it is revoked.
            hidden: left out of lists (the short-lived keys behind the portal's try-it box).
            limits: of inference with it.
            limit: live tokens that the subject may then have; None: any number.

        Raises:
            Invalid: the subject's name is reserved or malformed.
            Conflict: the subject has as many live tokens as `limit`.
        """
        check_subject(subject)
        values: dict[str, Any] = {
            "subject": subject,
            "description": storable(description, 200),
            "role": role.value,
            "scopes": sorted(scope.value for scope in set(scopes)),
            "tenant": storable(tenant, 253) if tenant is not None else None,
            "hidden": hidden,
            "limits": limits.model_dump_json(by_alias=True, exclude_none=True) if limits else None,
            "created_by": created_by,
        }
        async with self._db.write() as tx:
            return await self._insert(tx, values, lifetime, limit)

    async def rotate(
        self, former: Token, *, created_by: str, overlap: timedelta, lifetime: timedelta, limit: int
    ) -> tuple[str, Token, Token]:
        """A new token with the owner, role, scopes, tenant, description and limits of another, which ends after
        `overlap`, or at its own end if that is sooner; with the browser sessions that began with it.

        Args:
            lifetime: of the new one.
            limit: live tokens that the owner may then have, the former one included while it lives.

        Returns:
            The new token's text and record, and the former one's record.

        Raises:
            Conflict: the former token has ended, or the owner has as many live tokens as `limit`.
        """
        table, now = tables.tokens, self._now()
        ends = min(former.expires_at or now + overlap, now + overlap)
        kept = ("subject", "description", "role", "scopes", "tenant", "hidden", "limits")
        async with self._db.write() as tx:
            query = update(table).where(table.c.id == former.id, self._alive()).values(expires_at=ends)
            if (await tx.execute(query)).rowcount == 0:
                raise Conflict(f"token {former.id} has ended; make a new one")
            row = (await tx.execute(select(table).where(table.c.id == former.id))).mappings().one()
            values = {**{name: row[name] for name in kept}, "created_by": created_by}
            text, made = await self._insert(tx, values, lifetime, limit)
        return text, made, replace(former, expires_at=ends)

    async def _insert(
        self, tx: AsyncConnection, values: dict[str, Any], lifetime: timedelta | None, limit: int | None
    ) -> tuple[str, Token]:
        """Adds a token with a new text, unless the owner has `limit` live ones."""
        text, now = new_token(), self._now()
        # This locks the subject's row, so two requests at once count one after the other.
        await remember_subject(self._db, tx, values["subject"], Source.TOKEN, None, now)
        if limit is not None:
            await self._check_room(tx, values["subject"], limit)
        values = {
            **values,
            "id": secrets.token_hex(8),
            "prefix": shown_prefix_of(text),
            "sha256": digest_of(text),
            "created_at": now,
            "expires_at": now + lifetime if lifetime is not None else None,
        }
        await tx.execute(tables.tokens.insert().values(**values))
        return text, _token({**values, "last_used_at": None, "revoked_at": None, "groups": []})

    async def get(self, token_id: str, *, owner: str | None) -> Token:
        """A token that lists show. `owner` None: anybody's (admins).

        Raises:
            NotFound: no such token, or it is somebody else's.
        """
        where = [tables.tokens.c.id == storable(token_id, 32), tables.tokens.c.hidden.is_(False)]
        if owner is not None:
            where.append(tables.tokens.c.subject == owner)
        async with self._db.read() as db:
            row = (await db.execute(select(tables.tokens).where(*where))).mappings().first()
        if row is None:
            raise NotFound(f"token {token_id} does not exist")
        return _token({**row, "groups": []})

    async def find(self, sha256: str) -> Token | None:
        """The valid token with this hash; None when it is unknown, expired or revoked."""
        return await self._by_hash(sha256, self._alive())

    async def ended(self, sha256: str) -> Token | None:
        """The expired or revoked token with this hash; None when it is unknown or valid."""
        return await self._by_hash(sha256, not_(self._alive()))

    async def _by_hash(self, sha256: str, state: ColumnElement[bool]) -> Token | None:
        query = (
            select(tables.tokens, tables.subjects.c.groups)
            .join(tables.subjects, tables.subjects.c.name == tables.tokens.c.subject)
            .where(tables.tokens.c.sha256 == sha256, state)
        )
        async with self._db.read() as db:
            row = (await db.execute(query)).mappings().first()
        return _token(row) if row else None

    async def used(self, token: Token) -> None:
        """Record the time of use, at most once a minute, so that a look-up does not cost a write.

        It is left out where the database takes no writes (its disk is full): who may read goes on reading.
        """
        now = self._now()
        if token.last_used_at is not None and now - token.last_used_at < LAST_USED_EVERY:
            return
        with suppress(SQLAlchemyError):
            async with self._db.write() as tx:
                await tx.execute(
                    update(tables.tokens).where(tables.tokens.c.id == token.id).values(last_used_at=now)
                )

    async def page(
        self,
        *,
        subject: str | None = None,
        state: TokenState | None = None,
        before: str | None = None,
        limit: int = 500,
    ) -> list[Token]:
        """Tokens of one person, or of all; newest first, without hidden ones.

        Args:
            before: a token's id; the page begins with the next older one.

        Raises:
            Invalid: there is no token `before` among those of `subject`.
        """
        table = tables.tokens
        mine: list[ColumnElement[bool]] = [table.c.hidden.is_(False)]
        if subject is not None:
            mine.append(table.c.subject == storable(subject, 253))
        query = (
            select(table, tables.subjects.c.groups)
            .join(tables.subjects, tables.subjects.c.name == table.c.subject)
            .where(*mine)
            .order_by(table.c.created_at.desc(), table.c.id.desc())
            .limit(limit)
        )
        if state is not None:
            query = query.where(self._alive() if state is TokenState.LIVE else not_(self._alive()))
        async with self._db.read() as db:
            if before is not None:
                at = (
                    await db.execute(
                        select(table.c.created_at, table.c.id).where(
                            *mine, table.c.id == storable(before, 32)
                        )
                    )
                ).first()
                if at is None:
                    raise Invalid(f"there is no token {before} to go on from", field="before")
                older = and_(table.c.created_at == at.created_at, table.c.id < at.id)
                query = query.where(or_(table.c.created_at < at.created_at, older))
            rows = (await db.execute(query)).mappings().all()
        return [_token(row) for row in rows]

    async def revoke(self, token_id: str, *, owner: str | None) -> Token:
        """Revoke a token and end the sessions that began with it. `owner` None: anybody's (admins).

        Raises:
            NotFound: no such token, or it is somebody else's.
        """
        where = [tables.tokens.c.id == storable(token_id, 32)]
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

    async def revoke_many(
        self, subject: str | None, *, keep_token: str | None = None, keep_session: str | None = None
    ) -> int:
        """Revoke every live token of a subject, or of everybody, and end all their browser sessions.

        Args:
            subject: None: everybody's.
            keep_token: id of a token that stays.
            keep_session: SHA-256 of the cookie of a session that stays.

        Returns:
            How many tokens were live; the portal's own short keys are revoked and not counted.
        """
        tokens, sessions = tables.tokens, tables.sessions
        theirs = [self._alive()]
        open_sessions = []
        if subject is not None:
            theirs.append(tokens.c.subject == storable(subject, 253))
            open_sessions.append(sessions.c.subject == storable(subject, 253))
        if keep_token is not None:
            theirs.append(tokens.c.id != keep_token)
        if keep_session is not None:
            open_sessions.append(sessions.c.sha256 != keep_session)
        end = update(tokens).values(revoked_at=self._now())
        async with self._db.write() as tx:
            ended = await tx.execute(end.where(*theirs, tokens.c.hidden.is_(False)))
            await tx.execute(end.where(*theirs, tokens.c.hidden.is_(True)))
            await tx.execute(sessions.delete().where(*open_sessions))
        return ended.rowcount

    async def prune_hidden(self) -> None:
        """Delete hidden keys that have expired."""
        gone = [tables.tokens.c.hidden.is_(True), tables.tokens.c.expires_at <= self._now()]
        async with self._db.write() as tx:
            await tx.execute(tables.tokens.delete().where(*gone))

    async def _check_room(self, tx: AsyncConnection, subject: str, limit: int) -> None:
        live = select(func.count()).where(
            tables.tokens.c.subject == subject, tables.tokens.c.hidden.is_(False), self._alive()
        )
        held = (await tx.execute(live)).scalar_one()
        if held >= limit:
            raise Conflict(
                f"{subject} has {held} live tokens, and {limit} is the limit for one person; revoke one first "
                "(`busbar token list --state live` shows them)"
            )

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
        role=CallerRole(row["role"]),
        scopes=frozenset(Scope(s) for s in row["scopes"]),
        tenant=row["tenant"],
        hidden=row["hidden"],
        created_at=row["created_at"],
        created_by=row["created_by"],
        expires_at=row["expires_at"],
        last_used_at=row["last_used_at"],
        revoked_at=row["revoked_at"],
        limits=InferenceLimits.model_validate_json(row["limits"]) if row["limits"] else None,
        groups=tuple(row["groups"]),
    )
