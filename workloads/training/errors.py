"""The errors of the training engine.

    TrainingError                 code            what the user does
    ├── InvalidJob                invalid-job     correct the named field
    ├── InfeasiblePlan            does-not-fit    take one of the listed fixes
    ├── OutOfArena                out-of-arena    report it: the plan granted fewer bytes than were requested
    ├── CheckpointError           checkpoint      free space, or choose another folder
    ├── ResumeRefused             resume-refused  use another output folder, or the old settings
    ├── Diverged                  diverged        lower the learning rate, or look at the data
    │   └── NotFinite             diverged        the same: a checkpoint was not written (a CheckpointError, too)
    │   └── Superseded            superseded      nothing: a later start of the run writes here
    ├── RankLost                  rank-lost       nothing: the gang starts again from its checkpoint
    ├── RanksDiffer               ranks-differ    make the pods alike: image, machine, files
    └── Unsupported               unsupported     use an own image, or another setting

Each carries a stable `code` and a sentence that says what is wrong, where, and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence


class TrainingError(Exception):
    """Base of all errors that the engine raises on purpose."""

    code = "training"


class InvalidJob(TrainingError):
    """A field of the job is wrong. `field` is its path in the manifest, such as `spec.engine.steps`."""

    code = "invalid-job"

    def __init__(self, field: str, problem: str, remedy: str) -> None:
        self.field, self.problem, self.remedy = field, problem, remedy
        super().__init__(printable(f"{field}: {problem}; {remedy}"))


class InfeasiblePlan(TrainingError):
    """The plan exceeds a limit of memory or disk. Nothing has been allocated."""

    code = "does-not-fit"
    """The contract's `DOES_NOT_FIT`, in a literal: the engine's core runs where only torch is installed."""

    def __init__(self, why: str, fixes: Sequence[str]) -> None:
        self.why, self.fixes = why, tuple(fixes)
        super().__init__(f"{why}. Nothing was allocated. What would help: {'; '.join(fixes)}")


class OutOfArena(TrainingError):
    """More was requested from an arena than its plan granted."""

    code = "out-of-arena"


class CheckpointError(TrainingError):
    """A checkpoint could not be written."""

    code = "checkpoint"


class Superseded(CheckpointError):
    """A later start of the same run writes to its folders, so this one ends."""

    code = "superseded"


class ResumeRefused(TrainingError):
    """The checkpoints found belong to a run with other settings."""

    code = "resume-refused"


class Diverged(TrainingError):
    """Gradients or weights are not finite. Earlier checkpoints are finite and are kept."""

    code = "diverged"


class NotFinite(Diverged, CheckpointError):
    """A checkpoint was not written because its numbers are not finite. The ones before it stay."""

    code = "diverged"


class RankLost(TrainingError):
    """Another rank of the gang is gone, or does not answer."""

    code = "rank-lost"


class RanksDiffer(TrainingError):
    """The ranks of a gang do not have alike what they must have alike."""

    code = "ranks-differ"


class Unsupported(TrainingError):
    """A valid request that this engine does not support."""

    code = "unsupported"


def listed(names: Sequence[str], most: int = 3) -> str:
    """The first few of `names`, and how many more there are, for a sentence."""
    shown = printable(", ".join(names[:most]))
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def printable(text: str) -> str:
    """`text` with the bytes of file names that are not Unicode written out, so that every log takes it."""
    return text.encode("utf-8", "backslashreplace").decode()
