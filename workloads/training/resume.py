"""Where a run goes on: from the newest state that is whole, in the pod's memory or on disk, or from the start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from busbar.workloads.training.checkpoint import CheckpointFolder
from busbar.workloads.training.errors import ResumeRefused
from busbar.workloads.training.identity import changed_numerics, check_same_run
from busbar.workloads.training.loaded import Loaded
from busbar.workloads.training.paths import newest_facts, own_checkpoints
from busbar.workloads.training.snapshot import restore_random_states
from busbar.workloads.training.step_log import Journal

if TYPE_CHECKING:
    from busbar.workloads.training.memory_copy import Copies
    from busbar.workloads.training.run import Session
    from busbar.workloads.training.trainer import Trainer


def resume(
    session: Session,
    trainer: Trainer,
    folder: CheckpointFolder,
    copies: Copies | None,
    journal: Journal,
    facts: Mapping[str, Any],
) -> int | None:
    """Put the newest state into `trainer`; returns the step of the newest checkpoint on disk, if there is one.

    Raises ResumeRefused, and CheckpointError for files that cannot be read.
    """
    run, reporter, status = session.run, session.reporter, session.status
    copy = _in_memory(session, folder, copies)
    loaded = copy or _on_disk(session, folder)
    step = 0
    if loaded is not None:
        check_same_run(loaded.manifest, facts, session.places.checkpoints)
        if changed := changed_numerics(loaded.manifest, facts):
            reporter.note(
                f"warning: {', '.join(changed)}: from here on the numbers may differ in their last bits from those "
                "of a run that was never stopped"
            )
        if loaded.step > session.spec.steps:
            raise ResumeRefused(
                f"spec.engine.steps is {session.spec.steps}, and the checkpoint in {session.places.checkpoints} is of "
                f"step {loaded.step}; ask for at least as many steps, or use another output folder"
            )
        trainer.restore(loaded)
        if run.world.rank == 0:
            own_checkpoints(session.places.checkpoints, run.owner)
        restore_random_states(loaded)
        step = loaded.step
        status.update(restoredAttempt=loaded.manifest["attempt"])
    lost = journal.lost_since(step)
    if loaded is not None or lost:
        memory = "the pods' memory" if run.world.size > 1 else "this pod's memory"
        where = f" (from the copy in {memory})" if copy is not None else ""
        status.update(resumedFromStep=step, lostSteps=_all_lost(session, lost), step=step)
        reporter.note(f"resumed from step {step}{where}; {lost} finished steps were lost and are repeated")
    return _durable(session, folder, loaded if copy is None else None)


def _in_memory(session: Session, folder: CheckpointFolder, copies: Copies | None) -> Loaded | None:
    """The copy that an earlier trainer, or those of a gang, left in memory, if no checkpoint on disk is newer."""
    if copies is None:
        return None
    found, notes = copies.newest()
    for note in notes:
        session.reporter.note(note)
    newest_on_disk = folder.newest_step()
    return found if found is not None and found.step >= newest_on_disk else None


def _on_disk(session: Session, folder: CheckpointFolder) -> Loaded | None:
    found = folder.newest()
    for problem in found.passed_over:
        session.reporter.note(f"passed over a damaged checkpoint: {problem}")
    return found.checkpoint


def _all_lost(session: Session, lost: int) -> int:
    """Steps that were lost in this attempt, of whose trainers this is not always the first."""
    copies = session.run.copies
    if copies is None:
        return lost
    copies.count(lost_steps=lost)
    return copies.lost_steps


def _durable(session: Session, folder: CheckpointFolder, loaded: Loaded | None) -> int | None:
    """Report the newest checkpoint on disk: `loaded`, or else what its manifest says, which is not verified here."""
    if loaded is not None:
        session.status.durable_checkpoint(loaded.step, loaded.manifest["savedAt"], loaded.size)
        return loaded.step
    facts = newest_facts(session.places.checkpoints, session.run.owner)
    try:
        step, saved_at = int(facts["step"]), float(facts["savedAt"])
    except (KeyError, TypeError, ValueError):
        return None
    session.status.durable_checkpoint(step, saved_at, folder.size(step))
    return step
