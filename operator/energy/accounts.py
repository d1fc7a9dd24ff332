"""Running totals in statuses, so that each joule is written exactly once.

A status has the total of an object, whoever wrote it last; this process knows what it has counted since. Each total
that is sent is remembered with what was counted by then. Whichever total the status has at the next look, the joules
that it lacks are known: a write that failed is repeated, one whose answer was lost is not added again, and a total that
somebody else has set (a restored backup) is what the following joules are added to.

An account that goes on from a checkpoint (`checkpoint.py`) is counted from the checkpoint's total, whatever the status
says: the process before this one has written the difference from joules that are counted again now.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

REMEMBERED = 8
"""Totals of one object: more than can be under way."""


@dataclass
class _Account:
    counted_j: float = 0.0
    sent: dict[float, float] = field(default_factory=dict)
    """By total: what was counted when it was sent."""
    newest_j: float = 0.0
    """What was counted when the newest was sent."""
    offered: tuple[float, float] = (-1.0, 0.0)
    """The last total that was asked for, and what was counted by then, or must be until the status is not ahead."""
    cut_j: float | None = None
    """The checkpoint's total, until a total of this process was sent."""

    def base_j(self, told: float) -> float:
        """What was counted, of all that is counted here, when the status got this total."""
        known = self.sent.get(told)
        if known is not None:
            return known
        return self.newest_j if self.cut_j is None else told - self.cut_j

    def total(self, told: float) -> float:
        """Less than `told` while the process before this one had counted more than this one has until now."""
        return round(told + self.counted_j - self.base_j(told), 3)


class Accounts:
    """By the objects' uids."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}

    def book(self, uid: str, joules: float) -> None:
        """Counts joules, which are not negative."""
        self._accounts.setdefault(uid, _Account()).counted_j += joules

    def total(self, uid: str, told: float | None) -> float | None:
        """The total to write where the status has this one; the same where nothing is known of the object."""
        account = self._accounts.get(uid)
        if account is None:
            return told
        told = told or 0.0
        base_j = account.base_j(told)
        account.sent.pop(told, None)
        account.sent[told] = base_j  # last, so that it is not dropped
        counted = account.total(told)
        total = max(told, counted)
        # A status that is ahead stays as it is until as much was counted; sending it again forgives nothing.
        account.offered = total, account.counted_j + total - counted
        return total

    def peek(self, uid: str, told: float | None) -> float | None:
        """What to go on from after a checkpoint: the same, but less than the status has where that is ahead."""
        account = self._accounts.get(uid)
        return told if account is None else account.total(told or 0.0)

    def resume(self, uid: str, total: float) -> None:
        """Goes on from a checkpoint's total; nothing must have been counted yet."""
        self._accounts[uid] = _Account(cut_j=total)

    def knows(self, uid: str) -> bool:
        return uid in self._accounts

    def sent(self, uid: str, total: float | None) -> None:
        """To be told before a status is sent with the total that was asked for last; another one changes nothing."""
        account = self._accounts.get(uid)
        if account is None or account.offered[0] != total:
            return
        account.newest_j = account.sent[total] = account.offered[1]
        account.cut_j = None
        while len(account.sent) > REMEMBERED:
            del account.sent[next(iter(account.sent))]

    def keep(self, uids: Container[str]) -> None:
        """Forgets all other objects."""
        self._accounts = {uid: account for uid, account in self._accounts.items() if uid in uids}
