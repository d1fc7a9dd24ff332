"""An operator that dies loses no joules and counts none twice, whatever it had written by then."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from tests.operator.energy.test_ledger import NODES, Row, caches, hold, own

from busbar.kube.informer import Key
from busbar.kube.types.training_status import TrainingJobStatus
from busbar.operator.energy.checkpoint import Checkpoint, MeterCut, NodeCut, decode, encode
from busbar.operator.energy.ledger import UNASSIGNED, Ledger
from busbar.operator.power.metrics import PowerMetrics
from busbar.operator.power.readings import Reading
from busbar.operator.watch.projections import Exit

ACCOUNTS = ("uid-train", "uid-a", "uid-b", "uid-row", "uid-row" + UNASSIGNED, "uid-red", "uid-blue")


class Mortal(Row):
    """A row whose operator can die: what was written stays, and the agents count on."""

    def __init__(self, seed: int = 0) -> None:
        of = caches()
        own(of, "a", "train")
        super().__init__(of)
        self.rng = random.Random(seed)
        self.told: dict[str, float] = {}
        self.kept: bytes | None = None
        self.skew_s = 0.0
        self.ledger = self.born()

    def born(self) -> Ledger:
        """A ledger in a process of its own, with a monotonic clock of its own."""
        return Ledger(self.caches, PowerMetrics(CollectorRegistry()), 3.0, self.wall_s)

    def wall_s(self) -> float:
        return 1_790_000_000.0 + self.second + 0.9 + self.skew_s

    def write(self, uid: str) -> None:
        """A status: sometimes refused, sometimes done without an answer (which is the same to the next look)."""
        total = self.ledger.accounts.total(uid, self.told.get(uid))
        if total is None or total == self.told.get(uid):
            return
        self.ledger.accounts.sent(uid, total)
        if self.rng.random() < 0.8:
            self.told[uid] = total
            self.tell(uid, total)

    def tell(self, uid: str, total: float) -> None:
        """The status as the caches have it."""
        of = self.caches
        if uid == "uid-train" and (job := of.jobs.items.get(Key("a", "train"))) is not None:
            job.status = TrainingJobStatus.model_validate(
                {"phase": "Running", "usage": {"energyJoules": total}}
            )
        elif uid in ("uid-a", "uid-b"):
            tenant = of.tenants.items[Key("", uid[-1])]
            of.tenants.items[Key("", uid[-1])] = type(tenant).model_validate(
                {**tenant.to_wire(), "status": {"usage": {"energyJoules": total}}}
            )
        else:
            name, _, part = uid.removeprefix("uid-").partition("/")
            domain = of.power_domains.items[Key("", name)]
            fields = domain.status.to_wire() if domain.status is not None else {}
            fields["unassignedJoules" if part else "energyJoules"] = total
            of.power_domains.items[Key("", name)] = type(domain).model_validate(
                {**domain.to_wire(), "status": fields}
            )

    def cut(self) -> None:
        data, left_out = encode(self.ledger.checkpoint(self.second + 0.9))
        assert left_out == 0
        self.kept = data

    def die(self) -> None:
        """Nothing but statuses and the checkpoint is left."""
        self.readings = {}
        self.ledger = self.born()
        if self.kept is not None:
            self.ledger.resume(decode(self.kept), self.second + 0.9)

    def away(self, seconds: int) -> None:
        """No operator runs, and the agents count on."""
        for _ in range(seconds):
            self.draw()

    def finish(self) -> dict[str, float]:
        """All totals, written."""
        for uid in ACCOUNTS:
            total = self.ledger.accounts.total(uid, self.told.get(uid))
            self.ledger.accounts.sent(uid, total)
            self.told[uid] = total or 0.0
        return self.told


def test_a_killed_operator_goes_on_from_its_checkpoint_to_the_joule() -> None:
    """Ten seconds after the checkpoint, five of them after the last statuses, and 20 s without an operator."""
    row = Mortal()
    hold(row.caches, "a", "train", "red-0", 8)
    for _ in range(60):
        row.tick()
    row.cut()
    for second in range(10):
        row.tick()
        if second == 5:
            for uid in ACCOUNTS:
                row.write(uid)
    row.die()
    row.away(20)
    for _ in range(3):
        row.tick()
    told = row.finish()
    assert told["uid-row"] == pytest.approx(sum(row.truth_j.values()), abs=0.5)
    assert told["uid-train"] == pytest.approx(row.truth_j["red-0"], abs=0.5)
    assert told["uid-a"] == told["uid-train"]
    assert told["uid-a"] + told["uid-row" + UNASSIGNED] == pytest.approx(told["uid-row"], abs=0.1)


@settings(max_examples=10, derandomize=True, deadline=None)
@given(seed=st.integers(0, 100_000))
def test_wherever_it_dies_nothing_is_lost_and_nothing_is_counted_twice(seed: int) -> None:
    """Kills at any second, several with one checkpoint, some before the nodes were heard again."""
    row = Mortal(seed)
    hold(row.caches, "a", "train", "red-0", 8)
    hold(row.caches, "b", "own", "red-1", 8, "")
    row.tick()  # each meter begins with its first reading
    row.tick()
    row.cut()
    for _ in range(80):
        row.tick(frozenset(name for name in NODES if row.rng.random() < 0.1))
        for uid in ACCOUNTS:
            if row.rng.random() < 0.2:
                row.write(uid)
        if row.rng.random() < 0.1:
            row.cut()
        if row.rng.random() < 0.05:
            row.die()
            row.away(row.rng.choice((0, 3, 40)))
            row.skew_s += row.rng.choice((0.0, 7.0, -30.0))  # a clock that is set
    for _ in range(15):  # what was estimated too much in a silence is left out of what follows
        row.tick()
    told = row.finish()
    whole = sum(row.truth_j.values())
    assert told["uid-row"] == pytest.approx(whole, abs=0.5)
    assert told["uid-red"] + told["uid-blue"] == pytest.approx(told["uid-row"], abs=0.5)
    assert told["uid-train"] == pytest.approx(row.truth_j["red-0"], abs=0.5)
    assert told["uid-a"] == pytest.approx(told["uid-train"], abs=0.1)
    assert told["uid-b"] == pytest.approx(row.truth_j["red-1"], abs=0.5)
    tenants = told["uid-a"] + told["uid-b"]
    assert tenants + told["uid-row" + UNASSIGNED] == pytest.approx(told["uid-row"], abs=0.5)


def test_without_a_checkpoint_it_goes_on_from_the_statuses() -> None:
    row = Mortal()
    hold(row.caches, "a", "train", "red-0", 8)
    for _ in range(5):
        row.tick()
    row.rng.seed(1)
    for uid in ACCOUNTS:
        row.write(uid)
    before = dict(row.told)
    row.die()
    for _ in range(3):
        row.tick()
    assert row.finish()["uid-row"] > before["uid-row"] > 0


def moment(row: Mortal, second: float) -> datetime:
    return datetime.fromtimestamp(row.wall_s() - row.second + second, UTC)


def test_a_pod_pays_for_the_part_of_the_silence_in_which_it_held_the_boards() -> None:
    """The first half is the job's, whose pod has ended; then the boards are nobody's, and then another tenant's."""
    row = Mortal()
    hold(row.caches, "a", "train", "red-0", 8)
    for _ in range(60):
        row.tick()
    row.cut()
    row.die()
    at_cut = row.truth_j["red-0"]
    row.away(100)
    pods = row.caches.pods.items
    ended = Exit(0, "Completed", "", moment(row, 110.0))
    pods[Key("a", "train")] = replace(pods[Key("a", "train")], phase="Succeeded", exit=ended)
    hold(row.caches, "b", "own", "red-0", 8, "")
    pods[Key("b", "own")] = replace(pods[Key("b", "own")], started_at=moment(row, 135.0))
    row.tick()
    told = row.finish()
    drawn = row.truth_j["red-0"] - at_cut
    assert told["uid-train"] - at_cut == pytest.approx(0.5 * drawn, rel=0.05)
    assert told["uid-b"] == pytest.approx(0.25 * drawn, rel=0.08)
    assert told["uid-a"] + told["uid-b"] + told["uid-row" + UNASSIGNED] == pytest.approx(
        told["uid-row"], abs=0.1
    )


