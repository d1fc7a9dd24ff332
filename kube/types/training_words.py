"""What a job's status says of its adapters and its steps, in words for people: the same in the command line and in the portal."""

from __future__ import annotations

from busbar.kube.types.training_job import AdapterProgress, StepPhases


def adapter_words(row: AdapterProgress) -> str:
    """How far one of several adapters is, and how good."""
    words = [f"{row.step} of {row.steps} steps"]
    if row.loss is not None:
        words.append(f"loss {row.loss:.4g}")
    if row.bits_per_byte is not None:
        words.append(f"{row.bits_per_byte:.3f} bits per byte")
    words.append("written" if row.finished else "waits" if not row.step else "in training")
    return ", ".join(words)


def phase_words(phases: StepPhases) -> str:
    """What steps are spent on, the most first; what is below a percent is left out."""
    named = sorted(((share, phase) for phase, share in phases if share), key=lambda each: -each[0])
    return ", ".join(f"{phase} {share} %" for share, phase in named)


def moment_words(state: str | None) -> str:
    """In which format a job keeps AdamW's moments; empty where they are exact."""
    return "" if state in (None, "exact") else f"in {state}"
