"""One run from its spec to its result: prepare, train, evaluate, export; or stop with the state saved.

Exit codes: 0 done; 143 stopped after SIGTERM with the state saved; 2 the job cannot run as it
is (trying again changes nothing); 1 anything else.
A request to stop is checked between steps, and between files while preparing or evaluating, when no unsaved state
exists.
"""

from __future__ import annotations

import math
import os
import platform
import traceback
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from busbar.kube.contracts.workload import ExitCode
from busbar.workloads.training.control import Control
from busbar.workloads.training.errors import (
    CheckpointError,
    Diverged,
    OutOfArena,
    RankLost,
    RanksDiffer,
    TrainingError,
)
from busbar.workloads.training.fence import Fence, Turn
from busbar.workloads.training.paths import (
    Places,
    check_places,
    claim_checkpoints,
)
from busbar.workloads.training.report import Reporter
from busbar.workloads.training.settings import PARAMETERS, CheckpointPolicy, EngineSpec
from busbar.workloads.training.sizing import class_of, flops_per_token
from busbar.workloads.training.status import Status
from busbar.workloads.training.world import ALONE, PATIENT, Patience, World

if TYPE_CHECKING:
    from busbar.workloads.training.corpus import Corpus
    from busbar.workloads.training.gang import Together
    from busbar.workloads.training.memory_copy import MemoryCopies
    from busbar.workloads.training.model import ModelRecipe
    from busbar.workloads.training.plan import MemoryPlan
    from busbar.workloads.training.prediction import Prediction, Probe
    from busbar.workloads.training.preparation import Prepared
    from busbar.workloads.training.rows import Row
    from busbar.workloads.training.trainer import Trainer
    from busbar.workloads.training.watch import Verdict

DONE, FAILED, INVALID = int(ExitCode.DONE), int(ExitCode.FAILED), int(ExitCode.INVALID)
STOPPED = int(ExitCode.SAVED_AFTER_SIGTERM)


@dataclass(frozen=True)
class Run:
    """What to do, where, and under which name."""

    spec: EngineSpec
    checkpoint: CheckpointPolicy
    places: Places
    name: str  # for people
    owner: str  # the job's uid: checkpoints of another owner are not resumed
    attempt: int
    threads: int  # of torch and the other libraries
    grace_s: float | None = None  # from the request to stop to the kill; None: no kill follows
    termination_log: Path | None = None
    replacement: int = 0  # how often the pod was replaced in this attempt
    world: World = ALONE  # the gang in which it runs
    predicts: bool | None = None  # whether the machine is measured before the model is made; None: on a GPU
    patience: Patience = PATIENT
    copies: MemoryCopies | None = None  # of the state, in the supervisor's memory (see `supervisor`)
    part: str = ""  # of several adapters, the name of the one that this run trains
    parts: tuple[
        Run, ...
    ] = ()  # the runs of several adapters; this one is the first of them then (see `several`)


_AGAIN = (CheckpointError, OutOfArena, RankLost, RanksDiffer)  # another attempt may go better


class Stopped(Exception):
    """A stop was requested, and all state is durable."""


def run(run: Run, status: Status, control: Control, reporter: Reporter) -> int:
    """Execute the run; never raises. The outcome is the exit code, the status and the termination message."""
    from busbar.workloads.training.several import SeveralStatus, train_all

    try:
        if run.parts:
            assert isinstance(status, SeveralStatus)
            code, session = train_all(run.parts, status, control, reporter)
        else:
            code, session = attempt(run, status, control, reporter)
    finally:
        control.close("the run is over")
        reporter.close()
    if run.termination_log is not None:
        status.write_termination_message(run.termination_log)
    if session is not None:
        session.leave(code)
    return code


