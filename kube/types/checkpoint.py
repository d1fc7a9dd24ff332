"""When the state of a TrainingJob is saved, and where."""

from typing import Annotated

from pydantic import Field

from busbar.kube.types.meta import ClaimUri, SpecModel
from busbar.kube.types.rules import at_most_one_of

MOST_PROCESSES_OF_PARITIES = 256
"""Of which several may be lost at once: the code that rebuilds their parts has so many symbols."""


class MemoryCopyPolicy(SpecModel):
    """When the state is copied into the pod's memory."""

    every_steps: Annotated[int, Field(ge=1, le=100_000_000)] = Field(
        default=10, description="Copy each time this many steps are done."
    )
    parity: Annotated[int, Field(ge=0)] | None = Field(
        default=None,
        description="How many pods of a gang may be lost at once without losing the copies: the others hold parities, from "
        "which they are rebuilt. Of n pods each holds n / (n - parity) times its part. 1 unless stated.",
    )

    def parity_of(self, pods: int) -> int:
        """Of a gang of so many; one pod has nobody who could hold it."""
        return min(1 if self.parity is None else self.parity, pods - 1)


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
        description="Copies of the state in the pods' memory beside the checkpoints, from which a trainer that crashed goes "
        "on in seconds, and a gang when a pod was lost and replaced. They need twice the size of a checkpoint, and of a "
        "gang's parities.",
    )
    adopt: bool = Field(
        default=False,
        description="Continue from the checkpoints that another job left there, if its settings agree, for example to "
        "continue a finished run with more steps. Otherwise they are moved aside.",
    )
