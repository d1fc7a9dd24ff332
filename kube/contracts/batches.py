"""Files and batches: what gateways ask of the API, which keeps both.

A batch is a file of requests, one in a line. The API cuts it into lines and lends them to gateways, which run them as
batch work and report each line's answer; the first report of a line counts. A line whose gateway is gone is lent again.

    POST /internal/batches/{verb}        create · list · get · cancel · claim · settle
    POST /internal/files/{verb}          create · complete · list · get · delete
    PUT  /internal/files/{id}/parts/{n}  PART_BYTES of a file; the last part may have fewer
    POST /internal/files/content?after=N a piece of a file, and in NEXT_HEADER where the next one begins
"""

from typing import Annotated

from pydantic import Field

from busbar.kube.contracts.wire import WireModel

FILES, BATCHES = "/internal/files", "/internal/batches"
PART_BYTES = 512 * 1024
FILE_BYTES = 100 << 20
"""A file, at most."""
NEXT_HEADER = "x-busbar-next"
"""Absent behind the last piece."""
LINE_BYTES = 512 * 1024
"""One line of a batch, and its answer, at most."""
MOST_HELD = 256
"""Lines that one gateway runs at a time, at most."""
LEASE_S = 60.0
"""A gateway that asks for nothing for so long has lost its lines."""
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
_Text = Annotated[str, Field(max_length=253)]
Id = Annotated[str, Field(pattern=r"^(file-[0-9a-f]{32}|batch-[0-9a-f]{20})$")]
LINE_REQUEST = r"(batch-[0-9a-f]{20})-([0-9]{1,5})-[0-9a-f]{6}"
"""The request id of one run of a line: its batch, its number, and what makes runs differ. At most 40 characters."""


class Holder(WireModel):
    """Whose files and batches these are: a person's, in a tenant, whatever the key."""

    tenant: _Text
    subject: _Text


class NewFile(Holder):
    name: Annotated[str, Field(min_length=1, max_length=255)]


class FileRef(Holder):
    id: Id


class CompleteFile(FileRef):
    purpose: Annotated[str, Field(max_length=32)]


class ListWanted(Holder):
    after: Annotated[str, Field(max_length=64)] = ""
    """The id of the last one that is known."""
    limit: Annotated[int, Field(ge=1, le=100)] = 20


class FileInfo(WireModel):
    """A file, with the times in Unix seconds."""

    id: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str


class Files(WireModel):
    files: list[FileInfo]
    more: bool


class NewBatch(Holder):
    key_id: _Text
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """Of the key that its requests count for; it is looked up for each of them, so revoking it ends the batch."""
    endpoint: _Text
    input_file_id: _Text
    metadata: Annotated[dict[str, str], Field(max_length=16)] = Field(default_factory=dict)


class BatchInfo(WireModel):
    """A batch, with the times in Unix seconds."""

    id: str
    endpoint: str
    input_file_id: str
    status: str
    """validating, in_progress, cancelling, completed, cancelled, expired or failed."""
    created_at: int
    expires_at: int
    ended_at: int | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    problem: str | None = None
    """Why it failed as a whole."""
    metadata: dict[str, str] = Field(default_factory=dict)


class Batches(WireModel):
    batches: list[BatchInfo]
    more: bool


class LineRef(WireModel):
    batch: Id
    number: Annotated[int, Field(ge=0)]


class Claim(WireModel):
    """A gateway keeps what it holds, and asks for more."""

    gateway: _Text
    process: Annotated[str, Field(max_length=64)]
    """Differs after each start: what an earlier process of this gateway held is free."""
    holding: Annotated[list[LineRef], Field(max_length=MOST_HELD)] = Field(default_factory=list)
    """Everything that it runs; what else it was lent is free."""
    most: Annotated[int, Field(ge=0, le=MOST_HELD)] = 0


class Line(LineRef):
    """A request of a batch."""

    endpoint: str
    sha256: str
    body: str
    """JSON."""


class Lent(WireModel):
    lines: list[Line]
    cancelled: list[str] = Field(default_factory=list)
    """Batches whose lines, of those held, shall end."""


class Settled(LineRef):
    """What became of a line: an answer, an error, or `again_in_s`."""

    gateway: _Text
    process: Annotated[str, Field(max_length=64)]
    status: Annotated[int, Field(ge=0, le=599)] = 0
    request_id: _Text = ""
    body: str = ""
    """JSON of the answer."""
    again_in_s: Annotated[float, Field(gt=0, le=3600)] | None = None
    """It was not answered, and may be tried again then."""


class Kept(WireModel):
    kept: bool
    """False: the line has an answer already, or is no longer this gateway's."""
