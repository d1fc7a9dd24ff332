"""The row that replays a month of Philly runs the command, and finds whether it repeats."""

from __future__ import annotations

from pathlib import Path

from benchmarks.scheduling.philly_month import TIMES, replay, write_month

LINES = [
    "timestamp,duration,num_gpus,gpu_time,cluster",
    "2017-09-30 23:59:59,60.0,1,60.0,a",
    *(
        f"2017-10-{day:02d} 07:01:55,{900 * day}.0,{size},1.0,{'ab'[day % 2]}"
        for day, size in ((1, 1), (1, 16), (2, 8))
    ),
    "",
    "2017-11-01 00:00:00,60.0,1,60.0,a",
]


def test_the_month_is_cut_out_and_replayed_alike_with_any_hash_seed(tmp_path: Path) -> None:
    (tmp_path / "all.csv").write_text("\n".join(LINES) + "\n")
    assert write_month(tmp_path / "all.csv", tmp_path / "month.csv") == 3
    assert (tmp_path / "month.csv").read_text().splitlines() == [LINES[0], *LINES[2:5]]
    found = []
    for seed in ("1", "2"):
        numbers, cpu_s = replay(tmp_path / "month.csv", tmp_path / seed, seed=seed)
        assert cpu_s > 0
        found.append({name: value for name, value in numbers.items() if name not in TIMES})
    assert found[0] == found[1]
    assert found[0]["jobs"] == 3
