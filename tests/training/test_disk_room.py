"""Disk for a run's tokens: about how many there will be, and a refusal before they are made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from tests.training.small import SEQUENCE, SEQUENCES, TEXTS, VOCABULARY, manifest, with_text
from tests.training.test_continuation import start

from busbar.workloads.training import disk_room
from busbar.workloads.training.corpus import Corpus, open_corpus
from busbar.workloads.training.demand import Demand
from busbar.workloads.training.disk_plan import disk_shortage
from busbar.workloads.training.encoding import encoder
from busbar.workloads.training.errors import InfeasiblePlan
from busbar.workloads.training.packing import pack, tokens_for
from busbar.workloads.training.plan import MemoryPlan
from busbar.workloads.training.plan_command import plan
from busbar.workloads.training.token_size import expected_tokens, row_count
from busbar.workloads.training.tokenizer import train_tokenizer

TOKENIZER = train_tokenizer(TEXTS.values(), VOCABULARY)


def opened(folder: Path, holdout: float = 0.0) -> Corpus:
    return open_corpus("pvc://text", folder, holdout)


def true_count(corpus: Corpus) -> int:
    parts = pack(corpus.train, encoder(TOKENIZER), 0, 2**40, 8)
    return int(np.concatenate([tokens for tokens, _ in parts]).size)


def lines() -> list[str]:
    return [line for text in TEXTS.values() for line in text.splitlines()]


def write_texts(folder: Path) -> None:
    for name, text in TEXTS.items():
        (folder / name).write_text(text * 3)


def write_jsonl(folder: Path) -> None:
    (folder / "rows.jsonl").write_text(
        "".join(json.dumps({"id": 7, "text": each}) + "\n" for each in lines())
    )


def write_table(folder: Path) -> None:
    pq.write_table(pa.table({"text": lines(), "id": list(range(len(lines())))}), folder / "rows.parquet")


def write_all(folder: Path) -> None:
    for write in (write_texts, write_jsonl, write_table):
        write(folder)


@pytest.mark.parametrize("write", [write_texts, write_jsonl, write_table, write_all])
@pytest.mark.parametrize("holdout", [0.0, 0.3])
def test_a_sample_tells_about_how_many_tokens_there_are(tmp_path: Path, write: Any, holdout: float) -> None:
    write(tmp_path)
    corpus = opened(tmp_path, holdout)
    assert expected_tokens(corpus.train, encoder(TOKENIZER)) == pytest.approx(true_count(corpus), rel=0.05)


def test_lines_are_counted_without_the_newline_that_the_last_one_may_lack(tmp_path: Path) -> None:
    for text, count in (('{"text": "a"}\n{"text": "b"}', 2), ('{"text": "a"}\n', 1), ('{"text": "a"}', 1)):
        (tmp_path / "rows.jsonl").write_text(text)
        (document,) = opened(tmp_path).train
        assert row_count(document) == count


def barely(room: int, asked: list[int]) -> Any:
    """As `disk_shortage`, with so many bytes free beside the checkpoints and the result."""

    def find(
        made: MemoryPlan, demand: Demand, keep: int, free: int, tokens: int = 0
    ) -> InfeasiblePlan | None:
        asked.append(tokens)
        others = made.checkpoint_bytes * (keep + 1) + demand.result_bytes
        return disk_shortage(made, demand, keep, others + room, tokens)

    return find


def test_a_run_whose_tokens_have_no_room_is_refused_before_they_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claims, asked = with_text(tmp_path / "claims"), list[int]()
    monkeypatch.setattr(disk_room, "disk_shortage", barely(4096, asked))
    code, status, _ = start(claims)
    assert (code, status["phase"]) == (2, "Failed")
    assert asked[0] == 0
    size = asked[1] / 2**20
    assert (
        f"one more while it is written, about {size:.1f} MiB of tokens and the result need"
        in status["message"]
    )
    assert status["memory"]["diskOwners"]["tokens"] == asked[1]
    assert not (claims / "out/model/checkpoints/prepared/tokens.bin").stat().st_size
    monkeypatch.setattr(disk_room, "disk_shortage", barely(asked[1], asked))
    assert start(claims)[0] == 0
    made = (claims / "out/model/checkpoints/prepared/tokens.bin").stat().st_size
    assert asked[1] == pytest.approx(made, rel=0.1)
    asked.clear()
    assert start(claims, steps=13)[0] == 0
    assert asked == [0, 0]  # they are there


def test_a_run_of_few_steps_needs_few_tokens_of_a_large_text(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(json.dumps(manifest()))
    said = CliRunner().invoke(plan, [str(file)]).output
    answer = json.loads(CliRunner().invoke(plan, [str(file), "--json"]).output)
    assert answer["tokenBytes"] == 4 * tokens_for(12, SEQUENCES, SEQUENCE)
    assert "its tokens take up to 1.0 MiB, and no more than the text has" in said
