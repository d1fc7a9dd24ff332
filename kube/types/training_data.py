"""What the training engine trains on: the text, its form and its tokenizer."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from busbar.kube.types.meta import ClaimUri, SpecModel
from busbar.kube.types.rules import Rule, exactly_one_of

DataUri = Annotated[
    str,
    Field(
        pattern=r"^(builtin://[a-z0-9]([-a-z0-9]*[a-z0-9])?"
        r"|pvc://[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
        r"(/[A-Za-z0-9_][A-Za-z0-9._-]*)*/?)$",
        max_length=512,
    ),
]
FieldName = Annotated[str, Field(min_length=1, max_length=128)]


class DataFormat(StrEnum):
    TEXT = "text"
    JSONL = "jsonl"


class Packing(StrEnum):
    """What attention sees of a sequence that has several documents, or parts of them."""

    ACROSS_DOCUMENTS = "across-documents"
    WITHIN_DOCUMENTS = "within-documents"


class BadRow(StrEnum):
    """What a row gets that cannot be trained on: end the run, or leave the row out and count it."""

    FAIL = "fail"
    SKIP = "skip"


class TokenizerTraining(SpecModel):
    """A byte-level BPE tokenizer trained on the training data before the first step."""

    vocab_size: Annotated[int, Field(ge=257, le=1_048_576)] = Field(description="Entries of the vocabulary.")


class TokenizerSource(SpecModel):
    """The tokenizer: trained before the first step, or an existing one; exactly one."""

    rules = (exactly_one_of("train", "uri", message="tokenizer needs exactly one of train and uri"),)

    train: TokenizerTraining | None = Field(default=None, description="Train one on the training data.")
    uri: ClaimUri | None = Field(default=None, description="A folder with tokenizer files: pvc://claim/path.")


class DataFields(SpecModel):
    """Names of the fields of a row; only the kinds that are named here are read."""

    rules = (
        Rule(
            cel="has(self.text) || has(self.completion) || has(self.messages)",
            message="fields names at least one of text, completion and messages",
            holds=lambda fields: (
                fields.text is not None or fields.completion is not None or fields.messages is not None
            ),
        ),
        Rule(
            cel="has(self.prompt) == has(self.completion)",
            message="prompt and completion are named together",
            holds=lambda fields: (fields.prompt is None) == (fields.completion is None),
        ),
    )

    text: FieldName | None = Field(default=None, description="A document.")
    prompt: FieldName | None = Field(default=None, description="What is given; no loss.")
    completion: FieldName | None = Field(default=None, description="What the model learns to answer.")
    messages: FieldName | None = Field(
        default=None, description="A conversation: a list of objects with role and content."
    )


class DataSource(SpecModel):
    """The training text."""

    rules = (
        Rule(
            cel="!has(self.fields) || !has(self.format) || self.format != 'text'",
            message="data.fields are of rows, and plain text has none; remove it, or set format: jsonl",
            holds=lambda data: data.fields is None or data.format is not DataFormat.TEXT,
        ),
        Rule(
            cel="!has(self.chatTemplate) || !has(self.format) || self.format != 'text'",
            message="data.chatTemplate is set, and plain text has no conversations; remove it, or set format: jsonl",
            holds=lambda data: data.chat_template is None or data.format is not DataFormat.TEXT,
        ),
        Rule(
            cel="!has(self.chatTemplate) || !has(self.fields) || has(self.fields.messages)",
            message="data.chatTemplate is set, and data.fields does not name messages; name it, or remove the template",
            holds=lambda data: (
                data.chat_template is None or data.fields is None or data.fields.messages is not None
            ),
        ),
    )

    uri: DataUri = Field(
        description="builtin://python-stdlib, or a file or folder of text, JSONL or Parquet, or one that datasets saved: "
        "pvc://claim/path. Each line of a JSONL file, and each row of a table, has a text, a prompt and its completion, or "
        "the messages of a conversation."
    )
    format: DataFormat | None = Field(
        default=None,
        description="text or jsonl for every file, none of which is a table then; default by each file's ending (.jsonl, "
        ".ndjson, and .json with an object per line; .parquet and .pq).",
    )
    fields: DataFields | None = Field(
        default=None,
        description="Names of the fields of a row; default text, or prompt and completion, or messages.",
    )
    chat_template: Annotated[str, Field(min_length=1, max_length=32_768)] | None = Field(
        default=None,
        description="A Jinja template for conversations, as transformers has them, in the place of the tokenizer's own; it is "
        "written to the output. Default the tokenizer's.",
    )
    on_bad_row: BadRow = Field(
        default=BadRow.FAIL,
        description="fail ends the run at a row that is not JSON, or lacks its fields; skip leaves it out and counts it.",
    )
    packing: Packing = Field(
        default=Packing.ACROSS_DOCUMENTS,
        description="Documents are laid end to end and cut into sequences: across-documents lets a token see all before it in its "
        "sequence; within-documents lets it see its own document alone, and positions begin anew at each.",
    )
    holdout_fraction: Annotated[float, Field(ge=0, le=0.5)] = Field(
        default=0.05,
        description="Share of the files held out for evaluation; of a single file its end.",
    )
    sequence_length: Annotated[int, Field(ge=8, le=1_048_576)] = Field(
        default=256, description="Tokens in one training sequence."
    )
