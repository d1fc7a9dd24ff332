"""The seconds of a step are put together from what blocks take, and the status says them beside the measured ones."""

from __future__ import annotations

import errno
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.gang import run_gang
from tests.training.small import LLAMA, VOCABULARY, engine, manifest, with_text
from tests.training.test_bit_equality import CPU, plan_for

from busbar.scheduler.fit.exchange import Link, Links
from busbar.workloads.machine.direct_file import DirectFile
from busbar.workloads.training import probe
from busbar.workloads.training.choice import make_plan
from busbar.workloads.training.control import Control
from busbar.workloads.training.demand import Demand, GroupSize
from busbar.workloads.training.division import Division, divide
from busbar.workloads.training.environment import run_from_manifest
from busbar.workloads.training.gang_probe import measure_links, together
from busbar.workloads.training.groups import blocks
from busbar.workloads.training.job import parse_engine
from busbar.workloads.training.meeting import StoreMeeting
from busbar.workloads.training.model import ModelRecipe, measure_demand, open_model
from busbar.workloads.training.plan import MemoryLimits, lay_out
from busbar.workloads.training.prediction import PassTimes, Probe, predict
from busbar.workloads.training.ranks import Alone, Gang
from busbar.workloads.training.report import Lines
from busbar.workloads.training.run import run
from busbar.workloads.training.status import Status

BLOCK = PassTimes(forward_s=1.0, backward_s=2.0, update_s=0.25, parameters=2**20)
AROUND = PassTimes(forward_s=0.5, backward_s=1.0, update_s=0.5, parameters=2**20)
NAMES = ("embedding", "block-0", "block-1", "block-2", "head")
DEMAND = Demand(tuple(GroupSize(name, 2**20) for name in NAMES), "float32", 1, 0)
FAST = Probe(BLOCK, AROUND, 1e12, 1e12, 2**20)


def micro_batches(count: int, ranks: int = 1, order: str = "fast") -> Division:
    return divide(count, 1, ranks, order)


def laid_out(mode: str, host: int | None = None, **changes: Any) -> tuple[Any, Demand]:
    demand = replace(DEMAND, **changes)
    groups = 0 if mode == "resident" else len(NAMES)
    return lay_out(demand, MemoryLimits(None, host, False), mode, groups), demand


def test_a_resident_step_is_its_blocks_what_is_around_them_and_the_update() -> None:
    made = predict(*laid_out("resident"), FAST, micro_batches(1))
    assert made.compute_s == pytest.approx(3 * 3 + 1.5)
    assert made.step_s == pytest.approx(3 * 3 + 1.5 + 3 * 0.25 + 0.5)
    assert predict(*laid_out("resident"), FAST, micro_batches(4)).compute_s == pytest.approx(4 * 10.5)


def test_a_slow_link_counts_as_the_schedule_says() -> None:
    state = 8 * 2**20  # of each of the five groups
    slow = replace(FAST, load_bytes_per_s=state / 1.0, store_bytes_per_s=state / 1.0)
    found = {
        schedule: predict(*laid_out("optimizer-offload", schedule=schedule), slow, micro_batches(1))
        for schedule in ("auto", "gated", "blocking")
    }
    assert found["auto"] == found["gated"]
    assert found["blocking"].step_s > 10.5 + 5
    assert 10.5 <= found["gated"].step_s < found["blocking"].step_s - 2


def test_a_checkpoint_holds_training_up_for_what_its_buffers_and_the_step_do_not_hide() -> None:
    roomy, demand = laid_out("resident")
    assert predict(roomy, demand, FAST, micro_batches(1)).durable_s == pytest.approx(
        roomy.checkpoint_bytes / 2**20
    )
    assert predict(roomy, demand, FAST, micro_batches(1)).stall_s == 0
    tight, demand = laid_out("resident", host=0)
    held = tight.snapshot_blocks * tight.snapshot_block_bytes
    assert held < tight.checkpoint_bytes
    expected = (tight.checkpoint_bytes - held) / 2**20 - 10.5
    assert predict(tight, demand, FAST, micro_batches(1)).stall_s == pytest.approx(expected)


class Clocked(ModelRecipe):
    """Makes models whose blocks and output layer move a clock on."""

    now = 0.0

    def build(self) -> torch.nn.Module:
        model = super().build()
        head: Any = model.lm_head
        for module, forward, backward in [
            *((block, 1.0, 2.0) for block in blocks(model)),
            (head, 4.0, 8.0),
        ]:
            module.register_forward_hook(lambda *_, by=forward: self.move(by))
            module.register_full_backward_hook(lambda *_, by=backward: self.move(by))
        return model

    @classmethod
    def move(cls, by: float) -> None:
        cls.now += by


