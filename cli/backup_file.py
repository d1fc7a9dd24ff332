"""The file of `busbar backup`: a zip archive whose last member names the SHA-256 of all others.

    database.jsonl       the tables, as GET /api/v1alpha1/database gives them
    objects.jsonl        one object a line: apiVersion, kind, metadata, spec, status
    workload-key.json    the workload key, sealed with a passphrase; only if one was given
    manifest.json        {"busbar": "backup", "format": 1, "version", "madeAt", "server", "parts": {name: SHA-256}}

A file that was cut short has no manifest and is refused. The digests show damage; they do not prove who wrote the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from busbar.cli.errors import BusbarError, UsageProblem
from busbar.cli.whole_file import WholeFile

FORMAT = 1
DATABASE, OBJECTS, KEY, MANIFEST = "database.jsonl", "objects.jsonl", "workload-key.json", "manifest.json"
PIECE_BYTES = 1024 * 1024
Document = dict[str, Any]


class BackupWriter:
    """Writes the file, which is there when it is finished, and only then; mode 0600."""

    def __init__(self, path: Path, *, force: bool = False) -> None:
        self._path = path
        self._force = force
        self._parts: dict[str, str] = {}
        self._out = WholeFile(path, 0o600)

    def __enter__(self) -> Self:
        if self._path.is_dir() or (self._path.exists() and not self._force):
            raise UsageProblem(f"{self._path} exists; name another file, or replace it with --force")
        self._out.__enter__()
        self._archive = zipfile.ZipFile(self._out.file, "w", zipfile.ZIP_DEFLATED)
        return self

    def add(self, name: str, pieces: Iterable[bytes]) -> int:
        """Add a part; its size in bytes."""
        digest, size = hashlib.sha256(), 0
        with self._archive.open(name, "w", force_zip64=True) as out:
            for piece in pieces:
                digest.update(piece)
                size += len(piece)
                out.write(piece)
        self._parts[name] = digest.hexdigest()
        return size

    def finish(self, *, version: str, server: str, made_at: datetime) -> None:
        """Add the manifest and give the file its name."""
        about = {
            "busbar": "backup",
            "format": FORMAT,
            "version": version,
            "madeAt": made_at.isoformat(),
            "server": server,
            "parts": self._parts,
        }
        self._archive.writestr(MANIFEST, json.dumps(about, indent=2) + "\n")
        self._archive.close()
        self._out.keep()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._archive.close()
        self._out.__exit__(kind, error, trace)


@dataclass(frozen=True)
class BackupFile:
    """A file whose parts have been checked."""

    path: Path
    version: str
    made_at: str
    server: str
    parts: Mapping[str, str]

    def objects(self) -> list[Document]:
        """The objects in the order in which they are restored."""
        return [json.loads(line) for line in b"".join(self.pieces(OBJECTS)).splitlines()]

    def key(self) -> Document | None:
        """The sealed workload key, if there is one."""
        return json.loads(b"".join(self.pieces(KEY))) if KEY in self.parts else None

    def pieces(self, name: str) -> Iterator[bytes]:
        with zipfile.ZipFile(self.path) as archive:
            yield from _pieces(archive, name)


def open_backup(path: Path) -> BackupFile:
    """The file at `path`, read once as a whole.

    Raises:
        UsageProblem: it cannot be read.
        BusbarError: it is no backup, cut short, damaged, or of a format that this version does not know.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            about = json.loads(archive.read(MANIFEST))
            if about["busbar"] != "backup" or about["format"] != FORMAT:
                raise BusbarError(
                    f"{path} has the format {about['format']!r}, and this version reads {FORMAT}; "
                    f"use the version that made it, {about.get('version')}"
                )
            parts = {str(name): str(digest) for name, digest in about["parts"].items()}
            if not {DATABASE, OBJECTS} <= parts.keys() <= {DATABASE, OBJECTS, KEY}:
                raise BusbarError(f"{path} holds other parts than a backup has: {', '.join(parts)}")
            for name, digest in parts.items():
                if _digest(archive, name) != digest:
                    raise BusbarError(f"{path} is damaged: {name} does not have the digest of the manifest")
            return BackupFile(path, str(about["version"]), str(about["madeAt"]), str(about["server"]), parts)
    except OSError as error:
        raise UsageProblem(f"{path}: {error.strerror or error}") from error
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise BusbarError(f"{path} is no backup, or is cut short or damaged: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, NotImplementedError, RuntimeError) as error:
        raise BusbarError(
            f"{path} is not a backup of Busbar: its {MANIFEST} is missing or unreadable"
        ) from error


def whole(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The pieces of a database's dump, unchanged.

    Raises:
        BusbarError: at the end, if the last line is not there or its digest is another.
    """
    digest, last = hashlib.sha256(), b""
    for piece in pieces:
        yield piece
        *lines, rest = (last + piece).splitlines(keepends=True) or [b""]
        digest.update(b"".join(lines))
        last = rest
    try:
        told = json.loads(last)["sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise BusbarError(
            "the server's answer was cut short: the end of the database is missing; try again"
        ) from error
    if told != digest.hexdigest():
        raise BusbarError(
            "the database arrived damaged: its lines do not have the digest at its end; try again"
        )


def _digest(archive: zipfile.ZipFile, name: str) -> str:
    digest = hashlib.sha256()
    for piece in _pieces(archive, name):
        digest.update(piece)
    return digest.hexdigest()


def _pieces(archive: zipfile.ZipFile, name: str) -> Iterator[bytes]:
    with archive.open(name) as part:
        while piece := part.read(PIECE_BYTES):
            yield piece