def test_a_job_that_began_after_the_checkpoint_is_not_charged_twice() -> None:
    row = Mortal()
    for _ in range(10):
        row.tick()
    row.cut()
    before = row.truth_j["red-0"]
    hold(row.caches, "a", "train", "red-0", 8)
    for _ in range(20):
        row.tick()
    row.write("uid-train")
    row.told.setdefault("uid-train", row.finish()["uid-train"])
    row.die()
    pods = row.caches.pods.items
    pods[Key("a", "train")] = replace(pods[Key("a", "train")], started_at=moment(row, 10.9))
    for _ in range(3):
        row.tick()
    assert row.finish()["uid-train"] == pytest.approx(row.truth_j["red-0"] - before, rel=0.1)


def test_a_checkpoint_made_before_the_nodes_are_heard_again_has_nothing_that_is_counted_again() -> None:
    """Statuses were first written after the checkpoint."""
    row = Mortal()
    hold(row.caches, "a", "train", "red-0", 8)
    row.tick()
    row.cut()
    for _ in range(5):
        row.tick()
    while not {"uid-row", "uid-a", "uid-train"} <= row.told.keys():
        for uid in ACCOUNTS:
            row.write(uid)
    row.die()
    row.cut()
    row.die()
    row.tick()
    assert row.finish()["uid-row"] == pytest.approx(sum(row.truth_j.values()), abs=0.5)


