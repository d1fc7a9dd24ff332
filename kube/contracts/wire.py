"""Base of the wire models: camelCase, unknown fields ignored, so that two versions work together during an upgrade."""

from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel


class WireModel(BaseModel):
    """JSON that one of our processes sends to another."""

    model_config = ConfigDict(
        alias_generator=to_camel, validate_by_name=True, validate_by_alias=True, extra="ignore", frozen=True
    )

    def to_wire(self) -> dict[str, Any]:
        """The JSON form; absent fields are omitted."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)
