"""A bearer token in a file that somebody else rotates: the kubelet renews projected tokens before they expire."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

CHECK_S = 10.0
"""A new token is used at the latest after this time; the kubelet writes it long before the old one expires."""


class TokenFile:
    """The current token of a file. The file is looked at every ``CHECK_S`` seconds and read when it has changed."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self._clock = clock
        self._checked = float("-inf")
        self._version: tuple[int, int, int] | None = None
        self._token = ""

    def read(self) -> str:
        """The token. While the file cannot be read, the last token stays.

        Raises:
            OSError: the file could never be read.
        """
        now = self._clock()
        if now - self._checked >= CHECK_S:
            try:
                # The kubelet swaps a link, so a new token may have the time of an old one, but another inode.
                found = self.path.stat()
                version = (found.st_mtime_ns, found.st_ino, found.st_size)
                if version != self._version:
                    self._token, self._version = self.path.read_text(encoding="utf-8").strip(), version
            except OSError:
                if self._version is None:
                    raise
            self._checked = now
        return self._token

    def header(self) -> dict[str, str]:
        """The Authorization header of a call. Raises OSError as ``read`` does."""
        return {"Authorization": f"Bearer {self.read()}"}
