"""Attempts that must be refused, and their neighbours that must not.

Admission policies take effect shortly after they, or the pools that they read, were written. So an attempt is
repeated as a dry run until the answer is as wanted, and then made for real.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.cluster.apiserver import Answer
from tests.cluster.manifests import JSON

SETTLE_S = 60.0
Attempt = Callable[..., Answer]
"""A request that takes query parameters by keyword."""


def refused(attempt: Attempt, says: str) -> None:
    """The attempt is refused with these words, at the latest when the policies have taken effect."""
    end = time.monotonic() + SETTLE_S
    answer = attempt(dryRun="All")
    while answer.ok and time.monotonic() < end:
        time.sleep(0.05)
        answer = attempt(dryRun="All")
    assert not answer.ok, "it was accepted"
    assert says in answer.message, answer.message
    assert not attempt().ok


def eventually_accepted(attempt: Attempt) -> JSON:
    """The attempt is accepted, at the latest when the policies have taken effect."""
    end = time.monotonic() + SETTLE_S
    answer = attempt(dryRun="All")
    while not answer.ok and time.monotonic() < end:
        time.sleep(0.05)
        answer = attempt(dryRun="All")
    return attempt().expect()
