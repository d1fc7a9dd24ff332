"""Full training with frozen parts: parameters whose names match a pattern of `spec.engine.freeze` are not trained.

They have no gradient, no optimizer state and no place in checkpoints, and lie in the arena as `base`. The result holds
them as they were.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from busbar.workloads.training.errors import InvalidJob, listed

FIELD = "spec.engine.freeze"
_SHOWN = 16  # names in a refusal


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters of which a name matches; tied weights are one tensor with several. Raises InvalidJob."""
    named = list(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        found = [parameter for name, parameter in named if fnmatchcase(name, pattern)]
        if not found:
            exist = dict.fromkeys(re.sub(r"\.\d+(?=\.)", ".*", name) for name, _ in named)
            raise InvalidJob(
                FIELD,
                f"{pattern} matches no parameter of this {type(model).__name__}",
                f"take it out, or name some of {listed(list(exist), _SHOWN)}",
            )
        for parameter in found:
            parameter.requires_grad_(False)
    if patterns and not any(parameter.requires_grad for parameter in model.parameters()):
        raise InvalidJob(
            FIELD, "leaves nothing to train, as its patterns match every parameter", "take one of them out"
        )


def frozen(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are not trained, each once."""
    return [parameter for parameter in model.parameters() if not parameter.requires_grad]
