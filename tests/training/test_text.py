"""From files to batches: what is held out, the tokenizer, packing, and the order of a run."""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from tests.training.small import TEXTS, VOCABULARY, engine
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from busbar.workloads.training.corpus import open_corpus
from busbar.workloads.training.errors import InvalidJob
from busbar.workloads.training.job import parse_engine
from busbar.workloads.training.packing import Packed, document_order, pack
from busbar.workloads.training.preparation import prepare
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


def test_packing_stops_when_it_has_enough(text_folder: Path) -> None:
    documents = open_corpus("pvc://text", text_folder, 0.0).train
    read = list[str]()

    def encode(text: str) -> list[int]:
        read.append(text)
        return [1] * 50

    stream = pack(documents, encode, 0, 120)
    assert len(read) == 3
    assert stream.tolist() == ([0] + [1] * 50) * 2 + [0] + [1] * 17


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
    assert np.array_equal(first.packed.sequences, second.packed.sequences)
    assert first.tokenizer_hash == second.tokenizer_hash
    tokens = bytearray((cache / "tokens.npy").read_bytes())
    tokens[-1] ^= 1
    (cache / "tokens.npy").write_bytes(bytes(tokens))
    third = prepare(spec, corpus, None, cache)
    assert not third.from_cache
    assert np.array_equal(first.packed.sequences, third.packed.sequences)


@pytest.mark.parametrize("file", ["tokens.npy", "tokenizer.json", "facts.json"])
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


def test_documents_come_in_a_seeded_order(text_folder: Path) -> None:
    documents = open_corpus("pvc://text", text_folder, 0.0).train
    assert document_order(documents, 0) == document_order(list(reversed(documents)), 0)
    assert document_order(documents, 0) != document_order(documents, 1)
