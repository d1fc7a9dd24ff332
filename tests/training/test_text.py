"""From files to batches: held-out files, the tokenizer, packing, and the order of batches."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.training.small import TEXTS, VOCABULARY, engine
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from busbar.workloads.training.corpus import PIECE_BYTES, Document, open_corpus
from busbar.workloads.training.encoding import Encoded
from busbar.workloads.training.errors import InvalidJob
from busbar.workloads.training.job import parse_engine
from busbar.workloads.training.packing import BEGINS, TOKEN, Packed, document_order, pack
from busbar.workloads.training.paths import claim_root
from busbar.workloads.training.preparation import prepare
from busbar.workloads.training.rows import Row, RowReader
from busbar.workloads.training.tokenizer import (
    bytes_decoder,
    decode_bytes,
    end_of_text_id,
    token_bytes,
    tokenizer_hash,
    train_tokenizer,
)


def test_the_hold_out_is_by_file_disjoint_and_stable_when_files_are_added(text_folder: Path) -> None:
    before = open_corpus("pvc://text", text_folder, 0.3)
    (text_folder / "zz-new.txt").write_text("new")
    after = open_corpus("pvc://text", text_folder, 0.3)
    assert before.holdout
    assert not set(before.train) & set(before.holdout)
    assert set(before.holdout) <= set(after.holdout)
    assert before.digest != after.digest


def test_binary_and_hidden_files_are_left_out(text_folder: Path) -> None:
    (text_folder / ".hidden").write_text("x")
    (text_folder / "image.bin").write_bytes(b"\x00\x01")
    names = {doc.name for doc in open_corpus("pvc://text", text_folder, 0.0).train}
    assert names == set(TEXTS)


def test_what_gives_no_text_is_named_and_counted_by_reason(text_folder: Path) -> None:
    assert open_corpus("pvc://text", text_folder, 0.0).notes == ()
    for number in range(5):
        (text_folder / f"image-{number}.bin").write_bytes(b"\x00\x01")
    (text_folder / "nothing.txt").touch()
    (text_folder / "gone.txt").symlink_to("nowhere")
    (text_folder / "circle.txt").symlink_to("circle.txt")
    (text_folder / ".git").mkdir()
    (text_folder / ".git/objects.bin").write_bytes(b"\x00")
    (text_folder / "more").symlink_to(".git", target_is_directory=True)
    os.mkfifo(text_folder / "pipe")
    corpus = open_corpus("pvc://text", text_folder, 0.0)
    assert {document.name for document in corpus.train} == {*TEXTS, "nothing.txt"}
    field = "in spec.engine.data.uri gave no text"
    assert set(corpus.notes) == {
        f"5 {field}, binary: image-0.bin, image-1.bin, image-2.bin and 2 more",
        f"3 {field}, not readable: circle.txt, gone.txt, pipe",
        f"1 {field}, links to folders: more",
        f"1 {field}, empty: nothing.txt",
    }


def test_files_in_another_encoding_are_read_and_named(text_folder: Path) -> None:
    (text_folder / "whole.txt").write_text("x" + "日" * 5000)  # a character is cut where the look at it ends
    assert open_corpus("pvc://text", text_folder, 0.0).notes == ()
    (text_folder / "latin.txt").write_bytes("Überspannung".encode("latin-1"))
    corpus = open_corpus("pvc://text", text_folder, 0.0)
    assert corpus.notes == (
        "1 in spec.engine.data.uri are not UTF-8, and what is not is read as U+FFFD: latin.txt",
    )
    assert "latin.txt" in {document.name for document in corpus.train}


def test_files_that_cannot_be_opened_are_named(text_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the kernel's refusal: tests may run as root, whom it lets read everything."""
    name = os.fsdecode(b"\xff.txt")
    (text_folder / name).write_text("text")
    opening = Path.open

    def refuse(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name == name:
            raise PermissionError(13, "Permission denied", str(path))
        return opening(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    (note,) = open_corpus("pvc://text", text_folder, 0.0).notes
    assert note == "1 in spec.engine.data.uri gave no text, not readable: \\udcff.txt"


def test_a_folder_of_nothing_but_other_files_is_refused_with_their_names(tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_bytes(b"NUMPY\0\0")
    (tmp_path / "b.txt").touch()
    with pytest.raises(InvalidJob, match=r"holds no text .*binary: a\.npy.* empty: b\.txt"):
        open_corpus("pvc://text", tmp_path, 0.0)
    (tmp_path / "b.txt").write_text("b")
    assert len(open_corpus("pvc://text", tmp_path, 0.0).train) == 1


def test_the_standard_library_is_a_corpus_of_python_files_without_tests() -> None:
    corpus = open_corpus("builtin://python-stdlib", None, 0.05)
    names = [doc.name for doc in (*corpus.train, *corpus.holdout)]
    assert "json/decoder.py" in names
    assert len(names) > 300
    assert not [name for name in names if "site-packages" in name or "/test/" in name]


@pytest.mark.parametrize("exists", [False, True], ids=["missing", "empty"])
def test_a_corpus_without_text_is_refused(exists: bool, tmp_path: Path) -> None:
    if exists:
        (tmp_path / "text").mkdir()
    with pytest.raises(InvalidJob, match=r"spec\.engine\.data\.uri"):
        open_corpus("pvc://text", tmp_path / "text", 0.1)


def test_the_same_text_trains_the_same_tokenizer() -> None:
    assert tokenizer_hash(train_tokenizer(TEXTS.values(), 400)) == tokenizer_hash(
        train_tokenizer(TEXTS.values(), 400)
    )


def test_tokens_decode_to_the_very_bytes() -> None:
    tokenizer = train_tokenizer(TEXTS.values(), VOCABULARY)
    table = token_bytes(tokenizer)
    for text in [*TEXTS.values(), "naïve — ￼ \t\r\n\x7f 日本", "".join(map(chr, range(256)))]:
        assert decode_bytes(table, tokenizer.encode(text).ids) == text.encode()
    assert table[end_of_text_id(tokenizer)] == b""


@pytest.mark.parametrize(
    ("settings", "token"),
    [
        ('{"eos_token": "<END>"}', "<END>"),
        ('{"eos_token": {"content": "<END>", "lstrip": false}}', "<END>"),
        ('{"eos_token": null}', "<first>"),
        ('{"eos_token": "<unknown>"}', "<first>"),
        ("[", "<first>"),
        (None, "<first>"),
    ],
)
def test_documents_end_with_the_token_that_a_saved_tokenizer_names(
    tmp_path: Path, settings: str | None, token: str
) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.add_special_tokens(["<first>", "<END>"])
    if settings is not None:
        (tmp_path / "tokenizer_config.json").write_text(settings)
    assert tokenizer.id_to_token(end_of_text_id(tokenizer, tmp_path)) == token
    tokenizer.add_special_tokens(["</s>"])
    assert tokenizer.id_to_token(end_of_text_id(tokenizer, tmp_path)) == "</s>", "a usual name comes first"


def test_packing_stops_when_it_has_enough(text_folder: Path) -> None:
    documents = open_corpus("pvc://text", text_folder, 0.0).train
    read = list[str]()

    def encode(row: Row) -> Encoded:
        read.append(row.text)
        return Encoded([1] * 50)

    stream = np.concatenate([tokens for tokens, _ in pack(documents, encode, 0, 120, 10)])
    assert len(read) == 3
    assert (stream & TOKEN).tolist() == ([0] + [1] * 50) * 2 + [0] + [1] * 17
    assert np.flatnonzero(stream & BEGINS).tolist() == [0, 51, 102]


def test_a_pass_shows_every_sequence_once_and_the_next_pass_in_another_order() -> None:
    data = Packed.cut(np.arange(10 * 8, dtype=np.uint32), 8, seed=1, batch=5)
    passes = [[*data.indices(first, 5), *data.indices(first + 1, 5)] for first in (0, 2)]
    assert [sorted(rows) for rows in passes] == [list(range(10))] * 2
    assert passes[0] != passes[1]


def test_a_batch_is_a_function_of_seed_and_step_alone() -> None:
    data = Packed.cut(np.arange(64 * 8, dtype=np.uint32), 8, seed=1, batch=3)
    forward = [data.indices(step, 3) for step in range(50)]
    steps = list(range(50))
    random.Random(0).shuffle(steps)
    assert {step: data.indices(step, 3) for step in steps} == dict(enumerate(forward))
    other = Packed.cut(np.arange(64 * 8, dtype=np.uint32), 8, seed=2, batch=3)
    assert other.indices(0, 3) != forward[0]


def test_the_text_that_was_seen_is_the_text_of_the_trained_sequences() -> None:
    data = Packed.cut(np.arange(20 * 4, dtype=np.uint32), 4, seed=0, batch=2)
    seen = np.concatenate(data.seen_runs(steps=6, batch=2)).tolist()
    trained = [token for step in range(6) for row in data.batch(step, 2).tolist() for token in row]
    assert Counter(seen) == Counter(trained)


def test_too_little_text_for_one_step_is_refused() -> None:
    with pytest.raises(InvalidJob, match="holds 2 sequences of 8 tokens, and one step needs 3"):
        Packed.cut(np.arange(23, dtype=np.uint32), 8, seed=0, batch=3)


def test_prepared_text_is_read_from_its_cache_and_made_again_when_that_is_damaged(
    text_folder: Path, tmp_path: Path
) -> None:
    spec = parse_engine(engine())
    corpus = open_corpus("pvc://text", text_folder, 0.2)
    cache = tmp_path / "prepared"
    first = prepare(spec, corpus, None, cache)
    second = prepare(spec, corpus, None, cache)
    assert (first.from_cache, second.from_cache) == (False, True)
    sequences = np.array(first.packed.sequences)  # it is a memory-mapped view of the file
    assert np.array_equal(sequences, second.packed.sequences)
    assert first.tokenizer_hash == second.tokenizer_hash
    tokens = bytearray((cache / "tokens.bin").read_bytes())
    tokens[-1] ^= 1
    (cache / "tokens.bin").write_bytes(bytes(tokens))
    third = prepare(spec, corpus, None, cache)
    assert not third.from_cache
    assert np.array_equal(sequences, third.packed.sequences)


@pytest.mark.parametrize("file", ["tokens.bin", "tokenizer.json", "facts.json"])
@pytest.mark.parametrize("left", [0, 100], ids=["empty", "torn"])
def test_files_that_a_power_cut_left_torn_are_made_again(
    file: str, left: int, text_folder: Path, tmp_path: Path
) -> None:
    spec, cache = parse_engine(engine()), tmp_path / "prepared"
    corpus = open_corpus("pvc://text", text_folder, 0.2)
    first = prepare(spec, corpus, None, cache)
    (cache / file).write_bytes((cache / file).read_bytes()[:left])
    again = prepare(spec, corpus, None, cache)
    assert not again.from_cache
    assert again.tokenizer_hash == first.tokenizer_hash


def test_a_file_whose_name_is_no_unicode_is_text_like_any_other(text_folder: Path) -> None:
    Path(os.fsdecode(os.fsencode(text_folder) + b"/caf\xe9.txt")).write_text("a name in Latin-1")
    corpus = open_corpus("pvc://text", text_folder, 0.2)
    documents = [*corpus.train, *corpus.holdout]
    assert len(documents) == len(TEXTS) + 1
    assert len(document_order(documents, 0)) == len(documents)


def test_tokens_of_any_kind_of_tokenizer_become_the_texts_bytes() -> None:
    text = "the pump opens the line — twice"
    byte_level = train_tokenizer(TEXTS.values(), VOCABULARY)
    pieces = Tokenizer(
        models.Unigram([("<unk>", 0.0), *((c, -1.0) for c in sorted(set(text))), ("▁", -1.0)], 0)
    )
    pieces.pre_tokenizer = pre_tokenizers.Metaspace()
    pieces.decoder = decoders.Metaspace()
    for tokenizer in (byte_level, pieces):
        assert bytes_decoder(tokenizer)(tokenizer.encode(text).ids) == text.encode()


def test_tokens_beyond_a_gap_of_ids_have_their_bytes() -> None:
    written = json.loads(train_tokenizer(TEXTS, VOCABULARY).to_str())
    vocabulary = written["model"]["vocab"]
    vocabulary["e"] = 2 * VOCABULARY
    tokenizer = Tokenizer.from_str(json.dumps(written))
    ids = tokenizer.encode("e").ids
    assert ids == [2 * VOCABULARY]
    assert bytes_decoder(tokenizer)(ids) == b"e"


def test_documents_come_in_a_seeded_order(text_folder: Path) -> None:
    documents = open_corpus("pvc://text", text_folder, 0.0).train
    assert document_order(documents, 0) == document_order(list(reversed(documents)), 0)
    assert document_order(documents, 0) != document_order(documents, 1)


def whole(document: Document) -> list[str]:
    """The documents of a file, joined from their pieces."""
    texts: list[str] = []
    for piece in document.pieces():
        if piece.begins:
            texts.append("")
        texts[-1] += piece.row.text
    return texts


@pytest.mark.parametrize("name", ["one.txt", "one.jsonl"])
def test_a_single_file_is_a_corpus_and_its_end_is_held_out(name: str, tmp_path: Path) -> None:
    lines = [f"line {number} of a text\n" for number in range(500)]
    file = tmp_path / name
    file.write_text("".join(json.dumps({"text": line}) + "\n" if name[-1] == "l" else line for line in lines))
    corpus = open_corpus("pvc://claim/" + name, file, 0.1)
    kept, held = ("".join(whole(side[0])) for side in (corpus.train, corpus.holdout))
    assert kept + held == "".join(lines)
    assert kept.endswith("\n")
    assert 0.05 < len(held) / len(kept + held) < 0.15
    assert open_corpus("pvc://claim/" + name, file, 0.0).holdout == ()


def test_each_line_of_a_jsonl_file_is_a_document(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "the first", "id": 1}\n\n{"id": 2, "text": "the\\nsecond"}\n')
    (document,) = open_corpus("pvc://text", tmp_path, 0.0).train
    assert whole(document) == ["the first", "the\nsecond"]
    parts = pack([document], lambda row: Encoded([len(row.text)]), 0, 100, 8)
    stream = np.concatenate([tokens for tokens, _ in parts])
    assert (stream & TOKEN).tolist() == [0, 9, 0, 10]
    assert ((stream & BEGINS) != 0).tolist() == [True, False, True, False]


@pytest.mark.parametrize(
    ("name", "content", "documents"),
    [
        ("a.JSONL", '{"text": "x"}\n{"text": "y"}\n', ["x", "y"]),
        ("a.json", '{"text": "x"}\n{"text": "y"}\n', ["x", "y"]),
        ("a.json", '\ufeff{"text": "x"}\n{"text": "y"}\n', ["x", "y"]),
        ("a.json", '{"text": "x"}\n', ['{"text": "x"}\n']),
        ("a.json", '{\n"text": "x"\n}\n', ['{\n"text": "x"\n}\n']),
        ("a.txt", '{"text": "x"}\n{"text": "y"}\n', ['{"text": "x"}\n{"text": "y"}\n']),
    ],
)
def test_lines_of_objects_are_documents_also_in_a_json_file(
    name: str, content: str, documents: list[str], tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    (document,) = open_corpus("pvc://text", tmp_path, 0.0).train
    assert whole(document) == documents


BAD_LINES = [
    ('{"body": "x"}', "has no field `text` or `completion` or `messages`, but body", '{"text": ""}'),
    ('{"text": 3}', "has no field `text` of type string, but int", '{"text": "3"}'),
    ('["text"]', "has no field `text` or .*, but list", '{"text": "t"}'),
    ('{"text": "torn', "is not JSON", '{"text": "whole"}'),
    ("[" * 100_000, "is not JSON", '{"text": "[[["}'),
]


@pytest.mark.parametrize(("bad", "said", "good"), BAD_LINES, ids=[row[0][:20] for row in BAD_LINES])
def test_a_line_that_is_no_document_is_named(bad: str, said: str, good: str, tmp_path: Path) -> None:
    document = Document("a.jsonl", tmp_path / "a.jsonl", rows=RowReader())
    document.path.write_text('{"text": "x"}\n' + bad + "\n")
    with pytest.raises(InvalidJob, match=f"line 2, {said}"):
        whole(document)
    document.path.write_text('{"text": "x"}\n' + good + "\n")
    assert len(whole(document)) == 2


def test_links_do_not_lead_out_of_the_claim(tmp_path: Path) -> None:
    claim, outside = tmp_path / "claim", tmp_path / "secret.txt"
    (claim / "text").mkdir(parents=True)
    (claim / "blobs").mkdir()
    (claim / "blobs/b").write_text("inside")
    outside.write_text("outside")
    (claim / "text/inside.txt").symlink_to("../blobs/b")
    uri = "pvc://claim/text"
    assert claim_root(uri, claim / "text") == claim
    corpus = open_corpus(uri, claim / "text", 0.0, claim_root(uri, claim / "text"))
    assert [whole(document) for document in corpus.train] == [["inside"]]
    (claim / "text/out.txt").symlink_to(outside)
    with pytest.raises(InvalidJob, match=r"out\.txt is a link that leads out"):
        open_corpus(uri, claim / "text", 0.0, claim)
    (claim / "one.txt").symlink_to(outside)
    with pytest.raises(InvalidJob, match=r"one\.txt is a link that leads out"):
        open_corpus("pvc://claim/one.txt", claim / "one.txt", 0.0, claim)


@pytest.mark.parametrize(
    "text", ["a" * 700_000, "ä日" * 150_000, "short\n" * 100_000, "\n".join(["x" * 300_000] * 3)]
)
def test_huge_files_and_lines_come_in_small_pieces_that_lose_nothing(text: str, tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text(text)
    pieces = [piece.row.text for piece in Document("a.txt", file).pieces()]
    assert "".join(pieces) == text
    assert len(pieces) > 1
    assert max(len(piece.encode()) for piece in pieces) <= PIECE_BYTES


def test_a_huge_line_does_not_become_one_word_of_the_tokenizer() -> None:
    line = "".join(random.Random(3).choices("abcdefgh", k=20_000))
    tokenizer = train_tokenizer([line], 300)
    assert max(len(token) for token in tokenizer.get_vocab()) < 256
    assert tokenizer.decode(tokenizer.encode(line).ids) == line


def test_a_vocabulary_that_the_text_cannot_fill_is_refused_with_its_real_size(
    text_folder: Path, tmp_path: Path
) -> None:
    spec = parse_engine(engine(tokenizer={"train": {"vocabSize": 811}}))
    with pytest.raises(
        InvalidJob, match=r"vocabSize: is 811, and this text has pieces for (\d+) entries"
    ) as refusal:
        prepare(spec, open_corpus("pvc://text", text_folder, 0.2), None, tmp_path / "prepared")
    size = int(str(refusal.value).split("pieces for ")[1].split()[0])
    spec = parse_engine(engine(tokenizer={"train": {"vocabSize": size}}))
    prepared = prepare(spec, open_corpus("pvc://text", text_folder, 0.2), None, tmp_path / "prepared")
    assert prepared.tokenizer.get_vocab_size() == size
