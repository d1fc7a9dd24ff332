"""Parquet files and folders that `datasets` saved: the same rows as JSONL, in pieces, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from tests.training.small import SEQUENCE
from tests.training.test_rows import CONVERSATIONS, MARKED, answers, save_tokenizer, write_rows

from busbar.workloads.training import tables
from busbar.workloads.training.chat import ChatTemplate
from busbar.workloads.training.corpus import Corpus, open_corpus
from busbar.workloads.training.encoding import encoder
from busbar.workloads.training.errors import InvalidJob
from busbar.workloads.training.packing import pack
from busbar.workloads.training.rows import RowReader
from busbar.workloads.training.settings import Fields
from busbar.workloads.training.tokenizer import end_of_text_id, load_tokenizer

CHATS = [{"messages": each} for each in CONVERSATIONS * 20]
STRUCT = pa.struct([("role", pa.string()), ("content", pa.string()), ("tool_calls", pa.list_(pa.string()))])


def write(path: Path, rows: Sequence[dict[str, Any]], schema: pa.Schema | None = None, **how: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.Table.from_pylist(list(rows), schema), path, **how)
    return path


def save_dataset(folder: Path, *shards: Sequence[dict[str, Any]], batch: int = 7, **state: Any) -> Path:
    """As `Dataset.save_to_disk` does."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"data-{i:05}-of-{len(shards):05}.arrow" for i in range(len(shards))]
    for name, rows in zip(names, shards, strict=True):
        table = pa.Table.from_pylist(list(rows))
        with pa.OSFile(str(folder / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table, max_chunksize=batch)
    files = [{"filename": name} for name in names]
    (folder / "state.json").write_text(
        json.dumps({"_data_files": files, "_format_columns": None, "_split": "train", **state})
    )
    (folder / "dataset_info.json").write_text("{}")
    return folder


def rows_of(corpus: Corpus) -> list[str]:
    return [piece.row.text for document in corpus.train for piece in document.pieces()]


def texts(place: Path, holdout: float = 0.0, **how: Any) -> list[str]:
    return rows_of(open_corpus("pvc://data", place, holdout, **how))


def stream_of(place: Path, tokenizer: Path) -> list[bytes]:
    """What a run would train on."""
    loaded = load_tokenizer(tokenizer)
    reader = RowReader(chat=ChatTemplate(tokenizer))
    corpus = open_corpus("pvc://data", place, 0.0, rows=reader)
    return [
        part.tobytes()
        for part, _ in pack(corpus.train, encoder(loaded), end_of_text_id(loaded), 20_000, SEQUENCE)
    ]


@pytest.mark.parametrize("compression", ["none", "snappy", "gzip", "zstd", "brotli", "lz4"])
def test_every_compression_gives_the_rows_in_order(tmp_path: Path, compression: str) -> None:
    rows = [{"id": n, "text": f"the pump feeds {n} cells, 日本"} for n in range(500)]
    write(tmp_path / "a.parquet", rows, compression=compression, row_group_size=97)
    assert texts(tmp_path) == [row["text"] for row in rows]


@pytest.mark.parametrize(
    "kind",
    [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())],
    ids=str,
)
def test_every_kind_of_text_column_is_read(tmp_path: Path, kind: pa.DataType) -> None:
    rows = [{"text": f"valve {n % 7}"} for n in range(100)]
    write(tmp_path / "a.parquet", rows, pa.schema([("text", kind)]))
    assert texts(tmp_path) == [row["text"] for row in rows]


@pytest.mark.parametrize("rows", [answers(60), CHATS], ids=["answers", "chats"])
def test_tokens_are_those_of_the_same_rows_as_jsonl(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    tokenizer = save_tokenizer(tmp_path / "tokenizer", MARKED)
    lines = write_rows(tmp_path / "lines/a.jsonl", rows)
    wanted = stream_of(lines, tokenizer)
    schema = pa.schema([("messages", pa.list_(STRUCT))]) if "messages" in rows[0] else None
    assert stream_of(write(tmp_path / "a.parquet", rows, schema, row_group_size=11), tokenizer) == wanted
    assert stream_of(save_dataset(tmp_path / "saved", rows), tokenizer) == wanted


def test_rows_are_read_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "AT_ONCE_BYTES", 4000)
    rows = [{"text": f"{n} " + "pump " * 100} for n in range(300)]
    write(tmp_path / "a.parquet", rows)
    save_dataset(tmp_path / "saved", rows, batch=300)
    sizes: list[int] = []
    slices = tables.Table._slices

    def noted(table: tables.Table, *arguments: Any) -> Any:
        for batch in slices(table, *arguments):
            sizes.append(batch.num_rows)
            yield batch

    monkeypatch.setattr(tables.Table, "_slices", noted)
    for place in ("a.parquet", "saved"):
        sizes.clear()
        assert texts(tmp_path / place) == [row["text"] for row in rows]
        assert sum(sizes) == 300
        assert max(sizes) <= 8


