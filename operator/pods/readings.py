"""What a training pod answers, parsed and validated; whether its numbers are plausible is checked elsewhere."""

from __future__ import annotations

import json
from typing import Any

from pydantic import ValidationError

from busbar.kube.contracts.workload import TrainingStatus


def parse_reading(raw: Any) -> TrainingStatus | None:
    """A reading from parsed JSON; None where it is not a training status."""
    if not isinstance(raw, dict):
        return None
    try:
        return TrainingStatus.model_validate(raw)
    except ValidationError:
        return None


def from_termination_message(text: str) -> TrainingStatus | None:
    """The reading in a pod's termination message; None where the message is something else, such as a log's tail."""
    if not text.lstrip().startswith("{"):
        return None
    try:
        return parse_reading(json.loads(text))
    except (ValueError, RecursionError):
        return None
