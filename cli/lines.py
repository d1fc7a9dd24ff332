"""Lines of an answer that arrives in pieces.

Lines end with a line feed, a carriage return, or both. `str.splitlines`, and so `iter_lines` of the HTTP client, also ends them
at characters that may stand inside of a JSON text, such as U+2028.
"""

from __future__ import annotations


class Lines:
    """Takes pieces and gives the lines that are whole."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []

    def of(self, piece: bytes) -> list[str]:
        """The lines that this piece ends."""
        if b"\n" not in piece and b"\r" not in piece and not (self._rest and self._rest[-1].endswith(b"\r")):
            self._rest += [piece] if piece else []
            return []
        *whole, last = b"".join([*self._rest, piece]).splitlines(keepends=True)
        if last.endswith(b"\n"):
            whole.append(last)
            last = b""
        self._rest = [last] if last else []
        return [_text(line) for line in whole]

    def rest(self) -> list[str]:
        """What came behind the last end of a line, when there is nothing more to come."""
        last, self._rest = b"".join(self._rest), []
        return [_text(last)] if last else []


def _text(line: bytes) -> str:
    return line.decode(errors="replace").rstrip("\r\n")
