"""Tokens that are made while the run trains on the first of them."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.training.small import SEQUENCE, TEXTS, engine, manifest, with_text

from busbar.workloads.training import corpus as corpus_module
from busbar.workloads.training import packing, preparation, token_file
from busbar.workloads.training.control import Control
from busbar.workloads.training.corpus import Corpus, open_corpus
from busbar.workloads.training.encoding import Encode, Encoded
from busbar.workloads.training.environment import run_from_manifest
from busbar.workloads.training.errors import InvalidJob, Superseded
from busbar.workloads.training.job import parse_engine
from busbar.workloads.training.packing import START, Packed, Place, Tokens, pack
from busbar.workloads.training.preparation import Prepared, prepare
from busbar.workloads.training.report import Lines
from busbar.workloads.training.rows import Row, RowReader
from busbar.workloads.training.run import run
from busbar.workloads.training.status import Status
from busbar.workloads.training.token_file import Announced, BadRows, Facts, Followed, Maker, Rows

PATIENCE_S = 20.0
STEPS = 40


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small texts have many windows, and places between them."""
    monkeypatch.setattr(packing, "WINDOW_TOKENS", 16 * SEQUENCE)
    monkeypatch.setattr(packing, "PART_TOKENS", 2 * SEQUENCE)
    monkeypatch.setattr(corpus_module, "PIECE_BYTES", 256)


@pytest.fixture(params=["texts", "one text", "rows"])
def corpus(request: pytest.FixtureRequest, tmp_path: Path) -> Corpus:
    folder = tmp_path / "corpus"
    folder.mkdir()
    if request.param == "texts":
        for name, text in TEXTS.items():
            (folder / name).write_text(text)
    elif request.param == "one text":
        (folder / "all.txt").write_text("".join(TEXTS.values()))
    else:
        lines = "".join(TEXTS.values()).splitlines()
        rows = [json.dumps({"prompt": line[:9], "completion": line[9:]}) for line in lines]
        (folder / "a.jsonl").write_text("\n".join([*rows[:300], "{torn", *rows[300:]]) + "\n")
    return open_corpus("pvc://corpus", folder, 0.0, rows=RowReader(skips=True))


def letters(row: Row) -> Encoded:
    """A token for each letter: what is learned as the row says."""
    ids = [ord(letter) % 251 for letter in row.text]
    return Encoded(ids, None if row.plain else [part.learned for part in row.parts for _ in part.text])


def parts_of(
    corpus: Corpus, bad: BadRows, start: Place = START, encode: Encode = letters
) -> Iterator[tuple[Tokens, Place | None]]:
    return pack(corpus.train, encode, 0, 20_000, SEQUENCE, bad.add, start)


def made(folder: Path, corpus: Corpus) -> Maker:
    folder.mkdir()
    (folder / token_file.TOKENS).touch()
    bad = BadRows()
    return Maker(folder, Facts("key", 0), bad, parts_of(corpus, bad))


def test_a_stream_goes_on_from_each_of_its_places_with_the_same_tokens(corpus: Corpus) -> None:
    bad = BadRows()
    parts = [*parts_of(corpus, bad)]
    whole = np.concatenate([tokens for tokens, _ in parts])
    places = [place for _, place in parts if place is not None]
    assert len(places) > 50
    for place in places[::7]:
        rest = np.concatenate([tokens for tokens, _ in parts_of(corpus, BadRows(), place)])
        assert np.array_equal(whole[place.kept :], rest)
    assert bad.count == (1 if corpus.has_rows else 0)


