"""Tokenizer and token stream of a run: made once, kept beside its checkpoints, checked when read again.

A resumed run must read the same tokens as its first attempt. Both are functions of the corpus, the vocabulary and the
seed, so the cache only saves time; its key and checksum decide whether it is valid. Training begins when the tokens of the
first steps are there (`token_file`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from busbar.workloads.training.chat import ChatTemplate
from busbar.workloads.training.corpus import Corpus, Document
from busbar.workloads.training.encoding import encoder
from busbar.workloads.training.errors import InvalidJob
from busbar.workloads.training.packing import (
    TOKEN_BYTES,
    Packed,
    document_order,
    pack,
    tokens_for,
    window_sequences,
)
from busbar.workloads.training.settings import EngineSpec
from busbar.workloads.training.token_file import (
    TOKENS,
    Announced,
    BadRows,
    Facts,
    Followed,
    Maker,
    Peers,
    Rows,
    Source,
    read_facts,
)
from busbar.workloads.training.token_size import expected_tokens
from busbar.workloads.training.tokenizer import (
    end_of_text_id,
    load_tokenizer,
    named_end,
    tokenizer_hash,
    train_tokenizer,
)

TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class Prepared:
    """Tokenizer and tokens of a run; `close` when no more of them are needed."""

    tokenizer: Any
    tokenizer_hash: str
    packed: Packed
    from_cache: bool
    bad: BadRows  # of those that were read so far
    rows: Rows
    source: Source

    def wait_for_all(self) -> None:
        """Until everything is read that the run needs."""
        self.rows(sys.maxsize)

    def close(self) -> None:
        self.source.close()


def prepare(
    spec: EngineSpec,
    corpus: Corpus,
    saved_tokenizer: Path | None,
    cache: Path,
    progress: Callable[[float], None] = lambda share: None,
    *,
    makes: bool = True,
    peers: Peers | None = None,
    confirm: Callable[[], object] = lambda: None,
    room: Callable[[int, int], object] = lambda there, missing: None,
) -> Prepared:
    """Tokenizer and packed tokens, from `cache` as far as it holds this run's. Raises InvalidJob.

    It returns when the first steps can be taken; the other tokens are made beside them.

    Args:
        makes: make them; of a gang rank 0 does.
        peers: its other ranks.
        confirm: raises where this process may no longer write there.
        room: is told the bytes of the tokens that are there, and about how many are missing; raises where the disk has no
            room for them.
    """
    length = spec.data.sequence_length
    wanted = tokens_for(spec.steps, spec.batch.sequences, length)
    key = _key(spec, corpus, saved_tokenizer, wanted)
    cached = _read_cache(cache, key)
    from_cache = cached is not None
    if cached is None and not makes:
        raise InvalidJob(
            "spec.engine.data",
            f"this rank finds other data than rank 0, which has prepared its own in {cache}",
            "give all pods the same claims",
        )
    order = document_order(corpus.train, spec.seed)
    if cached is None:
        tokenizer = (
            _make_tokenizer(spec, order) if saved_tokenizer is None else load_tokenizer(saved_tokenizer)
        )
        cached = tokenizer, _begin_cache(cache, key, tokenizer)
    tokenizer, facts = cached
    bad = replace(facts.bad)
    source: Source
    if makes:
        end = end_of_text_id(tokenizer, saved_tokenizer)
        room(facts.tokens * TOKEN_BYTES, _missing_bytes(order, tokenizer, wanted, facts))
        parts = pack(order, encoder(tokenizer), end, wanted, length, bad.add, facts.place)
        source = maker = Maker(cache, facts, bad, parts, confirm)
        _wait_for_first(maker, min(wanted, window_sequences(length, spec.batch.sequences) * length), progress)
        source = maker if peers is None else Announced(cache, maker, peers)
    else:
        assert peers is not None
        source = Followed(peers)
    rows = Rows(cache / TOKENS, source, length)
    try:
        packed = Packed.growing(rows, length, spec.seed, spec.batch.sequences)
    except InvalidJob:
        source.close()
        raise
    return Prepared(tokenizer, tokenizer_hash(tokenizer), packed, from_cache, bad, rows, source)


def _missing_bytes(order: Sequence[Document], tokenizer: Any, wanted: int, facts: Facts) -> int:
    """About the bytes that the tokens will need beside those that are there."""
    if facts.over:
        return 0
    return max(0, min(wanted, expected_tokens(order, encoder(tokenizer))) - facts.tokens) * TOKEN_BYTES


def _wait_for_first(maker: Maker, tokens: int, progress: Callable[[float], None]) -> None:
    """Raises what `progress` raises, and what has kept them from being made."""
    try:
        maker.until(tokens, lambda there: progress(there / tokens))
    except BaseException:
        maker.close()
        raise
    progress(1.0)


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
        saved += named_end(saved_tokenizer)
    parts = [5, corpus.digest, spec.tokenizer.vocab_size, saved, spec.seed, wanted]
    if corpus.has_rows:
        data = spec.data
        template = ChatTemplate(saved_tokenizer, data.chat_template).digest
        parts += [data.sequence_length, data.skips_bad_rows, dataclasses.astuple(data.fields), template]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _read_cache(cache: Path, key: str) -> tuple[Any, Facts] | None:
    """None for an incomplete cache: a power failure may leave any of the files empty or truncated."""
    try:
        facts = read_facts(cache)
        if facts.key != key or facts.tokenizer_crc32 != _file_crc(cache / TOKENIZER):
            return None
        return load_tokenizer(cache), facts
    except (OSError, ValueError, EOFError, InvalidJob):
        return None


def _file_crc(path: Path) -> int:
    return zlib.crc32(path.read_bytes())


def _begin_cache(cache: Path, key: str, tokenizer: Any) -> Facts:
    """One that has the tokenizer and no tokens yet."""
    temporary = cache.with_name(f".tmp-{cache.name}-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    tokenizer.save(str(temporary / TOKENIZER))
    (temporary / TOKENS).touch()
    facts = Facts(key, _file_crc(temporary / TOKENIZER))
    facts.write(temporary)
    shutil.rmtree(cache, ignore_errors=True)
    temporary.rename(cache)
    return facts
