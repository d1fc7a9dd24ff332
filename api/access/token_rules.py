"""How many tokens a person may have, and how long one lives: the rules of the settings, applied to a request."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from busbar.api.errors import Invalid
from busbar.api.settings import PREFIX, Settings
from busbar.kube.errors import SettingsError

DAY = timedelta(days=1)
OVERLAP_HOURS, MAX_OVERLAP_HOURS = 24.0, 30 * 24.0
"""How long a token that is rotated stays valid, and the longest that can be asked for."""


@dataclass(frozen=True)
class TokenRules:
    """Bounds of new tokens. Tokens that exist keep the end that they were made with."""

    per_person: int
    """Live tokens that one person may have; the portal's own short keys do not count."""
    default: timedelta
    """Lifetime of a token that names none."""
    longest: timedelta
    """The longest lifetime that can be asked for."""

    @classmethod
    def of(cls, settings: Settings) -> TokenRules:
        """The rules of these settings.

        Raises:
            SettingsError: the default is longer than the longest.
        """
        if settings.token_days > settings.token_max_days:
            raise SettingsError(
                f"{PREFIX}TOKEN_DAYS={settings.token_days:g} is longer than "
                f"{PREFIX}TOKEN_MAX_DAYS={settings.token_max_days:g}"
            )
        return cls(settings.tokens_per_person, settings.token_days * DAY, settings.token_max_days * DAY)

    def lifetime_again(self, former: timedelta | None) -> timedelta:
        """The lifetime of a token that replaces one of this lifetime (None: it had no end)."""
        return self.default if former is None else min(former, self.longest)

    def lifetime(self, asked: timedelta | None) -> timedelta:
        """The lifetime of a new token.

        Raises:
            Invalid: more than the longest was asked for.
        """
        if asked is None:
            return self.default
        if asked > self.longest:
            raise Invalid(
                f"a token lives at most {self.longest / DAY:g} days here; ask for fewer",
                field="expiresInDays",
            )
        return asked
