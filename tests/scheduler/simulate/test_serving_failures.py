"""Failures in the serving simulator: nothing is lost, what was generated stays, and what is away is no stock."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner

from busbar.scheduler.autoscale.contacts import NOTICED_S
from busbar.scheduler.autoscale.fleet import Decision, FleetSettings, Observation
from busbar.scheduler.autoscale.reach import LIVENESS
from busbar.scheduler.autoscale.step_model import Slo, kv_token_bytes
from busbar.scheduler.errors import ServingModelError, TraceError
from busbar.scheduler.simulate.serving_cluster import Cluster, Moves, ServingSettings
from busbar.scheduler.simulate.serving_command import plan_capacity
from busbar.scheduler.simulate.serving_engine import run
from busbar.scheduler.simulate.serving_failures import Failures, NodePlaces, Outage, nodes_of, outages_csv
from busbar.scheduler.simulate.serving_losses import Losses
from busbar.scheduler.simulate.serving_plan import Plan, Question, answer
from busbar.scheduler.simulate.serving_policies import Ours, Static
from busbar.scheduler.simulate.serving_pools import LLAMA_8B, columns_of, parse_pools, step_models
from busbar.scheduler.simulate.serving_replica import Replica, Request
from busbar.scheduler.simulate.serving_result import ServingResult
from busbar.scheduler.simulate.serving_trace import Buckets, steps

POOLS = parse_pools("A100=2x4@3.67,H100=1x4@7.516")
LENGTHS = [(80, 60), (300, 120), (900, 150)]
LOAD = steps([6, 14, 14], 200, LENGTHS)
END_S = 1e9
MODELS, _ = step_models(POOLS, LLAMA_8B)


def plan(failures: Failures, pools: str = "", **rest: object) -> Plan:
    asked = Question(
        parse_pools(pools) if pools else POOLS,
        Slo(),
        LLAMA_8B,
        warm_up_s=60,
        failures=failures,
        **rest,  # type: ignore[arg-type]
    )
    return answer(LOAD, asked)


def busy(number: int = 4) -> tuple[Replica, list[Request]]:
    """A replica in the middle of its answers, and two requests that it has just got."""
    replica = Replica.of(MODELS["A100"], Slo(), 0.0)
    requests = [Request(0.0, 300, 100 + 10 * i) for i in range(number)]
    for request in requests:
        replica.take(request, 0.0)
    replica.advance(1.0)
    late = [Request(1.0, 500, 50) for _ in range(2)]
    for request in late:
        replica.take(request, 1.0)
    return replica, [*requests, *late]


def test_a_request_that_loses_its_replica_goes_on_behind_its_last_token() -> None:
    replica, requests = busy()
    first = [request.first_token_s for request in requests]
    given = replica.give_up()
    assert sorted(map(id, given)) == sorted(map(id, requests))
    assert (replica.in_flight, replica.reserved, replica.work_s) == (0, 0, 0)
    begun = [request for request in requests if request.generated]
    assert len(begun) == 4
    other = Replica.of(MODELS["H100"], Slo(), 0.0)
    for request in given:
        other.take(request, 2.0)
    other.advance(END_S)
    assert len(other.ended) == len(requests)
    assert [request.first_token_s for request in requests[:4]] == first[:4], (
        "the client has that token already"
    )
    assert all(request.end_s > 2.0 for request in requests)
    assert other.context == pytest.approx(0)
    assert other.work_s == pytest.approx(0)


def test_a_lost_stream_is_computed_anew_and_a_moved_one_is_not() -> None:
    ends = []
    for moved in (False, True):
        replica, requests = busy(1)
        stream = requests[0]
        other = Replica.of(MODELS["A100"], Slo(), 1.0)
        if moved:
            replica.hand_over(stream)
            assert stream.generated > 0
            other.adopt(stream, 2.0)
        else:
            replica.give_up()
            other.take(stream, 2.0)
        other.advance(END_S)
        assert other.ended == [stream]
        ends.append(stream.end_s)
    prompt_s = MODELS["A100"].prompt_s(300)
    assert ends[0] - ends[1] >= prompt_s * 0.9


def test_a_replica_that_hands_over_keeps_its_books() -> None:
    replica, requests = busy()
    assert replica.withdraw() == requests[4:]
    for request in requests[:4]:
        replica.hand_over(request)
    assert (replica.in_flight, replica.batch) == (0, 0)
    assert replica.context == pytest.approx(0)
    assert replica.work_s == pytest.approx(0)
    assert replica.reserved == 0
    replica.advance(END_S)
    assert not replica.ended


def test_random_outages_are_a_renewal_process_and_the_same_for_each_fleet() -> None:
    failures = Failures(node_mtbf_s=36_000, repair_s=3600, seed=3)
    few, more = failures.outages({"A100": 2}, 4e6), failures.outages({"A100": 3}, 4e6)
    assert [row for row in more if row.node < 2] == few
    assert len(few) / 2 == pytest.approx(4e6 / 39_600, rel=0.25)
    own = [row for row in few if row.node == 0]
    assert all(after.at_s > before.until_s for before, after in pairwise(own))
    assert Failures(node_mtbf_s=36_000, seed=4).outages({"A100": 2}, 4e6) != few


def test_replicas_fill_one_node_after_the_other_and_wait_where_none_is_there() -> None:
    places = NodePlaces.of(POOLS, Failures(listed=(Outage(5, "A100", 0, 20), Outage(8, "A100", 0, 9))), 100)
    names = [places.ask("A100", 0.0) for _ in range(5)]
    assert [name for name, _ in places.advance(0.0)] == names
    assert places.failed(4.0) == set()
    places.advance(9.0)
    assert places.failed(9.0) == set(names[:4]), (
        "four of them stand on one node; a shorter outage does not end a longer one"
    )
    assert places.stock() == {"A100": 4, "H100": 4}
    more = [places.ask("A100", 9.0) for _ in range(4)]
    assert [name for name, _ in places.advance(10.0)] == more[:3]
    for name in names[:4]:
        places.give_back(name, 11.0)
    assert places.advance(12.0) == []
    assert [name for name, _ in places.advance(20.0)] == more[3:]
    assert places.stock()["A100"] == 8


def test_no_request_is_lost_by_failures_and_their_delay_counts() -> None:
    found = plan(Failures(listed=(Outage(250, "H100", 0, 400), Outage(300, "A100", 0, 500))))
    after = sum(at >= 60 for at in LOAD.arrivals_s)
    assert all(result.requests == after for result in (*found.results, *found.undisturbed))
    ours, calm = found.results[0], found.undisturbed[0]
    assert ours.told.node_failures == 2
    assert ours.told.lost_replicas > 0
    assert ours.told.resumed > 0
    assert ours.attainment < calm.attainment
    assert calm.told.node_failures == calm.told.resumed == 0


def test_the_same_seed_gives_the_same_failures() -> None:
    failures = Failures(node_mtbf_s=400, replica_mtbf_s=500, repair_s=100, seed=1)
    first, again = plan(failures, policies=("busbar",)), plan(failures, policies=("busbar",))
    assert json.dumps(first.to_json()) == json.dumps(again.to_json())
    told = first.results[0].told
    assert min(told.node_failures, told.replica_failures) > 0


@dataclass(slots=True)
class Watched(Static):
    """Remembers how many replicas it saw ready and starting, by second."""

    seen: dict[float, tuple[int, int]] = field(default_factory=dict)

    def decide(self, seen: Observation) -> Decision | None:
        self.seen[seen.now_s] = seen.ready[self.column.key], seen.starting[self.column.key]
        return Static.decide(self, seen)


def static(
    pool: str, count: int, failures: Failures, seen: dict[float, tuple[int, int]] | None = None
) -> ServingResult:
    buckets = Buckets.of(LOAD)
    columns = columns_of(POOLS, MODELS, buckets, Slo())
    column = next(column for column in columns if column.key == pool)
    settings = ServingSettings(warm_up_s=60, failures=failures)
    policy = Watched(column, count, seen={} if seen is None else seen)
    places = NodePlaces.of(POOLS, failures, LOAD.duration_s, {pool: count})
    return run(LOAD, buckets, columns, MODELS, Slo(), policy, settings, None, places)


def test_a_fixed_fleet_gets_its_replicas_back_elsewhere_and_pays_both_until_the_first_are_given_up() -> None:
    seen: dict[float, tuple[int, int]] = {}
    result = static("A100", 4, Failures(listed=(Outage(200, "A100", 0, 10_000),)), seen)
    assert result.told.lost_replicas == 4
    assert result.peak["A100"] == 8
    assert (result.told.by_gateway, result.told.by_node) == (2, 2)
    times = (209, 210, 239, 240, 270, 271, 300, 301)
    assert [seen[at] for at in times] == [
        (4, 0), (2, 2), (2, 2), (0, 4), (0, 4), (2, 2), (2, 2), (4, 0),
    ], "half by the gateway's word after 10 s, since the operator hears of none; 40 s until the node is known; 60 s to start"  # fmt: skip
    calm = static("A100", 4, Failures())
    assert result.cost - calm.cost == pytest.approx(2 * 3.67 * (89 + 59) / 3600)
    assert 0.5 < result.attainment < 0.9, "70 s of 540 without any replica, and 30 with half"


def test_of_a_replica_whose_node_comes_back_and_the_one_beside_it_one_stays() -> None:
    seen: dict[float, tuple[int, int]] = {}
    result = static("A100", 4, Failures(listed=(Outage(200, "A100", 0, 260),)), seen)
    assert [seen[at] for at in (240, 259, 261, 271, 300, 301)] == [
        (0, 4), (0, 4), (0, 4), (2, 2), (2, 2), (4, 0)
    ], "those that started beside them are there first"  # fmt: skip
    assert result.peak["A100"] == 8
    assert seen[LOAD.duration_s] == (4, 0)


def test_a_fixed_fleet_asks_anew_for_what_had_no_room_while_a_second_node_was_away() -> None:
    seen: dict[float, tuple[int, int]] = {}
    outages = (Outage(150, "A100", 2, 400), Outage(200, "A100", 0, 400))
    static("A100", 7, Failures(listed=outages), seen)
    assert [seen[at] for at in (199, 301, 399, 401, 459, 461)] == [
        (7, 0), (4, 0), (4, 0), (4, 3), (4, 3), (7, 0)
    ], "four of the third node's places are all that is left; the others are asked for when nodes are back"  # fmt: skip


def test_a_process_that_fails_starts_again_where_it_is() -> None:
    failures = Failures(replica_mtbf_s=600)
    three, calm, alone = (static("H100", n, f) for n, f in ((3, failures), (3, Failures()), (1, failures)))
    assert three.told.replica_failures > 0
    assert three.told.resumed > 0
    assert three.told.lost_replicas == 0
    assert three.cost == pytest.approx(calm.cost)
    assert alone.told.replica_failures > 0
    assert alone.attainment < three.attainment


@dataclass(slots=True)
class Fleet:
    """Replicas of one type that nothing but failures changes, under a few requests a second."""

    count: int
    start_s: float = 60.0
    now_s: float = 0.0

    cluster: Cluster = field(init=False)
    losses: Losses = field(init=False)

    def __post_init__(self) -> None:
        columns = columns_of(POOLS[:1], MODELS, Buckets.of(LOAD), Slo())
        settings = ServingSettings(self.start_s, warm_up_s=0.0)
        self.cluster = Cluster(columns, MODELS, Slo(), settings)
        self.cluster.resize({"A100": self.count}, -self.start_s)
        self.losses = Losses(self.cluster)
        self.reroute()

    def reroute(self) -> None:
        self.cluster.reroute([1.0] * len(Buckets.of(LOAD).means), self.now_s)

    def until(self, at_s: float, requests: int = 3) -> tuple[int, int]:
        """Runs until then; the replicas that count as ready and as starting."""
        while self.now_s < at_s:
            for _ in range(requests):
                self.cluster.route(Request(self.now_s, 300, 200), self.now_s)
            self.now_s += 1
            for member in self.cluster.members:
                member.replica.advance(self.now_s)
            self.losses.advance(self.now_s)
            self.cluster.leave(self.now_s)
            self.reroute()
        ready, starting = self.cluster.counts(self.now_s)
        return ready["A100"], starting["A100"]


def test_beside_a_replica_that_hangs_another_one_starts_as_soon_as_gateway_and_port_say_so() -> None:
    fleet = Fleet(3)
    hung = fleet.cluster.members[0]
    hung.hangs_s = 100.0
    found = [fleet.until(at) for at in (104, 105, 109, 110, 169, 170)]
    assert found == [(3, 0), (2, 1), (2, 1), (2, 1), (2, 1), (3, 0)]
    assert hung.lost_s == 110
    assert hung not in fleet.cluster.members, "it left when others served, 60 s after it was lost"
    told = fleet.losses.close(170.0)
    assert (told.replica_hangs, told.by_gateway, told.by_node, told.stopped) == (1, 1, 0, 1)
    assert told.resumed > 0
    assert NOTICED_S == 25


def test_replicas_that_start_meanwhile_do_not_make_the_operator_deaf() -> None:
    fleet = Fleet(1)
    only = fleet.cluster.members[0]
    only.hangs_s = 100.0
    fleet.until(103)
    fleet.cluster.resize({"A100": 4}, 103.0)
    fleet.until(111)
    assert only.lost_s == 110


def test_one_that_hangs_without_requests_is_started_again_by_its_liveness_probe() -> None:
    fleet = Fleet(2)
    hung = fleet.cluster.members[0]
    fleet.until(99)
    fleet.until(130, requests=0)
    hung.hangs_s = 131.0
    assert fleet.until(200, requests=0) == (1, 1)
    assert hung.lost_s is None, "nobody misses an answer"
    again_s = 131 + LIVENESS.failed_s
    assert fleet.until(again_s + 60, requests=0) == (2, 0)
    assert hung.began_s == again_s


def test_a_lost_replica_counts_again_when_its_port_has_answered_for_long_enough() -> None:
    fleet = Fleet(3, start_s=4.0)
    first = fleet.cluster.members[0]
    first.hangs_s = 100.0
    fleet.until(112)
    first.ends_s = 112.0  # and its container starts again: it is ready at 117, and asked at 118
    lost_s = [first.lost_s]
    for at in (127, 128):
        assert fleet.until(at) == (3, 0)
        lost_s.append(first.lost_s)
    assert lost_s == [110, 110, None]
    assert len(fleet.cluster.members) == 3, "one of the four left"


def test_a_drain_moves_streams_and_ends_sooner() -> None:
    trace = steps([60, 60, 2, 2, 2], 200, [(300, 900)])
    buckets = Buckets.of(trace)
    columns = columns_of(POOLS, MODELS, buckets, Slo())
    costs = []
    for moves in (None, Moves(kv_token_bytes(LLAMA_8B))):
        asked = Question(POOLS, Slo(), LLAMA_8B, warm_up_s=60)
        policy = Ours.of(columns, asked.limits, Slo(), FleetSettings())
        settings = ServingSettings(warm_up_s=60, moves=moves)
        result = run(trace, buckets, columns, MODELS, Slo(), policy, settings)
        assert (result.told.moved > 0) == (moves is not None)
        assert result.requests == sum(at >= 60 for at in trace.arrivals_s)
        costs.append(result.cost)
    assert costs[1] < costs[0]


def test_replicas_in_two_zones_lose_less_to_one_node() -> None:
    pools = "A100:a=1x8@3.67,A100:b=1x8@3.67"
    outage = Failures(listed=(Outage(300, "A100:a", 0, 500),))
    one, two = (
        plan(outage, pools, policies=("busbar",), min_replicas=2, min_zones=zones).results[0]
        for zones in (0, 2)
    )
    assert one.told.lost_replicas > two.told.lost_replicas > 0
    assert two.attainment > one.attainment
    with pytest.raises(ServingModelError, match="in 3 zones, with pools in 2"):
        plan(Failures(), pools, min_replicas=3, min_zones=3)


def test_a_zone_that_is_lost_makes_fewer_late_where_the_other_has_a_reserve() -> None:
    pools = "A10G:a=1x8@1.01,A100:a=1x8@3.67,A10G:b=1x8@1.01,A100:b=1x8@3.67"
    outage = Failures(
        listed=tuple(Outage(300, f"{kind}:{zone}", 0, 600) for kind in ("A10G", "A100") for zone in "a")
    )
    late = [
        plan(outage, pools, policies=("busbar",), min_replicas=2, min_zones=2, zone_reserve=part)
        .results[0]
        .late
        for part in (0.0, 1.0)
    ]
    assert late[1] < 0.5 * late[0]


@pytest.mark.parametrize(
    ("part", "zones", "words"),
    [(0.5, 1, "give at least 2"), (1.5, 2, "from 0 to 1"), (math.nan, 2, "from 0 to 1")],
)
def test_a_zone_reserve_that_means_nothing_is_refused(part: float, zones: int, words: str) -> None:
    pools = parse_pools("A100:a=8@3.67,A100:b=8@3.67")
    with pytest.raises(ServingModelError, match=words):
        Question(pools, Slo(), LLAMA_8B, min_replicas=2, min_zones=zones, zone_reserve=part)
    assert (
        Question(pools, Slo(), LLAMA_8B, min_replicas=2, min_zones=2, zone_reserve=0.5).limits.domain_reserve
        == 0.5
    )


def test_what_is_missing_for_one_node_more_is_said() -> None:
    failures = Failures(replica_mtbf_s=36_000)
    for pools, words in (
        ("A100=3x4@3.67", "still carry the busiest minute"),
        ("A100=1x8@3.67", "Without one node of A100, the pools carry 0.0 %"),
    ):
        found = plan(failures, pools, policies=())
        asked = Question(parse_pools(pools), Slo(), LLAMA_8B, failures=failures)
        assert any(words in sentence for sentence in found.sentences(asked))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("60,A100,0,50", "the end must come after"),
        ("-1,A100,0,50", "the end must come after"),
        ("1,A100,0,inf", "the end must come after"),
        ("1,L4,0,50", "no pool 'L4'; there are A100, H100"),
        ("1,A100,2,50", "nodes 0 to 1, not 2"),
        ("1,A100,one,50", "this line is no outage"),
        ("1,A100", "2 values under 4 columns"),
        ("", "no outage in it"),
    ],
)
def test_bad_outages_are_refused(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "outages.csv"
    path.write_text(f"second,pool,node,until\n{line}\n")
    with pytest.raises(TraceError, match=words):
        outages_csv(path, nodes_of(POOLS))
    path.write_text("second,pool,node,until\n1,A100,*,50\n2,H100,0,50\n")
    assert len(outages_csv(path, nodes_of(POOLS))) == 3


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"node_mtbf_s": 10.0}, "of a node is 10 s; it must be at least 60 s"),
        ({"replica_mtbf_s": math.nan}, "failures of a replica is nan s"),
        ({"hang_mtbf_s": 59.0}, "hangs of a replica is 59 s; it must be at least 60 s"),
        ({"repair_s": -1.0}, "the time of a repair is -1 s"),
        ({"node_mtbf_s": 900.0, "listed": (Outage(1, "A100", 0, 2),)}, "not both"),
    ],
)
def test_bad_failures_are_refused(bad: dict[str, object], words: str) -> None:
    with pytest.raises(ServingModelError, match=words):
        Failures(**bad)  # type: ignore[arg-type]


def test_the_command_says_what_failed(tmp_path: Path) -> None:
    trace, outages = tmp_path / "requests.csv", tmp_path / "outages.csv"
    rows = zip(LOAD.arrivals_s, LOAD.prompts, LOAD.outputs, strict=True)
    lines = [f"{at},{prompt},{output}" for at, prompt, output in rows]
    trace.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *lines]) + "\n")
    outages.write_text("second,pool,node,until\n400,A100,*,500\n")
    arguments = ["--trace", str(trace), "--pools", "A100=2x4@3.67", "--outages", str(outages)]
    found = CliRunner().invoke(plan_capacity, arguments)
    assert found.exit_code == 0, found.output
    assert "busbar: 2 nodes and 0 replicas failed" in found.stdout
    assert "without failures" in found.stdout
    numbers = json.loads(CliRunner().invoke(plan_capacity, [*arguments, "-o", "json"]).stdout)
    ours = numbers["fleets"][0]
    assert ours["node_failures"] == 2
    assert ours["attainment"] < ours["attainment_without_failures"]
    assert ours["late_for_each_lost_replica"] > 0
    for more, words in (
        (["--sleeping", "2"], "stand on no node"),
        (["--repair", "2"], "give --node-mtbf, too"),
        (["--node-mtbf", "5"], "give one of the two, not both"),
        (["--hang-mtbf", "0.01"], "hangs of a replica is 36 s; it must be at least 60 s"),
    ):
        refused = CliRunner().invoke(plan_capacity, [*arguments, *more])
        assert refused.exit_code != 0
        assert words in refused.output