@pytest.mark.parametrize("fraction", [0.05, 0.34, 0.5])
@pytest.mark.parametrize("saved", [False, True])
def test_of_a_single_table_the_last_rows_are_held_out(tmp_path: Path, saved: bool, fraction: float) -> None:
    rows = [{"text": f"row {n}"} for n in range(100)]
    place = (
        save_dataset(tmp_path / "saved", rows)
        if saved
        else write(tmp_path / "a.parquet", rows, row_group_size=13)
    )
    corpus = open_corpus("pvc://data", place, fraction)
    cut = int(100 * (1 - fraction))
    held = [piece.row.text for document in corpus.holdout for piece in document.pieces()]
    assert rows_of(corpus) == [row["text"] for row in rows[:cut]]
    assert held == [row["text"] for row in rows[cut:]]


def test_a_saved_data_set_is_read_in_the_order_of_its_state_and_of_several_the_one_called_train(
    tmp_path: Path,
) -> None:
    train, test = [[{"text": f"{name} {n}"} for n in range(20)] for name in ("train", "test")]
    save_dataset(tmp_path / "all/train", train[:12], train[12:])
    save_dataset(tmp_path / "all/test", test)
    (tmp_path / "all/dataset_dict.json").write_text('{"splits": ["test", "train"]}')
    (tmp_path / "notes.txt").write_text("beside it")
    corpus = open_corpus("pvc://data", tmp_path, 0.0)
    assert rows_of(corpus) == [*(row["text"] for row in train), "beside it"]
    assert corpus.notes == ("of all the data set train is read, and not test",)
    assert texts(tmp_path / "all/test") == [row["text"] for row in test]


