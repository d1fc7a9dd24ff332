"""What turns text into a model's tokens and back, and checks requests: all that the front knows of the model."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from busbar.workloads.serving.answer_text import AnswerText
from busbar.workloads.serving.architecture import read_architecture
from busbar.workloads.serving.chat import ChatTemplate, load_chat_template
from busbar.workloads.serving.context_limits import ContextLimits
from busbar.workloads.serving.grammar import Grammars
from busbar.workloads.serving.openai_format import GrammarSpec
from busbar.workloads.serving.sampling import SamplingParams
from busbar.workloads.serving.text import load_tokenizer, special_tokens
from busbar.workloads.serving.token_rules import TokenRules
from busbar.workloads.serving.vocabulary import vocabulary_of


@dataclass(frozen=True)
class TextFiles:
    """What a model folder says of its text."""

    tokenizer: Tokenizer
    template: ChatTemplate
    width: int
    """Tokens of the model's vocabulary."""
    hidden: int
    """Numbers of a vector."""
    eos: frozenset[int]


def read_text_files(folder: Path) -> TextFiles:
    """Raises ModelError."""
    arch = read_architecture(folder)
    return TextFiles(
        load_tokenizer(folder), load_chat_template(folder), arch.vocab_size, arch.hidden, arch.eos
    )


def read_text(folder: Path) -> None:
    """All that is read of a model's text once, and remembered. Raises ModelError."""
    files = read_text_files(folder)
    vocabulary, special = vocabulary_of(files.tokenizer), special_tokens(files.tokenizer)
    Grammars(vocabulary, files.width, files.eos, special).prepare()


class TextModel:
    """A model as text: its tokenizer, its template and its limits."""

    def __init__(self, files: TextFiles, check_grammar: Callable[[GrammarSpec], Awaitable[None]]) -> None:
        """`check_grammar` raises BadRequest for a grammar that cannot be served."""
        self.tokenizer = files.tokenizer
        self.template = files.template
        self.width = files.width
        self.hidden = files.hidden
        self.vocabulary = vocabulary_of(files.tokenizer)
        self.special = special_tokens(files.tokenizer)
        """Tokens that are never part of a text."""
        self.rules = TokenRules(self.vocabulary, files.width, files.eos)
        self.check_grammar = check_grammar
        self.limits = ContextLimits(0)
        """As the engine has told them last."""
        self.identity = ""
        """Equal for two replicas of the same model folder."""

    def text_of(self, params: SamplingParams) -> AnswerText:
        """What makes text of the tokens of a request. Safe to call from any thread."""
        return AnswerText(self.vocabulary, self.special, self.rules.ends(params), params)
