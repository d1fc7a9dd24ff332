"""A file that is whole or not there: it has another name, in the same folder, until it is kept."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Self

from busbar.cli.errors import UsageProblem


class WholeFile:
    """What is written to `file` takes the place of `path` at `keep`; without that, as after Ctrl-C, nothing of it stays."""

    def __init__(self, path: Path, mode: int = 0o666) -> None:
        """`mode` are its permissions, less those that the umask takes."""
        self._path, self._mode = path, mode

    def __enter__(self) -> Self:
        """Raises UsageProblem where the folder takes no file."""
        self._fresh = self._path.with_name(f".{self._path.name}.{os.urandom(4).hex()}")
        try:
            handle = os.open(self._fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, self._mode)
        except OSError as error:
            raise UsageProblem(f"{self._path} cannot be written: {error.strerror}") from error
        self.file = os.fdopen(handle, "wb")
        return self

    def keep(self) -> None:
        """The file is whole: close it and give it its name."""
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        os.replace(self._fresh, self._path)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.file.close()
        finally:
            self._fresh.unlink(missing_ok=True)
