"""The row of servers: its physics, its loads, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from busbar.scheduler.power import PowerPolicy
from busbar.scheduler.simulate.command import simulate
from busbar.scheduler.simulate.power_load import PEAK_RATE_PER_S, Requests, load_maker, synthetic
from busbar.scheduler.simulate.power_row import STEP_S, Row, ServerModel, layout
from busbar.scheduler.simulate.power_run import DELAYS, LeaseLaw, Unlimited, figures, run

MODEL = ServerModel()


def _requests(*rows: tuple[float, float, float]) -> Requests:
    at_s, prompt, output = (np.array(column) for column in zip(*rows, strict=True))
    return Requests(at_s, prompt, output, np.ones(len(rows), dtype=bool))


def _finished(limit_w: float, *rows: tuple[float, float, float]) -> tuple[Row, float]:
    row = Row(layout(4, 0.0), _requests(*rows), MODEL, 60, 0)
    joules = sum(float(row.step(np.full(4, limit_w), np.ones(4))[0]) * STEP_S for _ in range(600))
    return row, joules


def test_one_request_takes_its_prompt_and_its_tokens() -> None:
    row, _ = _finished(400.0, (0.0, 700.0, 100.0))
    assert row.first_s[0] == pytest.approx(0.1, abs=0.01)
    assert row.done_s[0] - row.first_s[0] == pytest.approx(100 * (0.045 + 0.00037), rel=0.03)


def test_a_limit_slows_prompts_by_the_curve_and_saves_energy() -> None:
    free, free_j = _finished(400.0, (0.0, 14_000.0, 10.0))
    capped, capped_j = _finished(0.51 * 400.0, (0.0, 14_000.0, 10.0))
    assert capped.first_s[0] / free.first_s[0] == pytest.approx(1.38, rel=0.01)
    assert capped_j < free_j


def test_a_training_server_draws_its_published_maximum_and_a_job_runs_at_its_slowest_server() -> None:
    row = Row(layout(10, 1.0), synthetic(0, 1, 0), MODEL, 60, 0)
    limits = np.full(10, 400.0)
    assert row.step(limits, np.ones(10)).tolist() == [6305.0] * 10
    limits[0] = 0.51 * 400.0
    row.work_s[:] = 0
    row.step(limits, np.ones(10))
    assert row.work_s.tolist() == pytest.approx([STEP_S / 1.38, STEP_S])


def test_servers_are_laid_out_by_class() -> None:
    places = layout(56, 0.5)
    assert (places.high, places.low, places.training) == (14, 14, 28)
    assert [job.stop - job.start for job in places.jobs()] == [25, 3]


@pytest.mark.parametrize(
    ("policy", "delay"), [("Lease", "outofband"), ("Lease", "inband"), ("Static", "inband")]
)
@pytest.mark.parametrize("mix", [0.0, 0.5])
def test_hard_leases_are_never_above_the_feed(policy: str, delay: str, mix: float) -> None:
    places, seconds, budget_w = layout(12, mix), 150, 8 * 6500.0
    requests = synthetic(places.serving, seconds, 1)
    twin = run(places, MODEL, requests, Unlimited(places, MODEL), seconds, 1)
    law = LeaseLaw(places, MODEL, budget_w, PowerPolicy(policy), DELAYS[delay])
    found = figures(run(places, MODEL, requests, law, seconds, 1), twin, requests, budget_w, seconds)
    assert twin.feed_w.max() > budget_w
    assert found.over_s == 0


def test_with_a_bucket_ten_seconds_are_never_above_the_feed() -> None:
    places, seconds, budget_w = layout(12, 0.25), 180, 8 * 6500.0
    requests = synthetic(places.serving, seconds, 2)
    law = LeaseLaw(places, MODEL, budget_w, PowerPolicy.LEASE_WITH_BURST, DELAYS["inband"])
    feed_w = run(places, MODEL, requests, law, seconds, 2).feed_w
    assert feed_w.reshape(-1, 10).mean(axis=1).max() <= budget_w


ROW = ["--power", "--servers", "8", "--budget-servers", "6", "--minutes", "1"]


def test_the_command_gives_the_same_bytes_for_the_same_seed_and_others_for_another() -> None:
    def out(*more: str) -> str:
        result = CliRunner().invoke(simulate, [*ROW, "--output", "json", *more])
        assert result.exit_code == 0, result.output
        return result.stdout

    first = out()
    assert first == out()
    assert json.loads(first)["rows"][0]["servers"] == 8
    assert json.loads(first)["rows"] != json.loads(out("--seed", "1"))["rows"]


def test_the_command_prints_a_table_with_what_the_columns_mean() -> None:
    result = CliRunner().invoke(simulate, [*ROW, "--policy", "Observe", "--policy", "Static"])
    assert result.exit_code == 0
    assert "Observe" in result.stdout
    assert "seconds above the budget" in result.stdout


def test_a_budget_below_the_floor_of_the_servers_is_said_to_be_out_of_reach() -> None:
    def row(budget: str, *more: str) -> str:
        asked = ["--power", "--servers", "4", "--budget-servers", budget, "--minutes", "1", *more]
        return CliRunner().invoke(simulate, asked).stdout

    words = "no policy keeps it: take fewer servers, or a larger budget."
    assert "4 servers may draw 175 % of what the budget allows" in row("1")
    assert words in row("1")
    assert words not in row("2")
    [told] = json.loads(row("2", "--output", "json", "--policy", "Lease"))["rows"]
    assert told["floorPercent"] == pytest.approx(100 * 4 * (1810 + 1000) / (0.99 * 13_000), abs=0.1)
    assert told["overS"] == 0


REFUSED = (
    (("--servers", "some"), "is not a number"),
    (("--servers", "2"), "4 to 500 servers"),
    (("--servers", "60..40"), "the smaller number first"),
    (("--budget-servers", "0"), "0 is not in the range"),
    (("--mix", "1.5"), "1.5 is not in the range"),
    (("--load", "noise"), "is not azure, servegen:DAY or synthetic"),
    (("--load", "azure"), "needs --data"),
    (("--delay", "slow"), "'slow' is not one of"),
    (("--policy", "fairness"), "'fairness' is not one of"),
    (("--policy", "LeaseWithBurst", "--delay", "outofband"), "needs --delay inband"),
    (("--minutes", "0"), "0 is not in the range"),
    (("--seed", "-1"), "-1 is not in the range"),
    (("--cluster", "v100=1"), "No such option"),
)


@pytest.mark.parametrize(("arguments", "sentence"), REFUSED)
def test_bad_values_are_refused_with_a_sentence(arguments: tuple[str, ...], sentence: str) -> None:
    result = CliRunner().invoke(simulate, [*ROW, *arguments])
    assert result.exit_code != 0
    assert sentence in result.output


def test_a_folder_without_the_files_is_named(tmp_path: Path) -> None:
    result = CliRunner().invoke(simulate, [*ROW, "--load", "azure", "--data", str(tmp_path)])
    assert "AzureLLMInferenceTrace_conv.csv" in result.output.replace("\n", "")


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def _data(folder: Path, azure: str, *clients: str) -> Path:
    (folder / "azure_llm_2023").mkdir()
    (folder / "servegen/m-small").mkdir(parents=True)
    (folder / "azure_llm_2023/AzureLLMInferenceTrace_conv.csv").write_text(AZURE + azure)
    for number, text in enumerate(clients):
        (folder / f"servegen/m-small/chunk-{number}-trace.csv").write_text(text)
    return folder


def _azure_at(*seconds: int, prompt: str = "100") -> str:
    return "".join(f"2023-11-16 18:{s // 60:02}:{s % 60:02}.5000000,{prompt},20\n" for s in seconds)


def _day(rate: str = "1.0", every_s: int = 600, shape: str = "0.5") -> str:
    return "".join(f"{at},{rate},1.0,Gamma,{shape},0.1\n" for at in range(0, 86_400, every_s))


@pytest.mark.parametrize(
    ("azure", "clients", "words"),
    [
        (_azure_at(0), (_day(),), "lie within 0 s; a load needs those of 60 s"),
        (_azure_at(0, 59), (_day(),), "lie within 59 s"),
        (_azure_at(0, 60, prompt="-3"), (_day(),), "a length is not between"),
        (_azure_at(0, 60, prompt="nan"), (_day(),), "no request"),
        (_azure_at(0, 60), (_day("0"), _day("-1")), "nobody sends anything on day 1"),
        (_azure_at(0, 60), (_day(), _day("nan")), "chunk-1-trace.csv:1: the rate or the shape"),
        (_azure_at(0, 60), (_day(shape="inf"),), "the rate or the shape"),
        (
            _azure_at(0, 60),
            (_day(), _day(every_s=300)),
            "chunk-1-trace.csv has no complete day 1: it has 288",
        ),
        (_azure_at(0, 60), (_day(every_s=1200),), "it has 72 windows"),
        (_azure_at(0, 60), (_day(), _day("0")), ""),
        (_azure_at(0, 60, prompt="0"), (_day(shape="0"),), ""),
    ],
)
def test_a_trace_of_no_use_to_a_row_is_refused(
    tmp_path: Path, azure: str, clients: tuple[str, ...], words: str
) -> None:
    data = ["--data", str(_data(tmp_path, azure, *clients)), "--load", "servegen:1"]
    result = CliRunner().invoke(simulate, [*ROW, *data])
    if words:
        assert isinstance(result.exception, SystemExit), result.exc_info
        assert words in result.output.replace("\n", "")
    assert result.exit_code == bool(words), result.output


def test_published_rates_keep_their_peak_and_their_bursts(tmp_path: Path) -> None:
    lines = [
        f"2023-11-16 18:{15 + i // 60:02}:{i % 60:02}.6805900,{100 + i % 50},{20 + i % 7}\n"
        for i in range(900)
    ]
    rates = [f"{600 * k},{10 + 90 * (k == 70)},1.0,Gamma,0.5,0.1\n" for k in range(144)]
    _data(tmp_path, "".join(lines), "".join(rates))
    replayed = load_maker("azure", tmp_path)(20, 600.0, 1)
    assert len(replayed.at_s) == pytest.approx(PEAK_RATE_PER_S * 20 * 600, rel=0.05)
    day = load_maker("servegen:1", tmp_path)(20, 3600.0, 1)
    counts = np.histogram(day.at_s, bins=6, range=(0, 3600))[0]
    assert counts.max() == pytest.approx(PEAK_RATE_PER_S * 20 * 600, rel=0.1)
    assert counts.min() < 0.2 * counts.max()
    with pytest.raises(ValueError, match="no complete day 2"):
        load_maker("servegen:2", tmp_path)
