"""When the state of a TrainingJob is saved, and where."""

from typing import Annotated

from pydantic import Field

from busbar.kube.types.meta import ClaimUri, SpecModel
from busbar.kube.types.rules import at_most_one_of


class MemoryCopyPolicy(SpecModel):
    """When the state is copied into the pod's memory."""

    every_steps: Annotated[int, Field(ge=1, le=100_000_000)] = Field(
        default=10, description="Copy each time this many steps are done."
    )


class CheckpointPolicy(SpecModel):
    """When checkpoints are saved, how many are kept, and where."""

    rules = (
        at_most_one_of(
            "everySteps", "everySeconds", message="checkpoint has everySteps or everySeconds, not both"
        ),
    )

    every_steps: Annotated[int, Field(ge=1, le=100_000_000)] | None = Field(
        default=None, description="Save each time this many steps are done."
    )
    every_seconds: Annotated[int, Field(ge=1, le=604_800)] | None = Field(
        default=None, description="Save each time this many seconds have passed."
    )
    keep: Annotated[int, Field(ge=1, le=100)] = Field(default=2, description="Complete checkpoints to keep.")
    uri: ClaimUri | None = Field(default=None, description="Where; default checkpoints below output.uri.")
    memory: MemoryCopyPolicy | None = Field(
        default=None,
        description="Copies of the state in the pod's memory beside the checkpoints, from which a trainer that crashed goes "
        "on in seconds. They need twice the size of a checkpoint.",
    )
    adopt: bool = Field(
        default=False,
        description="Continue from the checkpoints that another job left there, if its settings agree, for example to "
        "continue a finished run with more steps. Otherwise they are moved aside.",
    )