@pytest.mark.parametrize("mode", ["resident", "optimizer-offload"])
@pytest.mark.parametrize("layers", [1, 2, 5])
def test_one_and_two_blocks_tell_the_time_of_a_block_and_of_the_rest(
    layers: int, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = parse_engine(engine(mode=mode, model={"config": {**LLAMA, "num_hidden_layers": layers}}))
    plain = open_model(spec, None, VOCABULARY, 0)
    plan, demand = plan_for(spec, plain, mode), measure_demand(plain, spec, CPU)
    monkeypatch.setattr(probe, "_now", lambda device: Clocked.now)
    found = probe.measure(spec, Clocked(plain.config, None, plain.dtype, 0), demand, plan, CPU, tmp_path)
    made = predict(
        plan, demand, replace(found, load_bytes_per_s=1e15, store_bytes_per_s=1e15), micro_batches(2)
    )
    assert made.compute_s == pytest.approx(2 * (layers * 3 + 12))
    assert found.disk_bytes_per_s > 0
    assert (found.load_bytes_per_s == float("inf")) is (mode == "resident")
    assert list(tmp_path.iterdir()) == []


LINKS = Links(Link(0.0, 4.0 * 2**20), Link(0.0, 8.0 * 2**20), busy=0.25)
"""Gradients of a group of DEMAND, of which two ranks hand over a half, take half a second; its weights a quarter."""
SUMS_BESIDE, GATHERS_BESIDE = 2 * 0.5 + 3 * 0.5 / 4, 2 * 0.25 + 3 * 0.25 / 4


@pytest.mark.parametrize(
    ("sharding", "count", "order", "expected"),
    [
        # beside the passes all but two groups': the embedding, which has no time of its own, hides nothing of the first
        # block's, and nothing hides its own. Of the three others a quarter of the time is lost
        ("optimizer", 2, "fast", SUMS_BESIDE + GATHERS_BESIDE),
        ("optimizer", 4, "fast", 10.5 + SUMS_BESIDE + GATHERS_BESIDE),
        # two leaves of a rank are added up when both are there, so nothing of gradients is beside the passes
        ("optimizer", 4, "fixed", 10.5 + 5 * 0.5 + GATHERS_BESIDE),
        ("gradients", 4, "fast", 10.5 + 2 * 5 * 0.5 + GATHERS_BESIDE),
        # forward and backward 3 blocks each, less one and one that are in the slot still; and what is around them
        ("parameters", 4, "fast", 10.5 + 2 * 5 * 0.5 + (2 + 4 * 3 - 2 - 1) * 0.25),
    ],
)
def test_a_step_of_a_gang_has_its_exchanges(sharding: str, count: int, order: str, expected: float) -> None:
    plan, demand = laid_out("resident", ranks=2, sharding=sharding, fixed_order=order == "fixed")
    found = predict(plan, demand, replace(FAST, links=LINKS), micro_batches(count, 2, order))
    own_update = (3 * 0.25 + 0.5) / 2
    assert found.step_s == pytest.approx(10.5 + own_update + expected)
    assert found.exposed_s == pytest.approx(10.5 + expected - found.compute_s)
    assert found.exchange_s >= found.exposed_s
    assert found.durable_s == pytest.approx(plan.checkpoint_bytes / 2 / 2**20)
    assert "go to the other ranks in" in found.explain()


def test_weights_that_are_updated_before_the_next_pass_comes_to_them_are_gathered_beside_it() -> None:
    plan, demand = laid_out("resident", ranks=2, schedule="gated")
    found = predict(plan, demand, replace(FAST, links=LINKS), micro_batches(2, 2))
    first_update = (3 * 0.25 + 0.5) / 2 / 5  # of the first group, which alone nothing hides
    assert found.step_s == pytest.approx(10.5 + first_update + SUMS_BESIDE + GATHERS_BESIDE)


def test_a_gang_whose_links_are_not_known_has_no_prediction() -> None:
    with pytest.raises(ValueError, match="what is between the ranks was not measured"):
        predict(*laid_out("resident", ranks=2), FAST, micro_batches(2, 2))


def test_what_is_around_the_blocks_counts_where_nothing_of_it_is_trained() -> None:
    inner = tuple(group for group in DEMAND.groups if group.is_block)
    found = predict(*laid_out("resident", groups=inner), FAST, micro_batches(1))
    assert found.compute_s == pytest.approx(3 * 3 + 1.5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_a_backward_pass_a_step_is_two_forward_passes(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = parse_engine(
        engine(mode="resident", dtype=dtype, optimizer={"name": "ZerothOrder", "learningRate": 1e-6})
    )
    plain = open_model(spec, None, VOCABULARY, 0)
    demand = measure_demand(plain, spec, CPU)
    plan = make_plan(demand, MemoryLimits(None, None, True), "resident")
    monkeypatch.setattr(probe, "_now", lambda device: Clocked.now)
    found = probe.measure(spec, Clocked(plain.config, None, plain.dtype, 0), demand, plan, CPU, tmp_path)
    made = predict(plan, demand, found, micro_batches(2))
    assert made.compute_s == pytest.approx(2 * 2 * (LLAMA["num_hidden_layers"] * 1 + 4))


def test_a_zeroth_order_run_says_what_it_predicted(tmp_path: Path) -> None:
    timing = start(tmp_path, mode="resident", optimizer={"name": "ZerothOrder", "learningRate": 1e-6})[0][
        "timing"
    ]
    assert timing["predicted"]["step"] > 0
    assert timing["ratio"] > 0


def test_what_was_measured_is_kept_for_the_same_machine_and_model(tmp_path: Path) -> None:
    path, made = tmp_path / "probe.json", list[str]()
    fast = replace(FAST, links=LINKS)

    def ask(key: str) -> Probe:
        def make() -> Probe:
            made.append(key)
            return fast

        return together(Alone(), path, key, make, lambda: LINKS)

    assert ask("one") == ask("one") == fast
    assert made == ["one"]
    ask("another")
    path.write_text("{")
    assert ask("another") == fast
    assert made == ["one", "another", "another"]
    assert json.loads(path.read_text())["key"] == "another"


def probed_apart(gang: Gang, meeting: StoreMeeting, folder: Path) -> dict[str, Any]:
    """Ranks of which one is slower, has lost its file, and at last cannot be measured."""
    path, measured = folder / f"{gang.rank}.json", list[str]()

    def own(why: str = "") -> Probe:
        measured.append(why)
        if why and gang.rank == 1:
            raise OSError(why)
        return replace(FAST, block=replace(BLOCK, forward_s=1.0 + gang.rank))

    def links() -> Links:
        return measure_links(gang, CPU, 4096, torch.float32, torch.bfloat16, fixed=gang.size == 2)

    state = torch.get_rng_state()
    first = together(gang, path, "key", own, links)
    again = together(gang, path, "key", own, links)
    if gang.rank == 0:
        path.unlink()
    anew = together(gang, path, "key", own, links)
    try:
        together(gang, path, "other", lambda: own("no such block"), links)
        said = ""
    except ValueError as problem:
        said = str(problem)
    drawn = not torch.equal(state, torch.get_rng_state())
    return {
        "first": first,
        "again": again,
        "anew": anew,
        "measured": len(measured),
        "said": said,
        "drawn": drawn,
    }


@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_count_with_what_the_slowest_has_measured(size: int, tmp_path: Path) -> None:
    every = run_gang(size, probed_apart, tmp_path, tmp_path)
    for found in every:
        assert found["first"] == found["again"] == every[0]["first"]
        assert found["anew"] == every[0]["anew"]
        assert found["first"].block.forward_s == size
        links = found["first"].links
        assert min(links.gradients.bytes_per_s, links.weights.bytes_per_s) > 0
        assert 0 <= links.busy <= 1
        assert (found["said"], found["drawn"], found["measured"]) == ("no such block", False, 3)


def start(claims: Path, predicts: bool | None = True, **changes: Any) -> tuple[dict[str, Any], str]:
    with_text(claims)
    status, log = Status(), io.StringIO()
    assert (
        run(
            replace(run_from_manifest(manifest(**changes), claims, None, {}), predicts=predicts),
            status,
            Control(),
            Lines("small", log),
        )
        == 0
    )
    return status.to_json(), log.getvalue()


def test_a_run_says_what_it_predicted_beside_what_it_measured(tmp_path: Path) -> None:
    said, log = start(tmp_path)
    timing = said["timing"]
    assert all(timing["predicted"][name] is not None for name in ("step", "stall", "durable"))
    assert all(timing["measured"][name] > 0 for name in ("step", "stall", "durable"))
    assert timing["ratio"] == pytest.approx(
        timing["predicted"]["step"] / timing["measured"]["step"], abs=1e-3
    )
    assert "predicted: " in log
    assert (tmp_path / "out/model/checkpoints/probe.json").exists()


def test_on_a_cpu_a_run_predicts_nothing_unless_it_is_asked(tmp_path: Path) -> None:
    assert start(tmp_path, predicts=None)[0]["timing"] is None


def test_a_model_whose_blocks_differ_is_trained_without_a_prediction(tmp_path: Path) -> None:
    said, log = start(tmp_path, freeze=["model.layers.0.*"])
    assert said["timing"] is None
    assert "seconds per step are not predicted for this model: it has no list of blocks that are alike" in log


def test_a_disk_that_refuses_to_be_measured_is_told_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(DirectFile, "write", refuse)
    with pytest.raises(OSError, match="Input/output error"):
        probe._disk(tmp_path, 1 << 20)
    assert list(tmp_path.iterdir()) == []
