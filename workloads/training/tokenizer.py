"""A byte-level BPE trained on the corpus, or a saved one; and the tables that turn tokens back into bytes."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from busbar.workloads.training.errors import InvalidJob

END_OF_TEXT = "<|endoftext|>"
TRAIN_BYTES = 6 * 2**20  # enough text for a few thousand merges; more only costs time
_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
_LONG_WORD = re.compile(r"\S{256}")


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Any:
    """A `tokenizers.Tokenizer` with `vocab_size` entries; the same texts give the same tokenizer."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_up_to(texts, TRAIN_BYTES), trainer)
    return tokenizer


def load_tokenizer(folder: Path) -> Any:
    """The saved tokenizer of `folder`. Raises InvalidJob."""
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.no_truncation()  # settings of whoever saved it, which would lose text here
        tokenizer.no_padding()
        return tokenizer
    except Exception as problem:  # the library raises no narrower type
        raise InvalidJob(
            "spec.engine.tokenizer.uri",
            f"{path} is not a tokenizer: {problem}",
            "save it again with save_pretrained",
        ) from problem


def table_size(tokenizer: Any) -> int:
    """Rows that an embedding table needs: the largest token id and one; ids may have gaps."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def end_of_text_id(tokenizer: Any, folder: Path | None = None) -> int:
    """Id of the separator between documents: ours, or the usual names of others, or what its folder says ends a text."""
    for name in (END_OF_TEXT, "</s>", "<|end_of_text|>", "<|eot_id|>", "<eos>", "[SEP]", named_end(folder)):
        found = tokenizer.token_to_id(name)
        if found is not None:
            return int(found)
    return 0


def named_end(folder: Path | None) -> str:
    """The `eos_token` of a saved tokenizer's settings; empty: they name none."""
    try:
        found = json.loads((folder / "tokenizer_config.json").read_text())["eos_token"] if folder else ""
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    found = found.get("content") if isinstance(found, dict) else found
    return found if isinstance(found, str) else ""


def tokenizer_hash(tokenizer: Any) -> str:
    return hashlib.sha256(tokenizer.to_str().encode()).hexdigest()


def token_bytes(tokenizer: Any) -> list[bytes]:
    """The bytes that each token of a byte-level vocabulary stands for; special tokens stand for none."""
    unicode_to_byte = {symbol: byte for byte, symbol in _byte_alphabet().items()}
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    table = []
    for index in range(table_size(tokenizer)):
        token = tokenizer.id_to_token(index) or ""
        known = token not in special and all(symbol in unicode_to_byte for symbol in token)
        table.append(bytes(unicode_to_byte[symbol] for symbol in token) if known else b"")
    return table


def decode_bytes(table: Sequence[bytes], ids: Iterable[int]) -> bytes:
    return b"".join(table[index] for index in ids)


def bytes_decoder(tokenizer: Any) -> Callable[[Sequence[int]], bytes]:
    """Tokens to the text's bytes: exact for a byte-level vocabulary, the tokenizer's own decoding for others."""
    decoder = json.loads(tokenizer.to_str()).get("decoder") or {}
    kinds = {decoder.get("type"), *(part.get("type") for part in decoder.get("decoders") or ())}
    if "ByteLevel" in kinds:
        table = token_bytes(tokenizer)
        return lambda ids: decode_bytes(table, ids)

    def decode(ids: Sequence[int]) -> bytes:
        text: str = tokenizer.decode(list(ids), skip_special_tokens=True)
        return text.encode()

    return decode


def save_tokenizer(tokenizer: Any, folder: Path, context: int, saved: Path | None) -> None:
    """Write the files that `AutoTokenizer` reads; those of the folder `saved` as they are, if it has all of them."""
    if saved is not None and (saved / "tokenizer_config.json").is_file():
        for name in _FILES:
            if (saved / name).is_file():
                shutil.copyfile(saved / name, folder / name)
        return
    from transformers import PreTrainedTokenizerFast

    end = tokenizer.id_to_token(end_of_text_id(tokenizer, saved))
    PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, bos_token=end, eos_token=end, model_max_length=context
    ).save_pretrained(folder)


def _byte_alphabet() -> dict[int, str]:
    """GPT-2's printable stand-ins: printable Latin-1 for itself, the other bytes from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(0x100 + index) for index, byte in enumerate(others)
    }


def _up_to(texts: Iterable[str], limit: int) -> Iterable[str]:
    """Text to learn from; a run of characters without a space is cut, or it would count as one word."""
    seen = 0
    for text in texts:
        if seen >= limit:
            return
        seen += len(text)
        start = 0
        for word in _LONG_WORD.finditer(text):
            yield text[start : word.end()]
            start = word.end()
        yield text[start:]
