"""The errors of the command line, and their exit codes.

    BusbarError                1  the operation failed
    ├── Invalid                1  the server refused a field (`field` says which)
    ├── UsageProblem           2  the command was used wrongly
    ├── NotFound               3  no such object (or none that you may see)
    ├── NotAuthorised          4  no token, a wrong one, or one without the right
    ├── Unreachable            5  the server, or a part it needs, does not answer
    └── JobFailed              6  the job that was waited for failed

`busbar.cli.client.Client` raises the same exceptions.
"""

from __future__ import annotations

from typing import ClassVar

EXIT_CODES = {
    0: "done",
    1: "the operation failed",
    2: "the command was used wrongly",
    3: "not found",
    4: "not authorised",
    5: "the server cannot be reached",
    6: "the job that was waited for failed",
    130: "stopped by Ctrl-C",
    141: "nobody reads the output any more: its pipe is closed",
    143: "stopped by SIGTERM",
}


class BusbarError(Exception):
    """The operation failed. The message says what, where, and what to do."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, code: str = "", field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.field = field


class Invalid(BusbarError):
    """The server refused the request's content."""


class UsageProblem(BusbarError):
    """Wrong use of the command, found after its options were parsed."""

    exit_code = 2


class NotFound(BusbarError):
    exit_code = 3


class NotAuthorised(BusbarError):
    exit_code = 4


class Unreachable(BusbarError):
    exit_code = 5


class JobFailed(BusbarError):
    exit_code = 6
