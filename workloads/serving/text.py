"""Tokens to text, a piece at a time, never half a character and never past a stop string.

`Detokenizer` decodes a small window again at each token and shows only what can no longer change: a
trailing run of U+FFFD may be the first bytes of a character, so it is held back. `StopMatcher` then
holds back any tail that could be the beginning of a stop string. Joined, the pieces equal the
tokenizer's decoding of all tokens, cut before the first stop string. (One exception: a byte-fallback
decoder declares a whole run of byte tokens invalid when one is; bytes that are out stay out.)
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer

from busbar.workloads.serving.errors import ModelCorrupt, ModelFileMissing

UNFINISHED = "\ufffd"


def load_tokenizer(folder: Path) -> Tokenizer:
    """The fast tokenizer of a model folder, without its training-time truncation and padding."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelFileMissing(
            f"{path} is missing: the engine needs a fast tokenizer (transformers' "
            "`tokenizer.save_pretrained` writes tokenizer.json)"
        )
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
    """Text of a growing list of tokens; `hidden` ones (special tokens, usually) show nothing."""

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._tokens: list[int] = []
        self._start = 0  # the window begins here; its text up to _read is out already
        self._read = 0
        self._shown = 0  # characters of the window beyond the _read part that are out

    def add(self, token: int) -> str:
        """The text that `token` makes certain."""
        if token in self._hidden:
            return ""
        self._tokens.append(token)
        text = self._fresh()
        certain = text.rstrip(UNFINISHED)
        piece = certain[self._shown :]
        if len(certain) == len(text) and text:
            self._start, self._read, self._shown = self._read, len(self._tokens), 0
        else:
            self._shown = max(self._shown, len(certain))
        return piece

    def flush(self) -> str:
        """Whatever was held back; nothing follows."""
        piece = self._fresh()[self._shown :]
        self._start, self._read, self._shown = self._read, len(self._tokens), 0
        return piece

    def _fresh(self) -> str:
        """Text of the tokens after _read, decoded in the context of those before it."""
        before = self._decode(self._tokens[self._start : self._read])
        return self._decode(self._tokens[self._start :])[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False) if tokens else ""
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
