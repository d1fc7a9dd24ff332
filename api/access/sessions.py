"""Browser sessions: a random cookie whose SHA-256 is in the database, so that a session can be revoked.

A session lasts at most `Settings.session_hours`; one that began with a busbar token ends with that token. Its
CSRF token is an HMAC of the cookie's hash with the session secret, so it is not stored.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from datetime import timedelta

from sqlalchemy import delete, or_, select

from busbar.api.access.identity import Caller, CallerRole, Scope, Source
from busbar.api.access.tokens import remember_subject
from busbar.api.clock import Clock, utc_now
from busbar.api.database import tables
from busbar.api.database.engine import Database

COOKIE = "busbar_session"


class Sessions:
    """Writes and reads the session table."""

    def __init__(self, database: Database, secret: str, hours: float, clock: Clock = utc_now) -> None:
        self._db = database
        self._secret = secret.encode()
        self.lifetime = timedelta(hours=hours)
        self._now = clock

    async def open(self, caller: Caller, lifetime: timedelta | None = None) -> str:
        """Begin a session for a caller who has just proved who they are; returns the cookie's value."""
        cookie = secrets.token_urlsafe(32)
        now = self._now()
        async with self._db.write() as tx:
            await tx.execute(delete(tables.sessions).where(tables.sessions.c.expires_at <= now))
            groups = caller.groups if caller.source is Source.OIDC else None
            if caller.source is not Source.KUBERNETES:
                await remember_subject(self._db, tx, caller.subject, caller.source, groups, now)
            await tx.execute(
                tables.sessions.insert().values(
                    sha256=_digest(cookie),
                    subject=caller.subject,
                    groups=list(caller.groups),
                    role=f"{caller.source.value}:{caller.role.value}",
                    scopes=sorted(scope.value for scope in caller.scopes),
                    tenant=caller.tenant,
                    token_id=caller.token_id,
                    created_at=now,
                    expires_at=now + min(lifetime or self.lifetime, self.lifetime),
                )
            )
        return cookie

    async def find(self, cookie: str) -> Caller | None:
        """The caller of a cookie; None when the session is unknown or over, or its token was revoked or has
        expired."""
        now = self._now()
        query = (
            select(tables.sessions)
            .outerjoin(tables.tokens, tables.tokens.c.id == tables.sessions.c.token_id)
            .where(
                tables.sessions.c.sha256 == _digest(cookie),
                tables.sessions.c.expires_at > now,
                tables.tokens.c.revoked_at.is_(None),
                or_(tables.tokens.c.expires_at.is_(None), tables.tokens.c.expires_at > now),
            )
        )
        async with self._db.read() as db:
            row = (await db.execute(query)).mappings().first()
        if row is None:
            return None
        source, role = row["role"].split(":")
        return Caller(
            subject=row["subject"],
            groups=tuple(row["groups"]),
            role=CallerRole(role),
            scopes=frozenset(Scope(s) for s in row["scopes"]),
            source=Source(source),
            token_id=row["token_id"],
            tenant=row["tenant"],
            session=row["sha256"],
        )

    async def close(self, session: str) -> None:
        async with self._db.write() as tx:
            await tx.execute(delete(tables.sessions).where(tables.sessions.c.sha256 == session))

    def csrf(self, session: str) -> str:
        """The CSRF token that pages of this session carry."""
        return hmac.new(self._secret, b"csrf:" + session.encode(), hashlib.sha256).hexdigest()

    def csrf_matches(self, session: str, given: str) -> bool:
        return hmac.compare_digest(self.csrf(session), given)


def _digest(cookie: str) -> str:
    return hashlib.sha256(cookie.encode()).hexdigest()
