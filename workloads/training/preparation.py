"""Tokenizer and token stream of a run: made once, kept beside its checkpoints, checked when read again.

A resumed run must read the very tokens that its first attempt read. Both are functions of the corpus, the
vocabulary and the seed, so the cache is only a saving of time; its key and checksum decide whether it counts.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from busbar.workloads.training.corpus import Corpus
from busbar.workloads.training.packing import Packed, Tokens, document_order, pack
from busbar.workloads.training.settings import EngineSpec
from busbar.workloads.training.tokenizer import (
    end_of_text_id,
    load_tokenizer,
    tokenizer_hash,
    train_tokenizer,
)


@dataclass(frozen=True)
class Prepared:
    tokenizer: Any
    tokenizer_hash: str
    packed: Packed
    from_cache: bool


def prepare(
    spec: EngineSpec,
    corpus: Corpus,
    saved_tokenizer: Path | None,
    cache: Path,
    progress: Callable[[float], None] = lambda share: None,
) -> Prepared:
    """Tokenizer and packed tokens, from `cache` when it holds this run's. Raises InvalidJob."""
    wanted = spec.steps * spec.batch.sequences * spec.data.sequence_length
    key = _key(spec, corpus, saved_tokenizer, wanted)
    cached = _read_cache(cache, key)
    if cached is not None:
        tokenizer, stream = cached
    else:
        order = document_order(corpus.train, spec.seed)
        if saved_tokenizer is None:
            assert spec.tokenizer.vocab_size is not None
            tokenizer = train_tokenizer((doc.text() for doc in order), spec.tokenizer.vocab_size)
        else:
            tokenizer = load_tokenizer(saved_tokenizer)
        stream = pack(
            order,
            lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
            end_of_text_id(tokenizer),
            wanted,
            lambda done: progress(done / wanted),
        )
        _write_cache(cache, key, tokenizer, stream)
    packed = Packed.cut(stream, spec.data.sequence_length, spec.seed, spec.batch.sequences)
    return Prepared(tokenizer, tokenizer_hash(tokenizer), packed, cached is not None)


def _key(spec: EngineSpec, corpus: Corpus, saved_tokenizer: Path | None, wanted: int) -> str:
    saved = None
    if saved_tokenizer is not None:
        saved = hashlib.sha256((saved_tokenizer / "tokenizer.json").read_bytes()).hexdigest()
    parts = [1, corpus.digest, spec.tokenizer.vocab_size, saved, spec.seed, wanted]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _read_cache(cache: Path, key: str) -> tuple[Any, Tokens] | None:
    """None for whatever is not whole: a power cut may leave any of the files empty or torn."""
    try:
        facts = json.loads((cache / "facts.json").read_text())
        stream = np.load(cache / "tokens.npy", allow_pickle=False)
        if facts != _facts(cache, key, stream):
            return None
        return load_tokenizer(cache), stream
    except (OSError, ValueError, EOFError):
        return None


def _facts(folder: Path, key: str, stream: Tokens) -> dict[str, Any]:
    return {
        "key": key,
        "crc32": zlib.crc32(stream.tobytes()),
        "tokenizerCrc32": zlib.crc32((folder / "tokenizer.json").read_bytes()),
    }


def _write_cache(cache: Path, key: str, tokenizer: Any, stream: Tokens) -> None:
    temporary = cache.with_name(f".tmp-{cache.name}-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    tokenizer.save(str(temporary / "tokenizer.json"))
    np.save(temporary / "tokens.npy", stream)
    (temporary / "facts.json").write_text(json.dumps(_facts(temporary, key, stream)))
    shutil.rmtree(cache, ignore_errors=True)
    temporary.rename(cache)
