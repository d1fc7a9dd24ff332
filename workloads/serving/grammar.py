"""Answers that follow a grammar: a JSON schema, a regular expression, a list of choices, a Lark grammar.

`llguidance` does the work: a lexer of regular-expression derivatives under an Earley parser, which computes before
each token the bit mask of the tokens that may come. Nothing is compiled ahead of the states that an answer reaches,
and each step of the parser, the compiler and the lexer has a limit, and so has an answer's processor time; where one is
hit, only that request ends, with an error. It is an optional package (`pip install 'busbar[grammar]'`), imported when the model is loaded; without it a
request with a grammar is a 400.

`Grammars` compiles, in threads of its own, and remembers. A `Grammar` is what was compiled; it has no state that
changes. A `Guide` is one answer's place in it. Its place follows from the tokens so far, so an answer that was
preempted, or goes on at another replica, follows the same grammar.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from busbar.workloads.serving.errors import BadRequest, Overloaded
from busbar.workloads.serving.openai_format import JSON_OPTIONS, GrammarKind, GrammarSpec
from busbar.workloads.serving.schema import check_schema
from busbar.workloads.serving.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

COMPILE_S = 2.0
COMPILERS = 2
"""Threads; a grammar that takes long holds up one of them."""
MAX_WAITING = 32
"""Grammars that may wait for a thread."""
REMEMBERED = 128
MAX_CHARACTERS = 200_000
"""Of a grammar, as it is compiled; a regular expression of this length takes half a second."""
MAX_LEXER_STATES = 50_000
"""Of one answer; a state takes one or two kB."""
MAX_ITEMS = 5_000
"""Rules that may be open at one place; an object takes four for each property that it may leave out."""
TRIAL_STEPS = 4
"""Tokens by which a new grammar is tried out: an object with too many properties shows itself behind its brace."""
LONGEST_REASON = 240
BURST_S = 0.25
"""Processor time that an answer may spend on its grammar at once, because all answers of a step wait for it."""
TOKEN_S = 0.01
"""And for each of its tokens. Usual grammars take well under 1 ms; only very ambiguous ones come near."""
INSTALL = (
    "this engine serves no grammars, because its optional package is missing: pip install 'busbar[grammar]'"
)


class GrammarTooComplex(Exception):
    """A limit was hit while an answer followed its grammar."""


@dataclass(frozen=True)
class Allowed:
    """The tokens that may come next."""

    bits: torch.Tensor
    """uint8: token t is bit t % 8 of byte t // 8."""
    count: int

    def tokens(self) -> list[int]:
        width = 8 * len(self.bits)
        found: list[int] = (
            (self.bits[:, None] >> torch.arange(8, dtype=torch.uint8) & 1)
            .view(width)
            .nonzero()[:, 0]
            .tolist()
        )
        return found

    def any_but(self, barred: Collection[int]) -> bool:
        """Whether there is a token outside of `barred`."""
        if self.count > len(barred):
            return True
        return self.count > sum(1 for token in barred if int(self.bits[token >> 3]) >> (token & 7) & 1)


class Guide:
    """One answer's place in its grammar."""

    def __init__(
        self, matcher: LLMatcher, mask_bytes: int, clock: Callable[[], float] = time.thread_time
    ) -> None:
        """`clock`: the thread's processor time, in seconds."""
        self._matcher = matcher
        self._mask_bytes = mask_bytes
        self._clock = clock
        self._left_s = BURST_S

    @property
    def over(self) -> bool:
        """Whether nothing may follow."""
        return self._matcher.is_stopped()

    def take(self, tokens: Sequence[int]) -> bool:
        """Goes on behind `tokens`; False where they do not follow the grammar."""
        began = self._clock()
        follows = self._matcher.consume_tokens(list(tokens))
        self._left_s = min(BURST_S, self._left_s + TOKEN_S * len(tokens) - (self._clock() - began))
        return follows

    def allowed(self) -> Allowed:
        """Raises GrammarTooComplex."""
        if self._left_s < 0:
            raise GrammarTooComplex(f"it takes more than {TOKEN_S * 1e3:g} ms for each token")
        began = self._clock()
        bits = torch.empty(self._mask_bytes, dtype=torch.uint8)
        self._matcher.unsafe_compute_mask_ptr(bits.data_ptr(), self._mask_bytes)
        self._left_s -= self._clock() - began
        if self._matcher.is_error():
            raise GrammarTooComplex(_reason(self._matcher.get_error()))
        return Allowed(bits, int.from_bytes(bits.numpy().tobytes(), "little").bit_count())


