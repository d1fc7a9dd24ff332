"""How often wrong bearers are looked up: counted by address, and by person where the token was once theirs.

An address that sent too many is refused before anything is looked up. Bearers that were accepted before go on being
looked up: one person's broken script must not lock out whoever shares their address. A token that has ended never
becomes valid again, so it is remembered with its owner: used from many addresses, it is refused without a look-up too.

Both memories hold digests, are bounded, and are lost with the process (see `throttle`).
"""

from __future__ import annotations

import logging
from collections import OrderedDict

from busbar.api.access.audit import Audit
from busbar.api.access.identity import Source
from busbar.api.access.throttle import MAX_KEYS, Throttle, of_address, of_subject
from busbar.api.access.tokens import Tokens
from busbar.api.errors import Unauthenticated
from busbar.kube.contracts.keys import TOKEN_PREFIX, digest_of

log = logging.getLogger(__name__)


class WrongBearers:
    """Asked before and told after each look-up of a bearer."""

    def __init__(self, throttle: Throttle, tokens: Tokens, audit: Audit, max_keys: int = MAX_KEYS) -> None:
        self._throttle = throttle
        self._tokens = tokens
        self._audit = audit
        self._max_keys = max_keys
        self._accepted: OrderedDict[str, str] = OrderedDict()
        self._ended: OrderedDict[str, str] = OrderedDict()
        """Owner by digest."""

    def check(self, bearer: str, address: str) -> None:
        """Whether the bearer may be looked up.

        Raises:
            TooMany: not now; says in how many seconds.
        """
        digest = digest_of(bearer)
        if digest in self._accepted:
            return
        keys = [of_address(address)]
        if (owner := self._ended.get(digest)) is not None:
            keys.append(of_subject(owner))
        self._throttle.check(keys)

    def accepted(self, bearer: str) -> None:
        """The look-up found a caller."""
        self._remember(self._accepted, digest_of(bearer), "")

    async def refused(self, bearer: str, address: str, error: Unauthenticated) -> None:
        """The look-up found nobody. The use of a token that has ended is written to the audit trail.

        Raises:
            TooMany: others were refused while this one was looked up, and it is one too many.
        """
        digest = digest_of(bearer)
        self._accepted.pop(digest, None)
        token = await self._tokens.ended(digest) if bearer.startswith(TOKEN_PREFIX) else None
        if token is None:
            self._throttle.take([of_address(address)])
            log.info("wrong bearer", extra={"address": address})
            return
        self._remember(self._ended, digest, token.subject)
        self._throttle.take([of_address(address), of_subject(token.subject)])
        why = f"{error.message} (used from {address})"
        await self._audit.note(
            token.subject, "authenticate", "Token", "", token.id, error.code, why, Source.TOKEN
        )

    def _remember(self, where: OrderedDict[str, str], digest: str, owner: str) -> None:
        where[digest] = owner
        where.move_to_end(digest)
        if len(where) > self._max_keys:
            where.popitem(last=False)
