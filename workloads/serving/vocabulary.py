"""The bytes behind each token id, as the tokenizer's own decoder makes them.

Two kinds of tokenizer have tokens that are parts of characters: byte-level ones (GPT-2's alphabet, in
which each byte is one printable character) and those that fall back to single bytes (`<0x0A>`). Tokens
of any other decoder are whole text, and their bytes are that text's.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache

from tokenizers import Tokenizer

_SINGLE_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _alphabet() -> dict[str, int]:
    """GPT-2's character → byte: visible Latin-1 stands for itself, the others for 256 and up, in order."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(visible)]
    return {chr(b): b for b in visible} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF = _alphabet()
_CHARACTER_OF = {byte: character for character, byte in _BYTE_OF.items()}


class Vocabulary:
    """Looks up the bytes of tokens; remembers what it has looked up."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        decoders = _decoder_kinds(tokenizer)
        self.byte_level = bool(decoders) and set(decoders) <= {"ByteLevel", "Fuse"}
        """Text is the tokens' bytes joined, read as UTF-8."""
        self._falls_back = "ByteFallback" in decoders
        self._known: dict[int, bytes] = {}
        self._single: dict[int, int | None] = {}

    def bytes_of(self, token: int) -> bytes:
        """The bytes that this token adds to a text; none for an id without a token."""
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._find(token)
        return found

    def single_byte(self, token: int) -> int | None:
        """The byte that a fallback token (`<0x0A>`) stands for; None for any other token."""
        if token not in self._single:
            name = self.tokenizer.id_to_token(token) if self._falls_back else None
            match = _SINGLE_BYTE.fullmatch(name) if name is not None else None
            self._single[token] = int(match[1], 16) if match else None
        return self._single[token]

    def spelling(self, text: str) -> str:
        """A text in the characters of which the names of tokens are made."""
        if self.byte_level:
            return "".join(_CHARACTER_OF[byte] for byte in text.encode())
        return text.replace(" ", "\u2581")

    def _find(self, token: int) -> bytes:
        name = self.tokenizer.id_to_token(token)
        if name is None:
            return b""
        if self.byte_level:
            if all(c in _BYTE_OF for c in name):
                return bytes(_BYTE_OF[c] for c in name)
            return str(name).encode()  # an added token that is written plainly
        byte = self.single_byte(token)
        if byte is not None:
            return bytes((byte,))
        # Behind itself rather than alone: decoders treat the beginning of a text differently.
        once: str = self.tokenizer.decode([token], skip_special_tokens=False)
        twice: str = self.tokenizer.decode([token, token], skip_special_tokens=False)
        return twice[len(once) :].encode()


@lru_cache(maxsize=2)
def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    """The same one for the same tokenizer."""
    return Vocabulary(tokenizer)


def _decoder_kinds(tokenizer: Tokenizer) -> list[str]:
    """The types of the tokenizer's decoders, in order."""
    if tokenizer.decoder is None:
        return []
    state = json.loads(tokenizer.decoder.__getstate__())
    return [part["type"] for part in state.get("decoders", [state])]
