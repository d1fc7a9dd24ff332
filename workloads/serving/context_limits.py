"""How many tokens a request may have, prompt and answer together. Pure Python."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from busbar.workloads.serving.errors import BadRequest


@dataclass(frozen=True)
class ContextLimits:
    """Those of one replica, at one moment."""

    model: int
    """The model's, or less where the KV cache holds no more."""
    tenants: Mapping[str, int] = field(default_factory=dict)
    """Of tenants whose quota of the KV cache may allow less."""

    def limit(self, tenant: str = "") -> int:
        return min(self.model, self.tenants.get(tenant, self.model))

    def check(self, prompt_len: int, max_tokens: int, tenant: str = "") -> None:
        """Raises BadRequest when the request can never run."""
        limit = self.limit(tenant)
        if prompt_len < 1:
            raise BadRequest("the prompt is empty; give at least one token", param="prompt")
        if prompt_len + max_tokens > limit:
            whose = "this model's" if limit == self.model else "under your tenant's KV quota the"
            raise BadRequest(
                f"{whose} maximum context length is {limit} tokens; the request has "
                f"{prompt_len} in the prompt and asks for up to {max_tokens} more. Shorten one of them",
                param="max_tokens" if prompt_len < limit else "prompt",
            )