def test_what_is_before_a_place_is_not_tokenized_again(corpus: Corpus) -> None:
    read = list[str]()

    def watched(row: Row) -> Encoded:
        read.append(row.text)
        return letters(row)

    parts = [*parts_of(corpus, BadRows(), encode=watched)]
    all_read, place = len(read), [place for _, place in parts if place is not None][-1]
    read.clear()
    list(parts_of(corpus, BadRows(), place, watched))
    assert len(read) <= max(1, all_read // 10)


def test_a_maker_that_was_stopped_anywhere_goes_on_and_counts_bad_rows_once(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_file, "DURABLE_EVERY_S", 0.0)
    made(tmp_path / "whole", corpus).until(10**9)
    expected = (tmp_path / "whole" / token_file.TOKENS).read_bytes()
    folder = tmp_path / "cut"
    maker = made(folder, corpus)
    for share in (1, 2, 3):
        maker.until(len(expected) // 16 * share)
        maker.close()
        with (folder / token_file.TOKENS).open("ab") as file:
            file.write(b"what a kill has left")
        facts = token_file.read_facts(folder)
        bad = replace(facts.bad)
        maker = Maker(folder, facts, bad, parts_of(corpus, bad, facts.place))
    there, over = maker.until(10**9)
    assert over
    assert (folder / token_file.TOKENS).read_bytes() == expected
    facts = token_file.read_facts(folder)
    assert (facts.over, facts.tokens * 4) == (True, len(expected) == there * 4 and len(expected))
    assert facts.bad.count == (1 if corpus.has_rows else 0)


def test_a_start_that_was_shut_out_writes_down_nothing_more(tmp_path: Path) -> None:
    corpus = open_corpus("pvc://text", with_text(tmp_path) / "text", 0.0)
    folder = tmp_path / "made"
    folder.mkdir()
    (folder / token_file.TOKENS).touch()

    def refuse() -> None:
        raise Superseded("attempt 2 writes here")

    maker = Maker(folder, Facts("key", 0), BadRows(), parts_of(corpus, BadRows()), refuse)
    with pytest.raises(Superseded, match="attempt 2 writes here"):
        maker.until(10**9)
    assert not (folder / token_file.FACTS).exists()


@pytest.mark.parametrize("damage", ["flipped", "cut off"])
def test_tokens_that_are_not_those_of_their_facts_are_refused(damage: str, tmp_path: Path) -> None:
    corpus = open_corpus("pvc://text", with_text(tmp_path) / "text", 0.0)
    made(tmp_path / "made", corpus).until(10**9)
    file = tmp_path / "made" / token_file.TOKENS
    tokens = bytearray(file.read_bytes())
    tokens[100] ^= 1
    file.write_bytes(tokens if damage == "flipped" else tokens[:-4])
    with pytest.raises(ValueError, match="is damaged" if damage == "flipped" else "is cut off"):
        token_file.read_facts(tmp_path / "made")


class Held:
    """Text is tokenized only as far as it is let through."""

    def __init__(self) -> None:
        self.let = threading.Semaphore(0)

    def __call__(self, tokenizer: Any) -> Encode:
        def encode(row: Row) -> Encoded:
            assert self.let.acquire(timeout=PATIENCE_S)
            return Encoded(tokenizer.encode(row.text, add_special_tokens=False).ids)

        return encode


def prepared(corpus: Corpus, cache: Path) -> Prepared:
    return prepare(parse_engine(engine(steps=STEPS)), corpus, None, cache)


def test_the_first_steps_can_be_taken_before_the_last_text_was_read(
    text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = open_corpus("pvc://text", text_folder, 0.0)
    whole = prepared(corpus, tmp_path / "whole")
    expected = [whole.packed.batch(step, 4).tolist() for step in range(STEPS)]
    held = Held()
    monkeypatch.setattr(preparation, "encoder", held)
    monkeypatch.setattr(preparation, "expected_tokens", lambda *_: 0)  # tokenizes a sample of the texts
    held.let.release(12)  # pieces of the texts
    growing = prepared(corpus, tmp_path / "growing")
    first = [growing.packed.batch(step, 4).tolist() for step in range(4)]
    assert not growing.rows.over
    held.let.release(1000)
    assert first + [growing.packed.batch(step, 4).tolist() for step in range(4, STEPS)] == expected
    growing.wait_for_all()
    assert np.array_equal(growing.packed.sequences, whole.packed.sequences)
    again = prepared(corpus, tmp_path / "growing")
    assert again.from_cache
    assert np.array_equal(again.packed.sequences, whole.packed.sequences)


class Store:
    """What rank 0 says, and the others hear."""

    def __init__(self) -> None:
        self._said = dict[str, str]()
        self._changed = threading.Condition()

    def tell(self, name: str, value: str = "") -> None:
        with self._changed:
            self._said[name] = value
            self._changed.notify_all()

    def hear(self, *names: str) -> tuple[str, str]:
        with self._changed:
            assert self._changed.wait_for(lambda: any(name in self._said for name in names), PATIENCE_S)
            name = next(name for name in names if name in self._said)
            return name, self._said[name]


def test_all_ranks_see_the_same_sequences_however_far_each_has_come(tmp_path: Path) -> None:
    corpus = open_corpus("pvc://text", with_text(tmp_path) / "text", 0.0)
    maker, store, folder = made(tmp_path / "made", corpus), Store(), tmp_path / "made"

    def batches(source: token_file.Source) -> list[list[list[int]]]:
        packed = Packed.growing(Rows(folder / token_file.TOKENS, source, SEQUENCE), SEQUENCE, 3, 4)
        return [packed.batch(step, 4).tolist() for step in range(3 * STEPS)]  # more than a pass

    found = list[list[list[list[int]]]]()
    follower = threading.Thread(target=lambda: found.append(batches(Followed(store))))
    follower.start()
    own = batches(Announced(folder, maker, store))
    follower.join(PATIENCE_S)
    assert found == [own]


def status_after(document: dict[str, Any], claims: Path) -> tuple[int, dict[str, Any], str]:
    status, log = Status(), io.StringIO()
    code = run(run_from_manifest(document, claims, None, {}), status, Control(), Lines("tokens", log))
    return code, status.to_json(), log.getvalue()


def slow_after(count: int, monkeypatch: pytest.MonkeyPatch, then: Callable[[], object]) -> None:
    """Call `then` in the thread that makes tokens, once so many parts are made."""

    def counted(*given: Any) -> Iterator[tuple[Tokens, Place | None]]:
        for number, part in enumerate(pack(*given)):
            if number == count:
                then()
            yield part

    monkeypatch.setattr(preparation, "pack", counted)


def test_a_run_that_trains_beside_has_the_result_of_one_that_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = manifest(steps=STEPS)
    _, whole, _ = status_after(document, with_text(tmp_path / "whole"))
    stepped = threading.Event()
    finished = Status.finished_step

    def told(self: Status, *given: Any, **named: Any) -> None:
        stepped.set()
        finished(self, *given, **named)

    monkeypatch.setattr(Status, "finished_step", told)
    slow_after(20, monkeypatch, lambda: stepped.wait(PATIENCE_S))
    code, beside, log = status_after(document, with_text(tmp_path / "beside"))
    assert code == 0, log
    assert stepped.is_set()
    assert "to begin with, and more beside the first steps" in log
    assert beside["fingerprint"] == whole["fingerprint"]


def test_a_bad_row_far_behind_ends_the_run_as_soon_as_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    lines = "".join(TEXTS.values()).splitlines()
    rows = [json.dumps({"text": line}) for line in lines]
    (tmp_path / "text/a.jsonl").write_text("\n".join([*rows[:-1], "{torn", rows[-1]]))
    document = manifest(steps=10_000)
    document["spec"]["engine"]["data"] |= {"holdoutFraction": 0}
    code, status, _ = status_after(document, tmp_path)
    assert code == 2
    assert f"a.jsonl, line {len(rows)}, is not JSON" in status["message"]
    assert status["step"] < 10_000


def test_too_little_text_is_refused_although_it_is_read_in_a_thread(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.txt").write_text("the pump feeds two cells. " * 4)
    document = engine(batch={"sequences": 4096, "microBatch": 1}, tokenizer={"train": {"vocabSize": 270}})
    document["data"] |= {"holdoutFraction": 0}
    corpus = open_corpus("pvc://text", tmp_path / "text", 0.0)
    with pytest.raises(InvalidJob, match="one step needs 4096"):
        prepare(parse_engine(document), corpus, None, tmp_path / "cache")
