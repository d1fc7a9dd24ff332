"""Which tokens a request may generate: `allowed_token_ids` and `bad_words`.

A bad word is a set of token sequences, one for each way in which the tokenizer writes it. The last token of a
sequence may not follow the others; a sequence of one token never comes. The same text in other tokens is not
recognised, and a word that begins in the prompt is not either: only generated tokens count, as in vLLM.

A constraint has no state: what may come next follows from the tokens so far. So a request that was preempted, or
that goes on at another replica, generates the same tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from busbar.workloads.serving.errors import BadRequest
from busbar.workloads.serving.vocabulary import Vocabulary

Ending = tuple[list[int], int]
"""(tokens, the token that may not follow them)."""


@dataclass(frozen=True, eq=False)
class Constraint:
    """What a request may generate of a vocabulary of `width` tokens."""

    width: int
    allowed: frozenset[int] | None
    """All others never come; None: no such list. Without the tokens of `banned`."""
    banned: frozenset[int] = frozenset()
    """They never come."""
    endings: Mapping[int, tuple[Ending, ...]] = field(default_factory=dict)
    """By the last of the tokens that they follow."""
    ids: torch.Tensor = field(init=False, repr=False)
    """[n] int64, ascending: `allowed` where there is such a list, else `banned`."""

    def __post_init__(self) -> None:
        ids = self.banned if self.allowed is None else self.allowed
        object.__setattr__(self, "ids", torch.tensor(sorted(ids), dtype=torch.int64))

    def banned_after(self, tokens: Sequence[int], first: int) -> frozenset[int]:
        """Tokens that would complete a bad word now; those from `first` on were generated."""
        count = len(tokens) - first
        if not self.endings or count < 1:
            return frozenset()
        return frozenset(
            last
            for prefix, last in self.endings.get(tokens[-1], ())
            if len(prefix) <= count and list(tokens[-len(prefix) :]) == prefix
        )

    def leaves_nothing(self, barred: Collection[int]) -> bool:
        """Whether no token may come where those of `barred` may not either."""
        if self.allowed is not None:
            return len(self.allowed) <= len(barred) and self.allowed.issubset(barred)
        return len(self.banned) + len(barred) >= self.width and len(self.banned.union(barred)) >= self.width


def make_constraint(
    vocabulary: Vocabulary, width: int, allowed: Collection[int] | None, bad_words: Sequence[str]
) -> Constraint:
    """Raises BadRequest for a token that the model does not have, or a word that has no tokens."""
    unknown = next((token for token in allowed or () if token >= width), None)
    if unknown is not None:
        raise BadRequest(
            f"allowed_token_ids has {unknown}; this model's token ids are 0 to {width - 1}",
            param="allowed_token_ids",
        )
    banned: set[int] = set()
    endings: dict[int, list[Ending]] = {}
    for number, word in enumerate(bad_words):
        found = token_sequences(vocabulary, word)
        if not found:
            raise BadRequest(
                f"bad_words[{number}] is {word!r}; a bad word must have a token in this model's vocabulary",
                param="bad_words",
            )
        for *prefix, last in found:
            if prefix:
                endings.setdefault(prefix[-1], []).append((prefix, last))
            else:
                banned.add(last)
    return Constraint(
        width,
        None if allowed is None else frozenset(allowed) - banned,
        frozenset(banned),
        {token: tuple(found) for token, found in endings.items()},
    )


def token_sequences(vocabulary: Vocabulary, word: str) -> set[tuple[int, ...]]:
    """The ways in which the tokenizer writes a word: at the beginning, behind a space, and inside of a text."""
    tokenizer = vocabulary.tokenizer
    bare = word.lstrip(" ") or word
    first = tuple(tokenizer.encode(bare, add_special_tokens=False).ids)
    found = {first, tuple(tokenizer.encode(f" {bare}", add_special_tokens=False).ids)}
    if not bare.startswith(" ") and _text(vocabulary, first).startswith(b" "):
        # This tokenizer puts a space before every text; only its model writes a word that follows no space.
        inside = tuple(piece.id for piece in tokenizer.model.tokenize(vocabulary.spelling(bare)))
        if _text(vocabulary, inside) == bare.encode():
            found.add(inside)
    found.discard(())
    return found


def _text(vocabulary: Vocabulary, tokens: Iterable[int]) -> bytes:
    return b"".join(vocabulary.bytes_of(token) for token in tokens)
