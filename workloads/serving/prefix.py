"""Names for what a KV block holds, so that a prompt that begins alike finds its blocks. Pure Python.

A full block is named by a 128-bit hash over its own tokens and the name of the block before it, the first one
by a salt: equal names mean equal tokens from the start on, within the same salt. The salt holds the tenant, so
that nobody learns from the time of an answer what another tenant has asked.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b


def salt_of(*parts: str) -> bytes:
    """The name before a sequence's first block; parts are kept apart whatever they hold."""
    whole = blake2b(digest_size=16)
    for part in parts:
        data = part.encode(errors="surrogatepass")
        whole.update(len(data).to_bytes(8, "little") + data)
    return whole.digest()


def extend_names(names: list[bytes], tokens: list[int], block_tokens: int, salt: bytes) -> None:
    """Appends the names of the full blocks of `tokens` that `names` lacks."""
    for index in range(len(names), len(tokens) // block_tokens):
        before = names[-1] if names else salt
        part = array("q", tokens[index * block_tokens : (index + 1) * block_tokens])
        names.append(blake2b(before + part.tobytes(), digest_size=16).digest())


def name_of_part(names: list[bytes], tokens: list[int], salt: bytes) -> bytes:
    """The name of a block that holds the last `tokens` of a sequence and is not full, behind the full blocks `names`."""
    before = names[-1] if names else salt
    return blake2b(before + array("q", tokens).tobytes(), digest_size=16, person=b"part").digest()
