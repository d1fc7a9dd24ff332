"""The serving simulator, its readers, its peers, and `busbar plan-capacity`."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.table import Table

from busbar.scheduler.autoscale.mix import Limits
from busbar.scheduler.autoscale.step_model import Slo
from busbar.scheduler.errors import ServingModelError, TraceError
from busbar.scheduler.simulate.options import print_table
from busbar.scheduler.simulate.serving_cluster import Cluster, ServingSettings
from busbar.scheduler.simulate.serving_command import plan_capacity
from busbar.scheduler.simulate.serving_engine import run
from busbar.scheduler.simulate.serving_plan import Plan, Question, answer
from busbar.scheduler.simulate.serving_policies import Static, best_single, bounds, static_replicas
from busbar.scheduler.simulate.serving_pools import (
    LLAMA_8B,
    columns_of,
    parse_caps,
    parse_pools,
    parse_slo,
    step_models,
)
from busbar.scheduler.simulate.serving_replica import Request
from busbar.scheduler.simulate.serving_trace import (
    Buckets,
    ServingTrace,
    _trace,
    rates_by_minute,
    requests_csv,
    servegen,
    steps,
)

POOLS = parse_pools("A10G=8@1.01,H100=4@7.516")
LENGTHS = [(80, 60), (300, 120), (900, 150)]
LOAD = steps([2, 8, 3], 200, LENGTHS)


def plan(trace: ServingTrace = LOAD, **rest: object) -> Plan:
    return answer(trace, Question(POOLS, Slo(), LLAMA_8B, warm_up_s=60, **rest))  # type: ignore[arg-type]


def test_every_request_is_counted_once_and_the_bound_is_the_cheapest() -> None:
    found = plan()
    after = sum(at >= 60 for at in LOAD.arrivals_s)
    assert [r.policy for r in found.results] == ["busbar", "hpa", "static"]
    assert all(r.requests == after for r in found.results)
    assert found.bounds.mix_per_h <= found.bounds.single_per_h
    static = found.results[2]
    assert static.attainment > 0.99
    assert static.cost_per_h == pytest.approx(found.static_replicas * found.bounds.single.cost_per_h)


def test_the_same_seed_gives_the_same_numbers() -> None:
    assert json.dumps(plan().to_json()) == json.dumps(plan().to_json())
    assert list(steps([2], 100, LENGTHS, 1).arrivals_s) != list(steps([2], 100, LENGTHS, 2).arrivals_s)


def test_a_fleet_that_is_too_small_is_late() -> None:
    buckets = Buckets.of(LOAD)
    models, _ = step_models(POOLS, LLAMA_8B)
    columns = columns_of(POOLS, models, buckets, Slo())
    result = run(LOAD, buckets, columns, models, Slo(), Static(columns[0], 1), ServingSettings(warm_up_s=60))
    assert result.attainment < 0.5
    none = run(LOAD, buckets, columns, models, Slo(), Static(columns[0], 0), ServingSettings(warm_up_s=60))
    assert (none.attainment, none.cost) == (0, 0)


def test_sleeping_replicas_meet_a_step_that_starting_ones_miss() -> None:
    trace = steps([1, 1, 90], 60, LENGTHS)
    cold = plan(trace, policies=("busbar",), start_s=90.0).results[0]
    warm = plan(trace, policies=("busbar",), start_s=90.0, sleeping=10).results[0]
    assert warm.attainment > cold.attainment


def test_surplus_replicas_sleep_where_bursts_come_again_and_are_paid() -> None:
    trace = steps([60, 1, 1, 1, 60, 1, 1, 1, 60, 1, 1, 1, 60], 120, LENGTHS)
    cold, warm = (plan(trace, policies=("busbar",), start_s=120.0, warm=most).results[0] for most in (0, 10))
    assert warm.attainment > cold.attainment + 0.1
    assert cold.asleep_cost == 0
    assert 0 < warm.asleep_cost < 0.5 * warm.cost


def test_surplus_replicas_leave_where_what_was_never_comes_again() -> None:
    trace = steps([*[6] * 12, *[0.5] * 12], 120, LENGTHS)
    asked = (
        Question(parse_pools("A10G=8@1.01"), Slo(), LLAMA_8B, policies=("busbar",), warm_up_s=60, warm=most)
        for most in (0, 8)
    )
    cold, warm = (answer(trace, question).results[0] for question in asked)
    assert warm.attainment == cold.attainment
    assert cold.peak["A10G"] >= 4
    assert warm.cost < 1.03 * cold.cost
    early = steps([4, 4, 4], 120, LENGTHS)
    first, same = (plan(early, policies=("busbar",), start_s=90.0, warm=most).results[0] for most in (0, 10))
    assert first.to_json() == same.to_json(), "nothing sleeps before there was a surplus"


def test_limits_are_kept_and_said() -> None:
    found = plan(budget_per_h=2.1, policies=("busbar",))
    assert found.results[0].to_json()["cost_per_h"] <= 2.1  # type: ignore[operator]
    assert found.bounds.carried < 1
    question = Question(POOLS, Slo(), LLAMA_8B, budget_per_h=2.1)
    assert any("the worst minute carries" in sentence for sentence in found.sentences(question))


def test_boards_under_caps_carry_more_on_a_feed_that_is_too_small() -> None:
    trace = steps([24, 24, 24], 150, LENGTHS)
    pools = parse_pools("A100=16@3.67")
    whole, capped = (
        Question(
            pools,
            Slo(),
            LLAMA_8B,
            watts=800.0,
            caps=caps,
            policies=("busbar",),
            warm_up_s=60,
            min_replicas=0,
        )
        for caps in ((), (0.8, 0.6))
    )
    before, after = answer(trace, whole), answer(trace, capped)
    assert after.bounds.carried > before.bounds.carried
    assert after.results[0].attainment >= before.results[0].attainment
    peak = after.results[0].peak
    assert peak["A100@60%"] > 0
    assert 400 * peak["A100"] + 320 * peak["A100@80%"] + 240 * peak["A100@60%"] <= 800
    assert any("what was published" in said for said in after.sentences(capped))
    assert not any("what was published" in said for said in before.sentences(whole))
    assert set(after.bounds.unlimited_peak) == {"A100"}, "nothing is capped where nothing limits"


def test_replicas_run_on_when_their_boards_get_another_limit() -> None:
    pools, buckets = parse_pools("A100=4@3.67"), Buckets.of(LOAD)
    models, _ = step_models(pools, LLAMA_8B, (0.6,))
    columns = columns_of(pools, models, buckets, Slo(), (0.6,))
    cluster = Cluster(columns, models, Slo(), ServingSettings(start_s=60.0))
    for _ in range(2):
        cluster.add(columns[0], 0.0)
    before = [member.replica for member in cluster.members]
    before[0].take(Request(0.0, 500, 100), 1.0)
    waits_s = before[0].prompt_s
    cluster.resize({"A100": 1, "A100@60%": 2}, 1.0)
    ready, starting = cluster.counts(1.0)
    assert (ready, starting) == ({"A100": 1, "A100@60%": 1}, {"A100": 0, "A100@60%": 1})
    assert [member.replica for member in cluster.members[:2]] == before
    assert before[0].model is models["A100@60%"]
    assert before[0].prompt_s > waits_s
    cluster.resize({"A100": 3}, 2.0)
    assert {member.column.key for member in cluster.members} == {"A100"}
    assert len(cluster.members) == 3


def test_caps_are_read() -> None:
    assert parse_caps("60,80, 60") == (0.8, 0.6)


def test_what_the_stock_lacks_is_said() -> None:
    pools = parse_pools("A10G=8@1.01,H100=0@0.01")
    question = Question(pools, Slo(), LLAMA_8B, policies=(), warm_up_s=60)
    assert any("more H100 than the pools have" in s for s in answer(LOAD, question).sentences(question))


def _mixed(length: tuple[int, int]) -> ServingTrace:
    """Every tenth request is of this length."""
    rows = [(float(i), *((300, 60) if i % 10 else length)) for i in range(400)]
    return _trace("mixed", rows, 400.0)


def test_requests_that_no_pool_serves_in_time_are_counted_and_told() -> None:
    found = plan(_mixed((200_000, 100)))
    assert found.to_json()["requests_no_pool_serves"] == 40
    [told] = [text for text in found.sentences(Question(POOLS, Slo(), LLAMA_8B)) if "40 of the 400" in text]
    assert "Nearest is H100: alone with prompts of 200000 tokens it takes" in told
    assert plan().to_json()["requests_no_pool_serves"] == 0
    assert not any("on no pool" in text for text in plan().sentences(Question(POOLS, Slo(), LLAMA_8B)))


def test_requests_that_no_replica_can_hold_are_refused_and_hold_up_nobody() -> None:
    trace = _mixed((2_000_000, 100))
    found = plan(trace)
    for result in found.results:
        row = result.to_json()
        counted = sum(at >= 60 for at in trace.arrivals_s)
        assert result.requests == counted
        assert result.within + result.late_ttft + result.late_tpot + result.refused == counted
        assert (result.refused, result.within) == (34, counted - 34)
        assert result.output_tokens == 60 * result.within
        assert row["ttft_p99_s"] is not None
        assert f"{result.policy}: 34 requests were refused" in " ".join(
            found.sentences(Question(POOLS, Slo(), LLAMA_8B))
        )


def test_what_nobody_answers_has_no_time_to_the_first_token_and_no_tokens() -> None:
    buckets, settings = Buckets.of(LOAD), ServingSettings(start_s=1e6, warm_up_s=60)
    models, _ = step_models(POOLS, LLAMA_8B)
    columns = columns_of(POOLS, models, buckets, Slo())
    found = run(LOAD, buckets, columns, models, Slo(), Static(columns[0], 0), settings)
    row = found.to_json()
    assert (row["ttft_p50_s"], row["ttft_p99_s"], found.output_tokens) == (None, None, 0)
    assert found.late_ttft == found.requests == sum(at >= 60 for at in LOAD.arrivals_s)


@pytest.mark.parametrize(
    ("trace", "words"),
    [
        (steps([0.2], 400, [(2_000_000, 100)]), "No KV cache holds prompts of 2000000 tokens with answers of 100"),
        (steps([0.2], 400, [(500, 200_000)]), "one in .* s is all that a replica serves"),
    ],
)  # fmt: skip
def test_a_load_of_which_no_pool_serves_anything_is_told_why(trace: ServingTrace, words: str) -> None:
    with pytest.raises(ServingModelError, match=words):
        plan(trace)


def test_static_is_the_busiest_minute_and_eight_per_cent() -> None:
    models, _ = step_models(POOLS, LLAMA_8B)
    buckets = Buckets.of(LOAD)
    column = columns_of(POOLS, models, buckets, Slo())[1]
    rate = column.rates[0]
    minutes = [[0.0] * len(buckets.means) for _ in range(2)]
    minutes[1][0] = 2.9 * rate
    assert static_replicas(column, minutes) == 4
    assert best_single([column], minutes) is column
    assert bounds([column], minutes, Limits(min_replicas=1), 0).mix_per_h == pytest.approx(2 * 7.516)


def test_buckets_are_prompt_ranges_with_their_means() -> None:
    buckets = Buckets.of(LOAD)
    assert [buckets.index(prompt) for prompt, _ in LENGTHS] == [0, 1, 2]
    assert buckets.means[1].prompt_tokens == 300
    minutes = rates_by_minute(LOAD, buckets)
    assert sum(map(sum, minutes)) * 60 == pytest.approx(len(LOAD))


def azure(path: Path, rows: int = 400) -> Path:
    rng, at = random.Random(0), 0.0
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for _ in range(rows):
        at += rng.expovariate(1.0)
        lines.append(
            f"2023-11-16 18:{int(at // 60):02d}:{at % 60:09.6f}0,{rng.randint(50, 900)},{rng.randint(10, 200)}"
        )
    path.write_text("\n".join(lines) + "\n")
    return path


def test_azures_columns_are_read_and_scaled(tmp_path: Path) -> None:
    path = azure(tmp_path / "conv.csv")
    once, more = requests_csv(path), requests_csv(path, 2.5)
    assert len(once) == 400
    assert len(more) == pytest.approx(1000, abs=60)
    assert list(more.arrivals_s) == sorted(more.arrivals_s)
    assert once.until(60).arrivals_s[-1] <= 60


def servegen_folder(folder: Path) -> Path:
    folder.mkdir()
    windows = [(at, 5.0 if at % 86_400 < 43_200 else 10.0) for at in range(0, 2 * 86_400, 600)]
    (folder / "chunk-1-trace.csv").write_text("".join(f"{at},{rate},1.5,Gamma,1,1\n" for at, rate in windows))
    (folder / "chunk-2-trace.csv").write_text("".join(f"{at},{rate},nan,,,\n" for at, rate in windows))
    row = {"input_tokens": "{100: 0.5, 700: 0.5}", "output_tokens": "{20: 1.0}"}
    (folder / "chunk-1-dataset.json").write_text(json.dumps({"0": row}))
    return folder


def test_servegen_days_have_their_peak_and_remember_the_days_before(tmp_path: Path) -> None:
    folder = servegen_folder(tmp_path / "m")
    trace = servegen(folder, 2, 0.4)
    rates = [sum(start <= at < start + 43_200 for at in trace.arrivals_s) / 43_200 for start in (0, 43_200)]
    assert rates == pytest.approx([0.2, 0.4], rel=0.1)
    assert set(trace.prompts) == {100, 700}
    assert len(trace.earlier) == 144
    assert trace.earlier[-1][0] == -600
    assert trace.earlier[-1][1] == pytest.approx(0.4)
    with pytest.raises(TraceError, match="days 1 to 2"):
        servegen(folder, 3, 0.4)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("arrival_s,prompt_tokens,output_tokens\n", "no request in it"),
        ("arrival_s,prompt_tokens\n1,2\n", "column 'output_tokens' is missing"),
        (
            "arrival_s,prompt_tokens,output_tokens\nsoon,1,1\n",
            "t.csv:2: this line is no request .column 'arrival_s' is 'soon'",
        ),
        ("arrival_s,prompt_tokens,output_tokens\nnan,1,1\n", "t.csv:2"),
        ("arrival_s,prompt_tokens,output_tokens\n1,-1,1\n", "t.csv:2"),
    ],
)
def test_bad_traces_are_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(TraceError, match=words):
        requests_csv(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("A100", "not TYPE="),
        ("A100=2", "not TYPE="),
        ("X9=1@2", "no data sheet"),
        ("A100=1@1,A100=2@1", "named twice"),
    ],
)
def test_bad_pools_are_refused(text: str, words: str) -> None:
    with pytest.raises(ServingModelError, match=words):
        parse_pools(text)


def test_slos_are_read_and_refused() -> None:
    assert parse_slo("tpot=0.05") == Slo(tpot_s=0.05)
    for text in ("latency=1", "ttft=fast", "ttft=0"):
        with pytest.raises(ServingModelError):
            parse_slo(text)


def test_a_slo_that_no_type_meets_names_the_nearest() -> None:
    with pytest.raises(ServingModelError, match="Nearest is H100"):
        answer(LOAD, Question(POOLS, Slo(tpot_s=0.001), LLAMA_8B))


def test_the_command_prints_fleets_bounds_and_json(tmp_path: Path) -> None:
    path = azure(tmp_path / "conv.csv")
    arguments = ["--trace", str(path), "--pools", "A10G=8@1.01,T4=2@0.3,H100=4@7.516", "--hours", "0.15"]
    found = CliRunner().invoke(plan_capacity, arguments)
    assert found.exit_code == 0, found.output
    for words in ("busbar", "hpa", "static", "bound: mix", "T4 is left out", "busiest minute"):
        assert words in found.output
    header, first = [line for line in found.stdout.splitlines() if line.strip()][:2]
    assert header.split()[-2:] == ["most", "replicas"]
    assert first.rstrip().endswith(("A10G", "H100"))
    numbers = json.loads(CliRunner().invoke(plan_capacity, [*arguments, "-o", "json"]).stdout)
    assert [row["policy"] for row in numbers["fleets"]] == ["busbar", "hpa", "static"]
    assert all(row["cost_over_bound"] >= 0.9 for row in numbers["fleets"])


def test_a_narrow_terminal_costs_a_table_no_column_and_no_cell(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    table = Table(box=None)
    for number in range(30):
        table.add_column(f"column {number}", justify="right")
    table.add_row(*(f"cell {number}" for number in range(30)))
    print_table(table)
    heads, cells = (line.split() for line in capsys.readouterr().out.splitlines())
    assert heads == " ".join(f"column {number}" for number in range(30)).split()
    assert cells == " ".join(f"cell {number}" for number in range(30)).split()


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--pools", "A100"], "not TYPE=COUNT@PRICE"),
        (["--slo", "ttft=0"], "above zero"),
        (["--day", "2"], "for a ServeGen folder"),
        (["--start", "-5"], "zero or more"),
        (["--sleeping", "2", "--wake", "100"], "longer to wake"),
        (["--warm", "2", "--wake", "100"], "longer to wake"),
        (["--warm", "2", "--sleeping", "2"], "give one"),
        (["--pools", "T4=8@0.3"], "no pool can hold the model"),
        (["--watts", "800", "--caps", "80,most"], "not per cent"),
        (["--watts", "800", "--caps", "100"], "not between 20 and 99"),
        (["--watts", "800", "--caps", "10"], "not between 20 and 99"),
        (["--caps", "80"], "give --watts, too"),
        (["--hours", "0.09"], "must last at least 360 s"),
    ],
)
def test_bad_values_are_refused_with_a_sentence(tmp_path: Path, extra: list[str], words: str) -> None:
    path = azure(tmp_path / "conv.csv", 50)
    found = CliRunner().invoke(plan_capacity, ["--trace", str(path), "--pools", "H100=2@7", *extra])
    assert found.exit_code == 1
    assert words in found.output


def test_a_servegen_folder_needs_a_day_and_a_peak(tmp_path: Path) -> None:
    folder = servegen_folder(tmp_path / "m")
    found = CliRunner().invoke(plan_capacity, ["--trace", str(folder), "--pools", "H100=2@7"])
    assert "name --day and --peak" in found.output