def attempt(run: Run, status: Status, control: Control, reporter: Reporter) -> tuple[int, Session]:
    """Train once, and say how it ended; never raises."""
    session = Session(run, status, control, reporter)
    try:
        session.go()
        code = DONE
    except Stopped as stop:
        reporter.note(str(stop))
        status.update(message=str(stop))
        code = STOPPED
    except TrainingError as problem:
        reporter.error(str(problem))
        status.update(phase="Failed", message=str(problem), errorCode=problem.code)
        again = isinstance(problem, _AGAIN) and not isinstance(problem, Diverged)
        code = FAILED if again else INVALID
    except Exception as problem:
        traceback.print_exc()
        code, message = session.explain(problem)
        reporter.error(message)
        status.update(phase="Failed", message=message)
    return code, session


class Session:
    def __init__(self, run: Run, status: Status, control: Control, reporter: Reporter) -> None:
        self.run, self.spec, self.places = run, run.spec, run.places
        self.status, self.control, self.reporter = status, control, reporter
        self.fingerprint: dict[str, str | None] = {}
        self.held_out: list[Row] = []
        self.prediction: Prediction | None = None
        self.disk_bytes_per_s: float | None = None
        """Of the checkpoints' disk, where it was probed."""
        self.link_bytes_per_s: dict[str, float] = {}
        """By direction, where they were probed."""
        self.together: Together | None = None
        self.fence = Fence(run.places.checkpoints, run.owner, Turn(run.attempt, run.replacement))
        self.flops_per_token: int | None = None

    def go(self) -> None:
        """The phases in order."""
        self.status.update(totalSteps=self.spec.steps)
        together = self._join()
        corpus = self._open(together)
        recipe, plan = self._plan(together)
        with self.memory.measuring("step"):  # it takes steps with a part of the model
            self._predict(recipe, plan, together)
        with self.memory.measuring("preparation"):
            prepared = self._prepare(corpus, together)
        with closing(prepared):
            self._work(recipe, plan, prepared, corpus, together)
        self._phase("Done", f"{self.spec.steps} steps done; model in {self.places.output}")

    def _work(
        self, recipe: ModelRecipe, plan: MemoryPlan, prepared: Prepared, corpus: Corpus, together: Together
    ) -> None:
        """Train, evaluate and write the result."""
        with self.memory.measuring("start"):
            trainer = self._build(recipe, plan, together)
        try:
            with self.memory.measuring("step"):
                self._train(trainer, prepared, corpus, together)
            if together.first:
                self._tell_bad_rows(prepared)
            evaluation = None
            if together.first or trainer.peers is not None:  # all ranks have a part of the weights
                with self.memory.measuring("evaluation"):
                    evaluation = self._evaluate(trainer, prepared, corpus, together)
            with self.memory.measuring("export"):
                trainer.gather_whole()
                if together.first:
                    self._export(trainer, prepared, evaluation)
                elif trainer.writes_in_turn:
                    from busbar.workloads.training.export import take_part

                    take_part(trainer)
            if together.first:
                together.tell("over")
            else:
                self._phase("Saving", "waiting for rank 0, which evaluates and writes the model")
                together.wait("over")
        finally:
            trainer.close()

    def _join(self) -> Together:
        """Meet the other ranks of the gang, if it is one."""
        world = self.run.world
        if world.size > 1:
            self._phase("Preparing", f"rank {world.rank} waits for the other ranks, {world.size} in all")
        import torch

        from busbar.workloads.training.gang import Together

        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.together = Together(
            world, self.device, self.run.patience, uuid4().hex[:12], self._end, self._stop_point
        )
        return self.together

    def _end(self, verdict: Verdict) -> None:
        """End this process: another rank is gone, and the training thread may wait for it for ever."""
        self.reporter.error(verdict.message)
        self.status.update(phase="Failed", message=verdict.message)
        if self.run.termination_log is not None:
            self.status.write_termination_message(self.run.termination_log)
        os._exit(verdict.code)

    def explain(self, problem: Exception) -> tuple[int, str]:
        """Exit code and message of an unexpected failure: its own, or that of the rank behind it."""
        verdict = None if self.together is None else self.together.explain(problem)
        if verdict is None:
            return FAILED, f"{type(problem).__name__}: {problem}"
        return verdict.code, verdict.message

    def leave(self, code: int) -> None:
        if self.together is not None:
            self.together.leave(code, str(self.status.to_json(losses=False)["message"]))

    def _phase(self, name: str, message: str) -> None:
        self.status.update(phase=name, message=message)
        self.reporter.phase(name, message)
        self._stop_point()

    def _stop_point(self) -> None:
        if self.control.stopping and self.status.phase != "Done":
            self.stop(None)

    def stop(self, saved: int | None) -> None:
        where = f"the state after step {saved} is durable" if saved else "nothing was lost"
        raise Stopped(f"stopped on request: {where}")

    def _share(self, done: float) -> None:
        self.reporter.share(min(1.0, done))
        self._stop_point()

    def _open(self, together: Together) -> Corpus:
        self._phase("Preparing", "reading the corpus")
        from busbar.workloads.training.chat import ChatTemplate
        from busbar.workloads.training.corpus import open_corpus
        from busbar.workloads.training.rows import RowReader

        check_places(self.places, keeps_model=self.spec.adapter is not None or bool(self.spec.freeze))
        if together.first:
            self._claim()
        together.share_folder(self.places.checkpoints, "spec.output.uri")
        data = self.spec.data
        corpus = open_corpus(
            data.uri,
            self.places.data,
            data.holdout_fraction,
            self.places.data_root,
            rows=RowReader(
                data.fields, ChatTemplate(self.places.tokenizer, data.chat_template), data.skips_bad_rows
            ),
            form=data.format,
        )
        for note in corpus.notes:
            self.reporter.note(f"warning: {note}")
        return corpus

    def _claim(self) -> None:
        adopt = self.run.checkpoint.adopt
        claimed = claim_checkpoints(self.places.checkpoints, self.run.owner, adopt=adopt)
        if claimed.moved is not None:
            self.reporter.note(
                f"the checkpoints here belong to another job, or to other settings: moved to {claimed.moved}, where "
                "they stay until you remove them"
            )
        if claimed.brought_back is not None:
            self.reporter.note(
                f"this run goes on from its own checkpoints, which were in {claimed.brought_back}"
            )
        self.fence.take()

    def _plan(self, together: Together) -> tuple[ModelRecipe, MemoryPlan]:
        """Make the memory plan before anything is allocated, tokenized or downloaded."""
        self._phase("Preparing", "planning memory")
        import torch

        from busbar.workloads.machine.limits import (
            CUDA_RESERVE_BYTES,
            RESERVE_BYTES,
            SUPERVISOR_BYTES,
            host_limit_bytes,
        )
        from busbar.workloads.machine.streams import enforce_device_limit, make_repeatable
        from busbar.workloads.training import disk_room, model
        from busbar.workloads.training.choice import make_plan
        from busbar.workloads.training.demand import COPIES
        from busbar.workloads.training.identity import same_plan
        from busbar.workloads.training.memory_report import MemoryReport
        from busbar.workloads.training.plan import MemoryLimits
        from busbar.workloads.training.tokenizer import end_of_text_id, load_tokenizer, table_size

        torch.set_num_threads(self.run.threads)
        vocabulary, separator = self.spec.tokenizer.vocab_size or 0, 0
        if self.places.tokenizer is not None:
            tokenizer = load_tokenizer(self.places.tokenizer)
            vocabulary, separator = table_size(tokenizer), end_of_text_id(tokenizer, self.places.tokenizer)
        recipe = model.open_model(self.spec, self.places.model, vocabulary, separator)
        on_cpu = self.device.type == "cpu"
        make_repeatable(self.device)
        limit, free = self.spec.device_memory_bytes, None
        if not on_cpu:
            free = together.least(int(torch.cuda.mem_get_info(self.device)[0] * 0.95))
            limit = free if limit is None or free is None else min(limit, free)
        demand = model.measure_demand(recipe, self.spec, self.device, together.size)
        reserve = RESERVE_BYTES if on_cpu else CUDA_RESERVE_BYTES
        host = host_limit_bytes(reserve=reserve, processes=self.run.world.per_pod)
        if (copies := self.run.copies) is not None:
            demand = replace(demand, memory_copies=COPIES, parity=self.parity)
            if host is not None:  # what an earlier trainer copied is in the plan
                host = max(0, host + copies.bytes - SUPERVISOR_BYTES)
        host = together.least(host)
        limits = MemoryLimits(limit, host, on_cpu, free, self.spec.scratch_disk_bytes)
        plan = make_plan(demand, limits, self.spec.mode)
        disk_room.check_disks(self.run, plan, demand, self.reporter.note)
        if not on_cpu:
            enforce_device_limit(limit, torch.cuda.get_device_properties(self.device).total_memory)
        self.reporter.note(plan.explain())
        self.plan, self.demand = plan, demand
        self.status.update(mode=plan.mode, activations=plan.activations)
        self.memory = MemoryReport(plan, demand, self.run.checkpoint.keep, self.status)
        together.agree(same_plan(self.spec, plan))
        return recipe, plan

    @property
    def parity(self) -> int:
        """Ranks that may be lost at once without losing the copies in memory."""
        memory = self.run.checkpoint.memory
        world = self.run.world
        return 0 if memory is None else memory.parity_of(world.pods) * world.per_pod

    def _predict(self, recipe: ModelRecipe, plan: MemoryPlan, together: Together) -> None:
        """Say how long a step and a checkpoint will take; with the weights on the host nothing is predicted. On a CPU it is not
        asked: what the small models leave in the heap is in no phase of the plan, and two of six runs under its limits
        failed by it."""
        asked = self.device.type != "cpu" if self.run.predicts is None else self.run.predicts
        if not asked or plan.weight_slots:
            return
        self._phase("Preparing", "measuring the machine")
        from busbar.workloads.training.division import divide
        from busbar.workloads.training.prediction import predict

        batch = self.spec.batch
        division = divide(
            batch.sequences, batch.micro_batch, together.size, self.spec.order, self.spec.sequence
        )
        try:
            found = self._probe(recipe, plan, together)
        except ValueError as problem:
            self.reporter.note(f"seconds per step are not predicted for this model: {problem}")
            return
        self.disk_bytes_per_s = found.disk_bytes_per_s
        if plan.offloaded:
            self.link_bytes_per_s = {"load": found.load_bytes_per_s, "store": found.store_bytes_per_s}
        self.prediction = predict(plan, self.demand, found, division)
        self.reporter.note(self.prediction.explain())
        self.status.update(timing=self.prediction.to_json())

    def _probe(self, recipe: ModelRecipe, plan: MemoryPlan, together: Together) -> Probe:
        """What this machine does, and those of the other ranks. Raises ValueError, alike on all ranks, where that is not known."""
        import torch

        from busbar.workloads.training import gang_probe, probe

        folder, spec, demand, rank = self.places.checkpoints, self.spec, self.demand, together.rank
        hosts = together.ranks.gather(platform.node()) if together.size > 1 else ()
        return gang_probe.together(
            together.ranks,
            folder / (f"probe-{rank}.json" if rank else "probe.json"),
            probe.key_of(spec, recipe, plan, self.device, self.run.threads, hosts),
            lambda: probe.measure(spec, recipe, demand, plan, self.device, folder, rank=rank),
            lambda: gang_probe.measure_links(
                together.ranks,
                self.device,
                max(group.parameters for group in demand.groups),
                getattr(torch, demand.gradient_dtype or demand.dtype),
                getattr(torch, demand.dtype),
                fixed=demand.fixed_order,
            ),
        )

    def _check_token_room(self, there: int, missing: int) -> None:
        """Refuse a run for whose tokens there is no room beside its other files, before they are made."""
        from busbar.workloads.training.disk_room import check_files

        self.memory.has_tokens(there + missing)
        check_files(self.run, self.plan, self.demand, missing)

    def _prepare(self, corpus: Corpus, together: Together) -> Prepared:
        from busbar.workloads.training.preparation import prepare

        self._phase("Preparing", "training the tokenizer and packing tokens")
        cache = self.places.checkpoints / "prepared"
        if not together.first:
            together.wait("prepared")
        prepared = prepare(
            self.spec,
            corpus,
            self.places.tokenizer,
            cache,
            self._share,
            makes=together.first,
            peers=together if together.size > 1 else None,
            confirm=self.fence.check,
            room=self._check_token_room,
        )
        if together.first:
            together.tell("prepared")
        if together.first or self.plan.sharding == PARAMETERS:
            self.held_out = self._hold_out(corpus)
        rows, length = prepared.packed.there(0).shape
        more = "" if prepared.rows.over else " to begin with, and more beside the first steps,"
        self.reporter.note(
            f"{rows} sequences of {length} tokens{more} from {len(corpus.train)} files; {len(corpus.holdout)} held out"
        )
        return prepared

    def _tell_bad_rows(self, prepared: Prepared) -> None:
        """Once everything was read."""
        prepared.wait_for_all()
        if prepared.bad.count:
            self.reporter.note(
                f"warning: {prepared.bad.count} rows are not trained on (data.onBadRow: skip), the first: {prepared.bad.first}"
            )
        self.status.update(badRows=prepared.bad.count)

    def _hold_out(self, corpus: Corpus) -> list[Row]:
        """What will be scored at the end; read at the start, so that a bad row there does not end a finished run."""
        if self.spec.evaluation is None:
            return []
        from busbar.workloads.training.evaluation import select_documents
        from busbar.workloads.training.packing import document_order

        return select_documents(document_order(corpus.holdout, self.spec.seed))

    def _build(self, recipe: ModelRecipe, plan: MemoryPlan, together: Together) -> Trainer:
        from busbar.workloads.training.disk_room import scratch_folder
        from busbar.workloads.training.model import model_report
        from busbar.workloads.training.trainer import Trainer

        self._phase("Preparing", "building the model")
        trainer = Trainer(
            self.spec, recipe, plan, self.device, ranks=together.ranks, scratch=scratch_folder(self.places)
        )
        self.cell = {
            "class": class_of(recipe.config.to_dict(), self.spec),
            "mode": plan.mode,
            "accelerator": self.device.type,
        }
        self.flops_per_token = flops_per_token(recipe.config.to_dict(), self.spec)
        report = model_report(trainer.model, self.spec.adapter)
        self.status.update(model=report)
        if self.spec.adapter is not None or self.spec.freeze:
            what = self.spec.adapter or f"frozen are {', '.join(self.spec.freeze)}"
            self.reporter.note(
                f"{what}: {report['trainableParameters']} of {report['parameters']} parameters are trained"
            )
        return trainer

    def _train(self, trainer: Trainer, prepared: Prepared, corpus: Corpus, together: Together) -> None:
        from busbar.workloads.training.async_checkpoint import Saver
        from busbar.workloads.training.identity import facts_of, same_on_all_ranks
        from busbar.workloads.training.loop import Loop
        from busbar.workloads.training.memory_copy import Copier
        from busbar.workloads.training.resume import resume
        from busbar.workloads.training.step_log import Journal

        facts = facts_of(self.run, corpus, prepared, self.device, trainer)
        together.agree(same_on_all_ranks(facts, trainer))
        folder = together.folder(
            self.places.checkpoints, self.run.checkpoint.keep, self.reporter.note, self.fence.check
        )
        lines = self.places.checkpoints / "journal.jsonl" if together.first else None
        journal = Journal(lines, self.run.attempt, self.spec.steps)
        try:
            self._phase("Preparing", "looking for a checkpoint")
            copies = together.copies(self.run.copies, self.parity)
            on_disk = resume(self, trainer, folder, copies, journal, facts)
            together.agree(same_on_all_ranks({"step": trainer.done}, trainer))
            folder.pace.probed = self.disk_bytes_per_s
            if trainer.link is not None:
                for direction, probed in self.link_bytes_per_s.items():
                    trainer.link.rates[direction].probed = probed

            def durable(step: int, saved_at: float, size: int) -> None:
                self.status.durable_checkpoint(step, saved_at, size, folder.pace.said())
                if warning := folder.pace.warning():
                    self.reporter.note(warning)

            saver = Saver(folder, trainer.snapshot, facts, journal.sync, durable, together.ranks.gather)
            saver.durable_step = on_disk
            copier = Copier.of(self.run, copies, trainer.snapshot, facts)
            self._phase("Training", f"from step {trainer.done} of {self.spec.steps}")
            self.control.open()
            with closing(saver), closing(copier), together.watched():
                Loop(self, trainer, saver, copier, journal, prepared, together).go()
            if together.first:
                self.fingerprint = {"losses": journal.digest(trainer.done)}
        finally:
            self.control.close("training is over; its last state is already saved")
            journal.close()

    def _evaluate(
        self, trainer: Trainer, prepared: Prepared, corpus: Corpus, together: Together
    ) -> dict[str, Any] | None:
        wanted = self.spec.evaluation
        if wanted is None:
            return None
        if not corpus.holdout:
            self.reporter.note("no bits per byte: no file is held out; raise data.holdoutFraction")
            return None
        from busbar.workloads.training import evaluation
        from busbar.workloads.training.encoding import encoder
        from busbar.workloads.training.tokenizer import bytes_decoder, end_of_text_id

        self._phase("Evaluating", "bits per byte on held-out files")
        if not self.held_out:
            self.reporter.note("no bits per byte: the held-out files are empty")
            return None
        encode = encoder(prepared.tokenizer)
        separator = end_of_text_id(prepared.tokenizer, self.places.tokenizer)
        sequence, micro_batch = self.spec.data.sequence_length, self.spec.batch.micro_batch
        if not together.first:  # for rank 0, which gathers this rank's part of the weights meanwhile
            evaluation.rows_bits(
                trainer.model, encode, separator, sequence, micro_batch, self.held_out, self.device
            )
            return None
        decode = bytes_decoder(prepared.tokenizer)
        seen = prepared.packed.seen_runs(self.spec.steps, self.spec.batch.sequences)
        scores = evaluation.evaluate(
            trainer.model,
            encode,
            separator,
            sequence,
            micro_batch,
            self.held_out,
            evaluation.training_text(seen, decode),
            wanted.ngram_order,
            self.device,
            self._share,
        )
        if not math.isfinite(scores.bits_per_byte):
            self.reporter.note("no bits per byte: the model's weights are not numbers; the training diverged")
            return None
        document = scores.to_json()
        self.status.update(evaluation=document)
        self.reporter.note(
            f"bits per byte on {scores.held_out_bytes} held-out bytes: model {scores.bits_per_byte:.3f}, "
            f"order-{scores.ngram_order} n-gram {scores.ngram_bits_per_byte:.3f}, "
            f"bigram {scores.bigram_bits_per_byte:.3f}"
        )
        return document

    def _export(self, trainer: Trainer, prepared: Prepared, evaluation: dict[str, Any] | None) -> None:
        from busbar.workloads.training.export import digest_of, export, trained_weights

        self.fingerprint["weights"] = digest_of(trained_weights(trainer))
        self.status.update(fingerprint=self.fingerprint)
        self.fence.check()
        self._phase("Saving", f"writing the model to {self.places.output}")
        facts = {
            "job": self.run.name,
            "steps": self.spec.steps,
            "evaluation": evaluation,
            "fingerprint": self.fingerprint,
            "tokenizer": prepared.tokenizer_hash,
            "lostSteps": self.status.to_json(losses=False)["lostSteps"],
        }
        if self.spec.adapter is not None:
            facts |= {"adapter": str(self.spec.adapter), "base": self.spec.model.uri}
        if self.spec.freeze:
            facts |= {"freeze": list(self.spec.freeze), "base": self.spec.model.uri}
        export(
            trainer.model,
            prepared.tokenizer,
            self.places.output,
            self.spec.data.sequence_length,
            facts,
            self.places.tokenizer,
            self.spec.adapter,
            self.fence.check,
            self.spec.data.chat_template,
            ((name, whole) for name, _, whole in trainer.weights()) if trainer.writes_in_turn else None,
        )
