"""The steps of a run, until the last one or a stop, with checkpoints as the policy and people ask."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from busbar.kube.contracts.report import TrainingReport
from busbar.workloads.training.errors import CheckpointError, Diverged
from busbar.workloads.training.pace import Pace

if TYPE_CHECKING:
    from busbar.workloads.training.gang import Together
    from busbar.workloads.training.memory_copy import Copier
    from busbar.workloads.training.preparation import Prepared
    from busbar.workloads.training.run import Session
    from busbar.workloads.training.trainer import StepResult, Trainer


class Loop:
    """Steps until the last one or a stop; checkpoints as the policy and people ask."""

    def __init__(
        self,
        session: Session,
        trainer: Trainer,
        saver: Any,
        copier: Copier,
        journal: Any,
        prepared: Prepared,
        together: Together,
    ) -> None:
        self.together = together
        self.session, self.trainer, self.journal = session, trainer, journal
        self.saver, self.copier = saver, copier
        self.packed, self._bad = prepared.packed, prepared.bad
        self.status, self.control, self.reporter = session.status, session.control, session.reporter
        self._last_save = time.monotonic()
        self._compared_grace = False
        self._pace = Pace(together.ranks.gather, lambda: together.waited_s, self.reporter.note)

    def go(self) -> None:
        total = self.session.spec.steps
        while self.trainer.done < total:
            if self.together.any(self.control.stopping)[0]:
                self._stop()
            self._step(total)
        self._durable("the last step")

    def _step(self, total: int) -> None:
        result = self.trainer.step(self.packed)
        self.journal.append(result.step, result.loss)
        self.status.finished_step(result.step, result.loss, result.seconds, result.tokens, whole=result.whole)
        self._publish()
        self.session.fence.check_at_times()
        if self.together.size > 1 and (workers := self._pace.finished(result.seconds)) is not None:
            self.status.update(workers=workers)
        if (link := self.trainer.link) is not None:
            link.finish_step()
            self.status.update(link=link.slow())
            if warning := link.warning():
                self.reporter.note(warning)
        if result.skipped:
            self._report_skipped(result)
        shown = self.status.to_json(losses=False)
        self.reporter.step(result.step, total, result.loss, shown["tokensPerSecond"], shown["etaSeconds"])
        self._compare_grace()
        waiting = self.control.take_requests()
        seconds = time.monotonic() - self._last_save
        due = self.together.first and self.session.run.checkpoint.due(result.step, seconds)
        asked, due, writing = self.together.any(bool(waiting), due, self.saver.writing)
        if asked or due:
            self.trainer.drain()
            self._attempt(self.copier.settle)
            self._attempt(lambda: self.saver.save(result.step, self.trainer.counters()))
            self._last_save = time.monotonic()
        elif self.copier.due(result.step) and not writing:
            self.trainer.drain()
            self._attempt(lambda: self.copier.save(result.step, self.trainer.counters()))
        if asked:
            problem = self._attempt(self.saver.drain)
            for request in waiting:
                request.step, request.problem = result.step, problem
                request.answered.set()

    def _report_skipped(self, result: StepResult) -> None:
        """Report a skipped step; raises Diverged when there were too many in a row."""
        row, limit = self.trainer.bad_in_a_row, self.session.spec.max_bad_steps
        self.reporter.note(
            f"warning: step {result.step} was skipped and changed nothing: its loss is {result.loss}, its gradient "
            f"norm {result.gradient_norm} ({row} in a row; the run ends at {limit})"
        )
        if row >= limit:
            raise Diverged(
                f"the gradients of the last {row} steps were not finite. The weights are those after step "
                f"{result.step - row}, and checkpoints up to there stay. Lower optimizer.learningRate, set "
                "optimizer.gradientClip, or look at the data of these steps; maxBadSteps is the limit"
            )

    def _publish(self) -> None:
        optimizer = self.trainer.optimizer
        link = self.trainer.link
        moved = (
            {"load": optimizer.loaded_bytes, "store": optimizer.stored_bytes} if link is None else link.bytes
        )
        self.status.count_traffic(moved, self._stalled_seconds, {} if link is None else link.seconds)
        speed = self.status.tokens_per_second
        flops = None if self._leaves_out else self.session.flops_per_token
        self.status.update(
            modelTflops=None if flops is None or speed is None else round(speed * flops / 1e12, 4),
            phaseSeconds={phase: round(seconds, 3) for phase, seconds in self.trainer.clock.seconds.items()},
            badRows=self._bad.count,
            skippedSteps=optimizer.skipped,
            replayedSteps=self.journal.replayed,
            replayMismatches=len(self.journal.mismatches),
        )
        if (predicted := self.session.prediction) is not None:
            saver, step_s = self.saver, None if self._leaves_out else self.status.steady_step_s
            stall_s = saver.stalled_seconds / saver.saved if saver.saved else None
            self.status.update(timing=predicted.to_json(step_s, stall_s, saver.durable_seconds))
        samples = 0 if self._leaves_out else self.status.steady_samples
        if samples >= 5 and (samples == 5 or samples % 10 == 0):
            plan = self.trainer.plan
            self.status.update(
                report=TrainingReport.model_validate(
                    {
                        **self.session.cell,
                        "tokensPerSecond": self.status.to_json(losses=False)["tokensPerSecond"],
                        "samples": samples,
                        "offloadedFraction": round(plan.offloaded_fraction, 4),
                        "plannedDeviceBytes": plan.device_bytes,
                        "peakDeviceBytes": self.trainer.peak_device_bytes(),
                        "plannedHostBytes": plan.host_bytes,
                        "peakHostBytes": self.trainer.peak_host_bytes(),
                    }
                )
            )

    @property
    def _leaves_out(self) -> bool:
        """Whether steps leave blocks out: they tell nothing about the speed of those that have all."""
        return self.trainer.drop is not None

    @property
    def _stalled_seconds(self) -> float:
        """Time that training lost to checkpoints and copies."""
        return float(self.saver.stalled_seconds + self.copier.stalled_seconds)

    def _compare_grace(self) -> None:
        """Say once, and before it matters, that a stop leaves too little time for a checkpoint."""
        needed, grace = self.saver.durable_seconds, self.session.run.grace_s
        if self._compared_grace or needed is None or grace is None:
            return
        self._compared_grace = True
        if needed > grace:
            self.reporter.note(
                f"warning: a checkpoint takes {needed:.1f} s until it is durable, and preemption.gracePeriodSeconds is "
                f"{grace:g}: a stop would lose the steps since the last one. Raise it, or lower checkpoint.everySteps"
            )

    def _attempt(self, work: Callable[[], None]) -> str | None:
        """A checkpoint that fails during training is reported, and training continues."""
        try:
            work()
        except CheckpointError as problem:
            self.reporter.error(str(problem))
            self.status.update(message=str(problem))
            return str(problem)
        return None

    def _stop(self) -> None:
        self.status.update(phase="Saving", message="asked to stop: saving")
        self.reporter.note(f"asked to stop: saving the state after step {self.trainer.done}")
        grace = self.session.run.grace_s
        self._durable("a stop", None if grace is None else grace - self.control.stopping_for_s)
        self.session.stop(self.saver.durable_step)

    def _durable(self, occasion: str, left_s: float | None = None) -> None:
        """Save and wait, at most for the remaining time."""
        done = self.trainer.done
        self.trainer.drain()
        self._attempt(self.copier.settle)
        if done:
            self.saver.save_last(done, self.trainer.counters(), left_s)
            self.reporter.note(f"checkpoint of step {self.saver.durable_step} is durable ({occasion})")
            if self.saver.durable_step != done:
                self.reporter.note(
                    f"{done - (self.saver.durable_step or 0)} later steps will be repeated: their state could not "
                    "have been written before the grace period ends; raise preemption.gracePeriodSeconds"
                )
