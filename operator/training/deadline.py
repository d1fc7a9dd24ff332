"""What the plan says of a TrainingJob's deadline: to its status and back, in words.

A promise is kept in the status: the next plan reads it there, also after a restart of the operator. It is for one
deadline; with another one the job is asked again. Only what people can see is worth a write: another answer, other
accelerators, an end that has moved.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from busbar.kube.types import TrainingJob, TrainingPhase
from busbar.kube.types.reasons import Reason
from busbar.kube.types.training_status import (
    TERMINAL_PHASES,
    DeadlineAnswer,
    DeadlineStatus,
    TrainingJobStatus,
)
from busbar.operator.decisions import Deadline
from busbar.operator.training.start_forecast import moment
from busbar.operator.write.status import clip, human_duration
from busbar.scheduler import DeadlineShare

MOVED = 0.1
"""An end is written again when it has moved by more than this part of the time that is left,"""
MOVED_S = 120.0
"""and by more than this."""
NAMED = 5
"""Jobs named in a sentence."""


def promised(job: TrainingJob) -> bool:
    """Whether the job's present deadline was promised to be kept."""
    known = job.status.deadline if job.status is not None else None
    return known is not None and known.at == job.spec.deadline and known.answer.is_promise


def with_deadline(
    job: TrainingJob, status: TrainingJobStatus, decision: Deadline, now: datetime
) -> TrainingJobStatus:
    """The status with what is said of the deadline; the same one where it need not change."""
    old, at, share = status.deadline, job.spec.deadline, decision.share
    if at is None:
        return status if old is None else status.model_copy(update={"deadline": None})
    if is_told(old, at, share, now.timestamp()):
        return status
    return status.model_copy(update={"deadline": _written(at, share, now)})


def is_told(
    old: DeadlineStatus | None, at: datetime | None, share: DeadlineShare | None, now_s: float
) -> bool:
    """Whether the status says it, but for a small difference of the end."""
    if old is None or at is None:
        return old is None and at is None
    if old.at != at or old.met is not None or old.answer != _answer(share):
        return False
    if share is None:
        return True
    if (old.accelerator or "", old.accelerators) != _needs(share) or old.breaks != list(share.breaks[:NAMED]):
        return False
    if old.ends_by is None or share.ends_s is None:
        return old.ends_by is None and share.ends_s is None
    left_s = max(0.0, share.ends_s - now_s)
    return abs(old.ends_by.timestamp() - share.ends_s) <= max(MOVED_S, MOVED * left_s)


def ended(job: TrainingJob, phase: TrainingPhase, now: datetime) -> DeadlineStatus | None:
    """What is said of the deadline of a job that ends now; None: it has none."""
    at, status = job.spec.deadline, job.status
    if at is None or phase not in TERMINAL_PHASES:
        return None
    if status is not None and status.deadline is not None and status.deadline.met is not None:
        return status.deadline
    known = status.deadline.answer if status is not None and status.deadline is not None else None
    met = phase is TrainingPhase.SUCCEEDED and now <= at
    if phase is not TrainingPhase.SUCCEEDED:
        text = "Missed: the job failed."
    elif met:
        text = f"Kept: it ended {human_duration((at - now).total_seconds())} before its deadline."
    else:
        text = f"Missed: it ended {human_duration((now - at).total_seconds())} late."
    return DeadlineStatus(at=at, answer=known or DeadlineAnswer.UNKNOWN, ends_by=now, met=met, message=text)


def news(before: TrainingJobStatus | None, after: TrainingJobStatus) -> tuple[Reason, str] | None:
    """The event that a change of the status deserves; None: none."""
    old, new = (None if before is None else before.deadline), after.deadline
    if new is None or (old is not None and (old.at, old.answer, old.met) == (new.at, new.answer, new.met)):
        return None
    if new.met is not None:
        return (Reason.DEADLINE_KEPT if new.met else Reason.DEADLINE_MISSED), new.message
    if new.answer is DeadlineAnswer.UNKNOWN:
        return None
    return _REASONS[new.answer], new.message


_REASONS = {
    DeadlineAnswer.KEEPS: Reason.DEADLINE_PROMISED,
    DeadlineAnswer.LATE: Reason.DEADLINE_LATE,
    DeadlineAnswer.OUT_OF_REACH: Reason.DEADLINE_NOT_PROMISED,
    DeadlineAnswer.CROWDED: Reason.DEADLINE_NOT_PROMISED,
    DeadlineAnswer.NOT_TRIED: Reason.DEADLINE_NOT_PROMISED,
}


def _written(at: datetime, share: DeadlineShare | None, now: datetime) -> DeadlineStatus:
    ends = None
    if share is not None and share.ends_s is not None:
        ends = moment(now, max(0.0, share.ends_s - now.timestamp()))
    kind, count = _needs(share) if share is not None else ("", 0.0)
    return DeadlineStatus(
        at=at,
        answer=_answer(share),
        accelerator=kind or None,
        accelerators=count,
        ends_by=ends,
        breaks=list(share.breaks[:NAMED]) if share is not None else [],
        message=clip(sentence(share, at)),
    )


def _answer(share: DeadlineShare | None) -> DeadlineAnswer:
    return DeadlineAnswer.UNKNOWN if share is None else DeadlineAnswer(share.answer.value)


def _needs(share: DeadlineShare) -> tuple[str, float]:
    return (share.accelerator, share.accelerators_m / 1000) if share.accelerators_m else ("", 0.0)


def sentence(share: DeadlineShare | None, at: datetime) -> str:
    """What is said of a deadline, as people read it everywhere."""
    if share is None:
        return "Nothing is promised: the job is in no plan (yet), or its length or speed is not known."
    answer, late = _answer(share), share.slack_s < 0
    apart = human_duration(abs(share.slack_s))
    ends = "it would not end" if share.ends_s is None else f"it would end {_clock(share.ends_s, at)}"
    if answer is DeadlineAnswer.KEEPS:
        return f"Promised: {_needed(share)}; {ends}, {apart} before the deadline."
    if answer is DeadlineAnswer.LATE:
        how = f", {apart} late" if share.ends_s is not None and late else ""
        return f"Promised, and cannot be kept as things are: {_needed(share)}; {ends}{how}."
    if answer is DeadlineAnswer.OUT_OF_REACH:
        how = (
            f"even alone in the cluster {ends}, {apart} late"
            if share.ends_s is not None
            else "nothing here runs it"
        )
        return f"Not promised: out of reach, {how}."
    if answer is DeadlineAnswer.NOT_TRIED:
        return "Not promised yet: many deadlines wait for an answer, and the earliest are looked at first."
    if not share.breaks:
        return "Not promised: what the tenant is entitled to is promised to other jobs by then."
    named = ", ".join(share.breaks[:NAMED])
    more = f" and {len(share.breaks) - NAMED} more" if len(share.breaks) > NAMED else ""
    return f"Not promised: it would break the promised deadlines of {named}{more}."


def _needed(share: DeadlineShare) -> str:
    kind, count = _needs(share)
    return f"it needs {count:g} {kind} from now on" if count else "earlier deadlines come first"


def _clock(at_s: float, deadline: datetime) -> str:
    ends = datetime.fromtimestamp(0, UTC) + timedelta(seconds=round(at_s))
    same_day = ends.date() == deadline.astimezone(UTC).date()
    return f"at {ends:%H:%M} UTC" if same_day else f"on {ends:%d %b at %H:%M} UTC"
