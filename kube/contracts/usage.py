"""`POST /internal/usage`: the gateway's ledger entries, exactly once.

Each gateway numbers its records; the API stores each (gateway, seq) once and answers with the number up to which it
has every record. The gateway keeps unacknowledged records on disk and sends them again.
"""

from datetime import datetime
from typing import Annotated

from pydantic import Field

from busbar.kube.contracts.allowances import MOST_NANO
from busbar.kube.contracts.wire import WireModel

PATH = "/internal/usage"
MAX_BATCH = 1000
_Text = Annotated[str, Field(max_length=253)]


class UsageRecord(WireModel):
    """One finished request."""

    seq: int = Field(ge=1)
    key_id: _Text
    tenant: _Text
    namespace: _Text
    service: _Text
    model: _Text
    prompt_tokens: int = Field(ge=0)
    completion_tokens: int = Field(ge=0)
    cached_tokens: int = Field(default=0, ge=0)
    """Of the prompt tokens, those that the engine's prefix cache had."""
    cost_nano: int = Field(default=0, ge=0, le=MOST_NANO)
    """At the service's price when the request was accepted (`allowances`)."""
    request_id: _Text
    finished_at: datetime


class UsageBatch(WireModel):
    """POST body: records in order of `seq`."""

    gateway: _Text
    records: list[UsageRecord] = Field(max_length=MAX_BATCH)


class UsageAccepted(WireModel):
    """Answer: everything up to this number is stored."""

    accepted_through: int
