"""Tokenizer and token stream of a run: made once, kept beside its checkpoints, checked when read again.

A resumed run must read the same tokens as its first attempt. Both are functions of the corpus, the vocabulary and the
seed, so the cache only saves time; its key and checksum decide whether it is valid.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from busbar.workloads.training.chat import ChatTemplate
from busbar.workloads.training.corpus import Corpus, Document
from busbar.workloads.training.durable import fsync
from busbar.workloads.training.encoding import encoder
from busbar.workloads.training.errors import InvalidJob
from busbar.workloads.training.packing import Packed, Tokens, document_order, pack, tokens_for
from busbar.workloads.training.settings import EngineSpec
from busbar.workloads.training.tokenizer import (
    end_of_text_id,
    load_tokenizer,
    tokenizer_hash,
    train_tokenizer,
)

TOKENS = "tokens.bin"  # uint32, little-endian


@dataclass(frozen=True)
class Prepared:
    tokenizer: Any
    tokenizer_hash: str
    packed: Packed
    from_cache: bool
    bad_rows: int = 0  # left out of what was read for training
    bad_row: str = ""  # the first one: why


def prepare(
    spec: EngineSpec,
    corpus: Corpus,
    saved_tokenizer: Path | None,
    cache: Path,
    progress: Callable[[float], None] = lambda share: None,
    *,
    makes: bool = True,
) -> Prepared:
    """Tokenizer and packed tokens, from `cache` when it holds this run's. Raises InvalidJob.

    Args:
        makes: make them where it does not; of a gang rank 0 does.
    """
    wanted = tokens_for(spec.steps, spec.batch.sequences, spec.data.sequence_length)
    key = _key(spec, corpus, saved_tokenizer, wanted)
    cached = _read_cache(cache, key)
    from_cache = cached is not None
    if cached is None and not makes:
        raise InvalidJob(
            "spec.engine.data",
            f"this rank finds other data than rank 0, which has prepared its own in {cache}",
            "give all pods the same claims",
        )
    if cached is None:
        bad = _Bad()
        order = document_order(corpus.train, spec.seed)
        tokenizer = (
            _make_tokenizer(spec, order) if saved_tokenizer is None else load_tokenizer(saved_tokenizer)
        )
        stream = pack(
            order,
            encoder(tokenizer),
            end_of_text_id(tokenizer),
            wanted,
            spec.data.sequence_length,
            lambda done: progress(done / wanted),
            bad.count,
        )
        _write_cache(cache, key, tokenizer, stream, bad)
        cached = tokenizer, _open_stream(cache), bad
    tokenizer, tokens, bad = cached
    packed = Packed.cut(tokens, spec.data.sequence_length, spec.seed, spec.batch.sequences)
    return Prepared(tokenizer, tokenizer_hash(tokenizer), packed, from_cache, bad.rows, bad.first)


@dataclass
class _Bad:
    """The rows that were left out."""

    rows: int = 0
    first: str = ""

    def count(self, refusal: InvalidJob) -> None:
        self.rows += 1
        self.first = self.first or refusal.problem


def _make_tokenizer(spec: EngineSpec, order: Sequence[Document]) -> Any:
    wanted = spec.tokenizer.vocab_size
    assert wanted is not None
    texts = (piece.row.text for document in order for piece in document.pieces())
    tokenizer = train_tokenizer(texts, wanted)
    size = tokenizer.get_vocab_size()
    if size != wanted:
        raise InvalidJob(
            "spec.engine.tokenizer.train.vocabSize",
            f"is {wanted}, and this text has pieces for {size} entries only",
            f"set it to {size} (and vocab_size in the model's config, if it is there), or add text",
        )
    return tokenizer


def _key(spec: EngineSpec, corpus: Corpus, saved_tokenizer: Path | None, wanted: int) -> str:
    saved = None
    if saved_tokenizer is not None:
        saved = hashlib.sha256((saved_tokenizer / "tokenizer.json").read_bytes()).hexdigest()
    parts = [3, corpus.digest, spec.tokenizer.vocab_size, saved, spec.seed, wanted]
    if corpus.has_rows:
        data = spec.data
        template = ChatTemplate(saved_tokenizer).digest
        parts += [data.sequence_length, data.skips_bad_rows, dataclasses.astuple(data.fields), template]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _read_cache(cache: Path, key: str) -> tuple[Any, Tokens, _Bad] | None:
    """None for an incomplete cache: a power failure may leave any of the files empty or truncated."""
    try:
        facts = json.loads((cache / "facts.json").read_text())
        bad = _Bad(int(facts["badRows"]), str(facts["badRow"]))
        if facts != _facts(cache, key, bad):
            return None
        return load_tokenizer(cache), _open_stream(cache), bad
    except (OSError, ValueError, EOFError, KeyError, TypeError, InvalidJob):
        return None


def _open_stream(cache: Path) -> Tokens:
    """The tokens as a view of their file: pages that are not in use cost no memory."""
    return np.memmap(cache / TOKENS, dtype=np.uint32, mode="r")


def _facts(folder: Path, key: str, bad: _Bad) -> dict[str, Any]:
    return {
        "key": key,
        "crc32": _file_crc(folder / TOKENS),
        "tokenizerCrc32": _file_crc(folder / "tokenizer.json"),
        "badRows": bad.rows,
        "badRow": bad.first,
    }


def _file_crc(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while data := file.read(2**20):
            crc = zlib.crc32(data, crc)
    return crc


def _write_cache(cache: Path, key: str, tokenizer: Any, stream: Iterable[Tokens], bad: _Bad) -> None:
    """Write the stream to its file; `bad` is complete when that has been read to its end."""
    temporary = cache.with_name(f".tmp-{cache.name}-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    tokenizer.save(str(temporary / "tokenizer.json"))
    with (temporary / TOKENS).open("wb") as file:
        for part in stream:
            file.write(part.data)
    fsync(temporary / TOKENS)
    (temporary / "facts.json").write_text(json.dumps(_facts(temporary, key, bad)))
    shutil.rmtree(cache, ignore_errors=True)
    temporary.rename(cache)
