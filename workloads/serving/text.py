"""Tokens to text, a piece at a time, never half a character and never past a stop string.

`Detokenizer` shows only what can no longer change: what may be the first bytes of a character is held
back. `StopMatcher` then holds back any tail that could be the beginning of a stop string. Joined, the
pieces equal the tokenizer's decoding of all tokens, cut before the first stop string. (One exception: a
byte-fallback decoder declares a whole run of byte tokens invalid when one is; bytes that are out stay out.)
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer

from busbar.workloads.serving.errors import ModelCorrupt, ModelFileMissing
from busbar.workloads.serving.vocabulary import Vocabulary

UNFINISHED = "\ufffd"
LONGEST_WAIT = 32
"""Tokens whose text may be held back as unfinished; no character has so many parts."""


def load_tokenizer(folder: Path) -> Tokenizer:
    """The fast tokenizer of a model folder, without its training-time truncation and padding. A file that this process, or one
    that it was forked from, has read and that is still the same is not read again."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelFileMissing(
            f"{path} is missing: the engine needs a fast tokenizer (transformers' "
            "`tokenizer.save_pretrained` writes tokenizer.json)"
        )
    state = path.stat()
    return _read_tokenizer(path, (state.st_ino, state.st_size, state.st_mtime_ns))


@lru_cache(maxsize=2)
def _read_tokenizer(path: Path, state: tuple[int, ...]) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ModelCorrupt(f"{path} is not a tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def special_tokens(tokenizer: Tokenizer) -> frozenset[int]:
    """Ids that `skip_special_tokens` leaves out."""
    return frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)


class Detokenizer:
    """Text of a growing list of tokens; `hidden` ones (special tokens, usually) show nothing.

    The cost of a token does not depend on how many came before it.
    """

    def __init__(self, vocabulary: Vocabulary, hidden: frozenset[int] = frozenset()) -> None:
        self._hidden = hidden
        self._text: _Bytes | _Window = _Bytes(vocabulary) if vocabulary.byte_level else _Window(vocabulary)

    def add(self, token: int) -> str:
        """The text that `token` makes certain."""
        return "" if token in self._hidden else self._text.add(token)

    def flush(self) -> str:
        """Whatever was held back; nothing follows."""
        return self._text.flush()


class _Bytes:
    """Byte-level tokenizers: a running UTF-8 decoder, which holds back an unfinished character."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        return self._decoder.decode(self._vocabulary.bytes_of(token))

    def flush(self) -> str:
        return self._decoder.decode(b"", True)


class _Window:
    """Any other tokenizer: decodes the last few tokens again and shows what can no longer change.

    Text that ends in U+FFFD waits, for it may be the first bytes of a character. A run of fallback bytes
    that can no longer become valid is shown at once, one U+FFFD a byte, as the whole would be.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._tokens: list[int] = []
        self._read = 0  # text of the tokens before this one is out already
        self._shown = 0  # characters beyond those that are out
        self._run = codecs.getincrementaldecoder("utf-8")("strict")
        self._invalid = False  # in a run of bytes that is no UTF-8

    def add(self, token: int) -> str:
        byte = self._vocabulary.single_byte(token)
        self._note(byte)
        self._tokens.append(token)
        if self._invalid and self._read == len(self._tokens) - 1:
            self._settle()
            return UNFINISHED
        text = self._fresh()
        certain = text.rstrip(UNFINISHED)
        waiting = len(self._tokens) - self._read
        if (len(certain) == len(text) and text) or self._invalid or waiting > LONGEST_WAIT:
            piece = text[self._shown :]
            self._settle()
            return piece
        piece = certain[self._shown :]
        self._shown = max(self._shown, len(certain))
        return piece

    def flush(self) -> str:
        piece = self._fresh()[self._shown :]
        self._settle()
        return piece

    def _note(self, byte: int | None) -> None:
        """Follows runs of fallback bytes: is this one still the beginning of valid UTF-8?"""
        if byte is None:
            self._run.reset()
            self._invalid = False
        elif not self._invalid:
            try:
                self._run.decode(bytes((byte,)))
            except UnicodeDecodeError:
                self._invalid = True

    def _settle(self) -> None:
        """All is out; the last tokens stay as the context of the next."""
        self._tokens = self._tokens[self._read :] if not self._invalid else self._tokens[-1:]
        self._read, self._shown = len(self._tokens), 0

    def _fresh(self) -> str:
        """Text of the tokens after _read, decoded in the context of those before it."""
        before = self._decode(self._tokens[: self._read])
        return self._decode(self._tokens)[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        tokenizer = self._vocabulary.tokenizer
        text: str = tokenizer.decode(tokens, skip_special_tokens=False) if tokens else ""
        return text


class StopMatcher:
    """Finds the first stop string in a stream of text pieces."""

    def __init__(self, stops: Iterable[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def add(self, piece: str) -> str:
        """Text that may be shown now. After a match, `matched` is set and nothing more comes."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return piece
        text = self._held + piece
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:  # the one that is complete first: the same however the text was cut into pieces
            _, at, self.matched = min(found)
            self._held = ""
            return text[: at + len(self.matched)] if self._include else text[:at]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The held tail, when the stream ends for another reason."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` (and is shorter than it)."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
