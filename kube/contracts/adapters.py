"""`POST /adapters`: which LoRA adapters a replica of a ModelService shall serve, while requests run.

The operator sends all adapters of the spec whenever they are others than those that the replica was asked for last. The
replica answers at once, and reads and forgets adapters afterwards; its `/status` says how far it is, with the digest of
what it was asked for (`ServingStatus.adapters_asked`), because 64 addresses are too long for a status.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated

from pydantic import Field, field_validator

from busbar.kube.contracts.wire import WireModel
from busbar.kube.types.meta import ClaimUri, claim_of

ADAPTERS_PATH = "/adapters"
MOST_ADAPTERS = 64


class AskedAdapter(WireModel):
    """One of them."""

    name: Annotated[str, Field(min_length=1, max_length=63)]
    uri: ClaimUri


class AskedAdapters(WireModel):
    """The body: all of them; what is not named is not served."""

    adapters: list[AskedAdapter] = Field(default_factory=list, max_length=MOST_ADAPTERS)

    @field_validator("adapters")
    @classmethod
    def _named_once(cls, adapters: list[AskedAdapter]) -> list[AskedAdapter]:
        names = [each.name for each in adapters]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"two adapters have the name {twice!r}")
        return adapters

    @property
    def digest(self) -> str:
        """Equal for the same names with the same folders, in any order."""
        named = sorted((each.name, *claim_of(each.uri)) for each in self.adapters)
        return hashlib.sha256(json.dumps(named).encode()).hexdigest()[:32]
