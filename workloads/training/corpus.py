"""The text: which files, in which order, and which are held out.

`builtin://python-stdlib` is the source of the running Python's standard library: real text that every machine
has. A claim's folder is read as it is: every file that is text (no NUL byte), hidden ones left out. A file is
held out by a hash of its name, so that adding files never moves others between the two sides.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from busbar.workloads.training.errors import InvalidJob

_FOREIGN = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class Document:
    name: str  # relative path with slashes
    path: Path

    def text(self) -> str:
        return self.path.read_bytes().decode("utf-8", errors="replace")


@dataclass(frozen=True)
class Corpus:
    train: tuple[Document, ...]  # sorted by name
    holdout: tuple[Document, ...]
    digest: str  # of names and contents


def open_corpus(uri: str, folder: Path | None, holdout_fraction: float) -> Corpus:
    """The corpus behind `uri`; `folder` is where a claim's URI is found. Raises InvalidJob."""
    if uri == "builtin://python-stdlib":
        documents = _python_stdlib(Path(sysconfig.get_path("stdlib")))
    else:
        documents = _folder(uri, folder)
    if not documents:
        raise InvalidJob("spec.engine.data.uri", f"{uri} holds no text files", "name a folder of text")
    held = [document for document in documents if _is_held_out(document.name, holdout_fraction)]
    kept = [document for document in documents if document not in set(held)]
    if not kept:
        raise InvalidJob(
            "spec.engine.data.holdoutFraction", "leaves no file to train on", "lower it, or add files"
        )
    return Corpus(tuple(kept), tuple(held), _digest(documents))


def _python_stdlib(root: Path) -> list[Document]:
    found = [(path.relative_to(root), path) for path in root.rglob("*.py") if path.is_file()]
    kept = [(name, path) for name, path in found if not _FOREIGN & set(name.parts)]
    return [Document(name.as_posix(), path) for name, path in sorted(kept)]


def _folder(uri: str, folder: Path | None) -> list[Document]:
    if folder is None or not folder.is_dir():
        raise InvalidJob("spec.engine.data.uri", f"{uri} is no folder here", f"put the text into {folder}")
    documents = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and not any(part.startswith(".") for part in name.parts) and _is_text(path):
            documents.append(Document(name.as_posix(), path))
    return documents


def _is_text(path: Path) -> bool:
    with path.open("rb") as file:
        return b"\0" not in file.read(8192)


def _is_held_out(name: str, fraction: float) -> bool:
    return int.from_bytes(hashlib.sha256(os.fsencode(name)).digest()[:8], "big") < fraction * 2**64


def _digest(documents: list[Document]) -> str:
    digest = hashlib.sha256()
    for document in documents:
        digest.update(os.fsencode(document.name) + b"\0")  # a file's name need not be Unicode
        digest.update(hashlib.sha256(document.path.read_bytes()).digest())
    return digest.hexdigest()
