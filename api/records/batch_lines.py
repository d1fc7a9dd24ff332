"""The lines of a batch's file, and of its answers. Pure.

A line is `{"custom_id": …, "method": "POST", "url": …, "body": {…}}`. One that is not fails alone, and its answer says
why.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from busbar.api.errors import Invalid
from busbar.kube.contracts.batches import LINE_BYTES
from busbar.kube.documents import DocumentError, value_of_json

HEAD_CHARS = 1024
"""Lines whose prompts are alike for so long run one after another, so that a replica computes what they share once."""


@dataclass(frozen=True)
class Cut:
    """Lines of a piece of a file, and how much of it they are."""

    lines: list[bytes]
    bytes: int


@dataclass(frozen=True)
class Asked:
    """A line that can be run, or `problem`."""

    custom_id: str | None
    body: str = ""
    problem: str | None = None
    head: str | None = None
    """Of lines that begin alike it is the same; None: there is too little of it."""


def cut(data: bytes, *, last: bool) -> Cut:
    """Whole lines of `data`, which begins at the beginning of one; at its `last` end a line needs no newline.

    A line of more than LINE_BYTES is cut off: what is left of it is the beginning of the next piece, so that `data` must be
    longer than that where it is not the last.
    """
    lines = data.split(b"\n")
    rest = lines.pop()
    if rest and (last or len(rest) > LINE_BYTES):
        lines.append(rest)
        rest = b""
    return Cut([line for line in lines if line.strip()], len(data) - len(rest))


def read(line: bytes, endpoint: str) -> Asked:
    """What a line asks for."""
    if len(line) > LINE_BYTES:
        return Asked(None, problem=f"the line has {len(line):,} bytes; at most {LINE_BYTES:,} are taken")
    try:
        document = value_of_json(line)
    except DocumentError as error:
        return Asked(None, problem=f"the line is not JSON: {error}")
    if not isinstance(document, dict):
        return Asked(None, problem="the line must be a JSON object")
    custom_id = document.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= 512 or "\0" in custom_id:
        return Asked(None, problem="custom_id must be a text of 1 to 512 characters")
    try:
        custom_id.encode()
    except UnicodeEncodeError:
        return Asked(None, problem="custom_id must be a text that can be written in UTF-8")
    problem, body = None, document.get("body")
    if document.get("method") != "POST":
        problem = "method must be POST"
    elif document.get("url") != endpoint:
        problem = f"url must be {endpoint}, the endpoint of the batch"
    elif not isinstance(body, dict) or not isinstance(body.get("model"), str):
        problem = "body must be a request, an object that names a model"
    elif body.get("stream"):
        problem = "body.stream must be left out: a batch has no streams"
    if problem or not isinstance(body, dict):
        return Asked(custom_id, problem=problem)
    try:
        return Asked(custom_id, json.dumps(body), head=head_of(body))
    except RecursionError:  # it could just be read
        return Asked(custom_id, problem="the line is nested too deeply")


def head_of(body: Mapping[str, Any]) -> str | None:
    """A digest of how a request's prompt begins, with what a template writes before it; None: the prompt is shorter."""
    prompt = next((body[name] for name in ("messages", "prompt", "input") if name in body), "")
    text = prompt if isinstance(prompt, str) else json.dumps(prompt)
    if len(text) < HEAD_CHARS:
        return None
    first = [body["model"], body.get("tools"), body.get("instructions"), text[:HEAD_CHARS]]
    return hashlib.sha256(json.dumps(first).encode()).hexdigest()[:16]


def by_batch(lines: Iterable[tuple[str, int]]) -> dict[str, list[int]]:
    """The numbers of these lines, of each batch in its order.

    Queries name lines by one batch and its numbers: SQLite reads the whole table for `(batch_id, number) IN (…)`.
    """
    found: dict[str, list[int]] = {}
    for batch, number in sorted(lines):
        found.setdefault(batch, []).append(number)
    return found


def plain(text: str) -> str:
    """The same JSON in ASCII, so that its length is its size. Raises Invalid."""
    try:
        return json.dumps(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise Invalid("the answer is not JSON", field="body") from error


def answer_line(
    batch: str, number: int, custom_id: str | None, status: int, request_id: str, body: str
) -> str:
    """The line of the answer; `body` is JSON."""
    head = {"id": f"{batch}-{number}", "custom_id": custom_id}
    whole = {"status_code": status, "request_id": request_id}
    return f'{json.dumps(head)[:-1]}, "response": {json.dumps(whole)[:-1]}, "body": {body}}}, "error": null}}'


def problem_line(batch: str, number: int, custom_id: str | None, code: str, message: str) -> str:
    """The line of a request that was not run."""
    document: dict[str, Any] = {
        "id": f"{batch}-{number}",
        "custom_id": custom_id,
        "response": None,
        "error": {"code": code, "message": f"line {number + 1}: {message}"},
    }
    return json.dumps(document)
