"""Manifests from files, folders' files and standard input."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from busbar.cli.errors import UsageProblem

Document = dict[str, Any]


def read(files: Iterable[str]) -> list[Document]:
    """All documents of all files, `-` being standard input. Raises UsageProblem with file and line."""
    documents = [document for file in files for document in _documents(file)]
    if not documents:
        raise UsageProblem("The files hold no object.")
    return documents


def _documents(file: str) -> list[Document]:
    from busbar.kube.documents import DocumentError, documents_of_yaml

    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageProblem(f"{file}: {getattr(error, 'strerror', None) or error}") from error
    try:
        found = documents_of_yaml(text)
    except DocumentError as error:
        raise UsageProblem(f"{file} is not YAML of objects: {error}") from error
    documents: list[Document] = []
    for document in found:
        items = (
            document.get("items")
            if isinstance(document, dict) and document.get("kind") == "List"
            else [document]
        )
        for item in items or ():
            if not isinstance(item, dict) or not item.get("kind"):
                raise UsageProblem(f"{file}: each document must be an object with a kind")
            documents.append(item)
    return documents