def test_a_row_that_lacks_its_text_is_named_or_skipped(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", [{"text": "a"}, {"text": None}, {"text": "c"}], row_group_size=1)
    with pytest.raises(InvalidJob, match=r"a\.parquet, row 2, has no field `text` or"):
        texts(tmp_path)
    assert texts(tmp_path, rows=RowReader(skips=True)) == ["a", "c"]
    write(tmp_path / "a.parquet", [{"text": b"bytes"}])
    with pytest.raises(InvalidJob, match="row 1, has no field `text` of type string, but bytes"):
        texts(tmp_path)


def test_bytes_that_are_not_utf_8_are_a_bad_row_with_its_number(tmp_path: Path) -> None:
    binary = pa.array([b"a", b"b", b"\xff\xfe", b"d"], pa.binary())
    text = pa.Array.from_buffers(pa.string(), 4, binary.buffers())
    parquet.write_table(pa.table({"text": text}), tmp_path / "a.parquet")
    with pytest.raises(InvalidJob, match=r"a\.parquet, row 3, holds bytes that are not UTF-8"):
        texts(tmp_path)
    assert texts(tmp_path, rows=RowReader(skips=True)) == ["a", "b", "d"]


def test_a_saved_data_set_without_any_of_its_files_is_no_text(tmp_path: Path) -> None:
    saved = save_dataset(tmp_path / "saved", [{"text": "a"}])
    (saved / "data-00000-of-00001.arrow").unlink()
    with pytest.raises(InvalidJob, match=r"saved lacks data-00000-of-00001\.arrow"):
        texts(saved)
    (saved / "state.json").write_text('{"some": "other file"}')
    assert len(texts(saved)) == 2, "text as any other"


def test_other_names_are_read_where_they_are_told(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", [{"body": "read", "text": "not read"}])
    fields = Fields(text="body", prompt=None, completion=None, messages=None)
    assert texts(tmp_path, rows=RowReader(fields)) == ["read"]
    write(tmp_path / "b.parquet", [{"words": "x", "label": 1}])
    with pytest.raises(
        InvalidJob, match=r"b\.parquet has no column `completion` or .*; its columns are `words`, `label`"
    ):
        texts(tmp_path / "b.parquet")


def _damage(path: Path, at: float, with_: bytes | None = None) -> None:
    data = path.read_bytes()
    place = int(len(data) * at)
    path.write_bytes(data[:place] if with_ is None else data[:place] + with_ + data[place + len(with_) :])


@pytest.mark.parametrize("at", [0.1, 0.5, 0.9])
def test_a_table_that_was_cut_off_is_refused_by_name(tmp_path: Path, at: float) -> None:
    rows = [{"text": f"the pump feeds {n} cells"} for n in range(2000)]
    cut = write(tmp_path / "a.parquet", rows)
    _damage(cut, at)
    with pytest.raises(InvalidJob, match=r"a\.parquet cannot be read as Parquet"):
        texts(tmp_path)
    saved = save_dataset(tmp_path / "saved", rows)
    _damage(saved / "data-00000-of-00001.arrow", at)
    with pytest.raises(InvalidJob, match=r"data-00000-of-00001\.arrow cannot be read as Arrow"):
        texts(saved)


def test_a_damaged_page_ends_the_run_and_is_not_trained_on(tmp_path: Path) -> None:
    rows = [{"text": f"the pump feeds {n} cells"} for n in range(2000)]
    path = write(
        tmp_path / "a.parquet", rows, write_page_checksum=True, compression="none", use_dictionary=False
    )
    _damage(path, 0.5, b"\xff\xff")
    with pytest.raises(InvalidJob, match=r"a\.parquet cannot be read as Parquet"):
        texts(tmp_path)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a file that is missing": (
        {"_data_files": [{"filename": "data-00000-of-00001.arrow"}, {"filename": "other.arrow"}]},
        "saved lacks other.arrow; copy the whole folder",
    ),
    "a file elsewhere": ({"_data_files": [{"filename": "../away.arrow"}]}, "state.json lists no data files"),
    "no files": ({"_data_files": []}, "state.json lists no data files"),
    "a selection beside it": (
        {"_indices_data_files": [{"filename": "indices.arrow"}]},
        "with a selection of its rows",
    ),
    "columns that it hides": (
        {"_format_columns": ["label"]},
        "has no column .*; its columns are `label`",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_saved_data_set_that_is_not_whole_is_refused(tmp_path: Path, case: str) -> None:
    state, why = REFUSED[case]
    save_dataset(tmp_path / "saved", [{"text": "a", "label": 1}], **state)
    with pytest.raises(InvalidJob, match=why):
        texts(tmp_path)
    save_dataset(tmp_path / "saved", [{"text": "a", "label": 1}], _format_columns=["text"])
    assert texts(tmp_path) == ["a"]


def test_several_data_sets_without_one_called_train_are_refused(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["dev", "test"]}')
    with pytest.raises(InvalidJob, match="holds the data sets dev, test, and none is called train"):
        texts(tmp_path)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["../other"]}')
    with pytest.raises(InvalidJob, match="lists no data sets"):
        texts(tmp_path)


def test_a_link_out_of_the_claim_a_named_format_and_other_tables_are_refused(tmp_path: Path) -> None:
    away = write(tmp_path / "away.parquet", [{"text": "a"}])
    claim = tmp_path / "claim"
    claim.mkdir()
    (claim / "a.parquet").symlink_to(away)
    with pytest.raises(InvalidJob, match="is a link that leads out of"):
        texts(claim)
    with pytest.raises(InvalidJob, match=r"is jsonl, and away\.parquet is Parquet; remove it"):
        texts(away, form="jsonl")
    (claim / "a.parquet").unlink()
    for name, why in (
        ("a.arrow", "only in a folder that datasets saved"),
        ("a.orc", "is ORC, which is not read"),
    ):
        (claim / name).write_bytes(b"x")
        with pytest.raises(InvalidJob, match=why):
            texts(claim)
        (claim / name).unlink()


def test_tables_without_rows_are_left_out_and_alone_they_are_no_text(tmp_path: Path) -> None:
    schema = pa.schema([("text", pa.string())])
    write(tmp_path / "a.parquet", [], schema)
    (tmp_path / "b.parquet").touch()
    with pytest.raises(InvalidJob, match=r"holds no text .*empty: a\.parquet, b\.parquet"):
        texts(tmp_path)
    write(tmp_path / "c.parquet", [{"text": "c"}])
    corpus = open_corpus("pvc://data", tmp_path, 0.0)
    assert rows_of(corpus) == ["c"]
    assert corpus.notes == ("2 in spec.engine.data.uri gave no text, empty: a.parquet, b.parquet",)


def test_a_very_long_row_is_refused_and_its_neighbour_is_not(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", [{"text": "x" * 2**24}, {"text": "y" * (2**24 + 1)}])
    with pytest.raises(InvalidJob, match="row 2, is longer than 16777216 characters"):
        texts(tmp_path)