@dataclass(frozen=True, eq=False)
class Grammar:
    """A compiled grammar."""

    matcher: LLMatcher
    """At the beginning; copied for each answer."""
    mask_bytes: int

    def start(self) -> Guide:
        return Guide(self.matcher.deep_copy(), self.mask_bytes)


class Grammars:
    """Compiles the grammars of one model; the latest ones are remembered."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        width: int,
        eos: frozenset[int],
        special: frozenset[int],
        compile_s: float = COMPILE_S,
    ) -> None:
        """`width`: logits of a row. `special`: tokens that are never text."""
        self._vocabulary = vocabulary
        self._width = width
        self._eos = sorted(eos)
        self._special = special | eos
        self._compile_s = compile_s
        self._pool = ThreadPoolExecutor(COMPILERS, thread_name_prefix="grammar")
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._known: OrderedDict[tuple[GrammarKind, str], Grammar] = OrderedDict()
        self._waiting = 0

    def prepare(self) -> None:
        """Reads the vocabulary before there are streams: for 128,000 tokens it stops all threads for about a second.

        Without the package it does nothing.
        """
        if self._eos:
            with contextlib.suppress(ImportError):
                self._read_vocabulary()

    async def get(self, spec: GrammarSpec) -> Grammar:
        """The compiled grammar. Raises BadRequest for one that is wrong, too large or takes too long, or where the
        package is missing, and Overloaded while too many others are being compiled."""
        found = self._remembered(spec)
        if found is not None:
            return found
        if self._waiting >= MAX_WAITING:
            raise Overloaded("too many grammars are being compiled; try again shortly")
        if not self._eos:
            raise BadRequest(
                f"{spec.param}: this model has no end token, so no grammar ends", param=spec.param
            )
        if len(spec.text) > MAX_CHARACTERS:
            raise BadRequest(
                f"{spec.param} has {len(spec.text)} characters; at most {MAX_CHARACTERS} are served",
                param=spec.param,
            )
        try:
            if self._tokenizer is None:  # reading the vocabulary is not the grammar's fault
                await asyncio.wrap_future(self._pool.submit(self._read_vocabulary))
        except ImportError as error:
            raise BadRequest(f"{spec.param}: {INSTALL}", param=spec.param) from error
        self._waiting += 1
        future = self._pool.submit(self.compile, spec)
        try:
            async with asyncio.timeout(self._compile_s):
                return await asyncio.wrap_future(future)
        except TimeoutError as error:
            if future.cancelled():
                raise Overloaded(
                    "other grammars take all the time for compiling; try again shortly"
                ) from error
            raise BadRequest(
                f"{spec.param} took longer than {self._compile_s:g} s to compile; simplify it",
                param=spec.param,
            ) from error
        finally:
            self._waiting -= 1

    def compile(self, spec: GrammarSpec) -> Grammar:
        """As `get`, in the calling thread and without the limit of time."""
        found = self._remembered(spec)
        if found is None:
            found = Grammar(self._compile(spec), -(-self._width // 32) * 4)
            with self._lock:
                self._known[spec.kind, spec.text] = found
                while len(self._known) > REMEMBERED:
                    self._known.popitem(last=False)
        return found

    # -- inside -------------------------------------------------------------------------------

    def _remembered(self, spec: GrammarSpec) -> Grammar | None:
        with self._lock:
            found = self._known.get((spec.kind, spec.text))
            if found is not None:
                self._known.move_to_end((spec.kind, spec.text))
            return found

    def _compile(self, spec: GrammarSpec) -> LLMatcher:
        tokenizer = self._read_vocabulary()
        from llguidance import LLMatcher

        try:
            text = _SOURCES[spec.kind](spec)
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"{spec.param} is wrong: {_reason(str(error))}", param=spec.param) from error
        matcher = LLMatcher(tokenizer, text, log_level=0, limits=_limits())
        problem = matcher.get_error() or self._try_out(Guide(matcher.deep_copy(), -(-self._width // 32) * 4))
        if problem:
            raise BadRequest(f"{spec.param} cannot be served: {_reason(problem)}", param=spec.param)
        return matcher

    def _try_out(self, guide: Guide) -> str:
        """What is wrong with a grammar that compiles, as far as its first tokens show; empty where nothing is."""
        try:
            for step in range(TRIAL_STEPS):
                allowed = guide.allowed()
                tokens = [token for token in allowed.tokens() if token not in self._eos]
                if guide.over or not tokens:
                    return "" if step else "it allows no text"
                texts = (t for t in tokens if self._vocabulary.bytes_of(t).strip())  # space leads nowhere
                guide.take([next(texts, tokens[0])])
        except GrammarTooComplex as error:
            return str(error)
        return ""

    def _read_vocabulary(self) -> LLTokenizer:
        """The tokens in the form that the package wants, made once."""
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = _tokenizer(self._vocabulary, self._width, tuple(self._eos), self._special)
            return self._tokenizer


class _Tokens:
    """The interface that the package reads."""

    bos_token_id = None

    def __init__(
        self, vocabulary: Vocabulary, width: int, eos: tuple[int, ...], special: frozenset[int]
    ) -> None:
        self._tokenizer = vocabulary.tokenizer
        self.eos_token_id = eos[0]
        self.tokens = [vocabulary.bytes_of(token) for token in range(width)]
        self.special_token_ids = sorted(special)

    def __call__(self, text: str | bytes) -> list[int]:
        plain = text.decode(errors="replace") if isinstance(text, bytes) else text
        ids: list[int] = self._tokenizer.encode(plain, add_special_tokens=False).ids
        return ids


@lru_cache(maxsize=2)
def _tokenizer(
    vocabulary: Vocabulary, width: int, eos: tuple[int, ...], special: frozenset[int]
) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    tokens = _Tokens(vocabulary, width, eos, special)
    return LLTokenizer(TokenizerWrapper(tokens), n_vocab=width, eos_token=list(eos))


def _json_source(spec: GrammarSpec) -> str:
    from llguidance import LLMatcher

    schema = json.loads(spec.text)
    check_schema(schema, spec.param)
    if isinstance(schema, bool):
        if not schema:
            raise ValueError("false allows no value")
        schema = {}
    return LLMatcher.grammar_from_json_schema(
        json.dumps(schema, ensure_ascii=False),
        overrides=JSON_OPTIONS,
    )


def _regex_source(spec: GrammarSpec) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_regex(spec.text)


def _lark_source(spec: GrammarSpec) -> str:
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return LLMatcher.grammar_from_lark(any_to_lark(spec.text))
    except Exception as error:  # the converter raises bare Exception
        raise ValueError(str(error)) from error


_SOURCES: dict[GrammarKind, Callable[[GrammarSpec], str]] = {
    GrammarKind.JSON_SCHEMA: _json_source,
    GrammarKind.REGEX: _regex_source,
    GrammarKind.LARK: _lark_source,
}


def _limits() -> LLParserLimits:
    from llguidance import LLParserLimits

    return LLParserLimits(max_items_in_row=MAX_ITEMS, max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)


_SAID = (
    (
        re.compile(r"oneOf constraints are not supported.*"),
        "nothing enforces that only one case of a oneOf fits, where several may; write anyOf, or give each case a property with "
        "a const of its own",
    ),
    (re.compile(r"Unimplemented keys: \[(.*?)\]"), r"nothing enforces the keywords \1; leave them out"),
)
"""Messages of the package that name its own options and not what to do."""


def _reason(text: str) -> str:
    """The package's message as one line, cut to a size that an answer may have."""
    line = " ".join(text.split()) or "unknown error"
    for pattern, said in _SAID:
        line = pattern.sub(said, line)
    return line if len(line) <= LONGEST_REASON else f"{line[:LONGEST_REASON]}…"