def test_joules_of_the_silence_are_not_watts_of_now_and_not_in_the_metric() -> None:
    row = Mortal()
    hold(row.caches, "a", "train", "red-0", 8)
    for _ in range(60):
        row.tick()
    row.cut()
    row.die()
    row.away(600)
    row.tick()
    assert row.ledger.watts("a") == 0
    row.tick()
    assert row.ledger.watts("a") < 8000


def test_an_old_checkpoint_gives_totals_that_no_status_has_and_takes_nothing() -> None:
    row = Mortal()
    hold(row.caches, "a", "train", "red-0", 8)
    hold(row.caches, "b", "own", "red-1", 8, "")
    for _ in range(60):
        row.tick()
    row.cut()
    cut = row.ledger.accounts.total("uid-a", None)
    for _ in range(60):
        row.tick()
    while "uid-b" not in row.told:
        row.write("uid-b")
    row.die()
    row.away(1000)
    row.die()
    for _ in range(3):
        row.tick()
    told = dict(row.told)
    assert row.finish()["uid-a"] > (cut or 0) > 0
    assert row.told["uid-b"] > told["uid-b"] + 1000


def many(jobs: int, nodes: int) -> Checkpoint:
    rng = random.Random(1)
    boards = [[f"GPU-{rng.getrandbits(128):032x}" for _ in range(8)] for _ in range(nodes)]
    return Checkpoint(
        at_s=1.79e9,
        totals={f"{rng.getrandbits(128):032x}": round(rng.random() * 1e9, 3) for _ in range(jobs)},
        nodes={
            f"node-{number}": NodeCut(
                f"{rng.getrandbits(128):032x}",
                rng.random() * 1e6,
                0.5,
                0.5,
                {uuid: MeterCut(round(rng.random() * 1e9, 3), 412.5, 0.0) for uuid in uuids},
            )
            for number, uuids in enumerate(boards)
        },
    )


def test_two_thousand_jobs_on_a_thousand_nodes_fit_into_one_object() -> None:
    checkpoint = many(2000, 1000)
    data, left_out = encode(checkpoint)
    assert left_out == 0
    assert decode(data) == checkpoint


def test_what_does_not_fit_leaves_nodes_out_and_never_totals() -> None:
    checkpoint = many(200, 50)
    data, left_out = encode(checkpoint, most_bytes=12_000)
    found = decode(data)
    assert found.totals == checkpoint.totals
    assert 0 < len(found.nodes) == 50 - left_out < 50
    with pytest.raises(ValueError, match="200 totals"):
        encode(checkpoint, most_bytes=1000)


@pytest.mark.parametrize(
    "data", [b"", b"{}", encode(many(3, 1))[0][:-5], encode(many(3, 1))[0].replace(b"x", b"y", 1)[1:]]
)
def test_a_broken_checkpoint_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode(data)


def test_a_node_that_is_not_heard_stays_in_the_next_checkpoint() -> None:
    row = Mortal()
    for _ in range(10):
        row.tick()
    row.cut()
    row.die()
    for _ in range(5):
        row.tick(frozenset({"red-1"}))
    row.cut()
    assert row.kept is not None
    cut = decode(row.kept).nodes["red-1"]
    assert cut.read_ago_s == pytest.approx(5.1, abs=0.2)
    assert isinstance(row.readings["red-0"], Reading)
