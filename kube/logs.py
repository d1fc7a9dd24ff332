"""Log lines of our processes: one event per line on standard error, the same fields everywhere.

    time      RFC 3339 in UTC, with milliseconds
    level     debug, info, warning, error
    logger    the module that speaks
    message   what happened
    ...       the event's own fields, given as ``extra``: text, numbers, truth values; nothing else is written
    exception a traceback, if there is one

``json`` writes an object per line. ``text`` writes the first four as words and the others as ``key=value``, quoted as in
JSON where the value is not one plain word; a traceback follows on lines of its own. Prompts, keys and bearers are never
given to a logger.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime

from busbar.kube.settings import LogFormat, LogLevel

_NOT_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}
"""What every record has, and uvicorn's copy of its message for terminals."""
Field = str | int | float | bool | None
_PLAIN = re.compile(r'[^\s"=\x00-\x1f\x7f-\x9f]+')


class JsonLogFormatter(logging.Formatter):
    """A record as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        head = _head(record)
        line = head | _fields(record) | head  # the schema's own fields come first, and win
        if record.exc_info and record.exc_info[0] is not None:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class TextLogFormatter(logging.Formatter):
    """A record as one line of words and ``key=value`` pairs."""

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage().replace("\r", "\\r").replace("\n", "\\n")
        head = _head(record) | {"message": message}
        pairs = [f"{key}={_word(value)}" for key, value in _fields(record).items()]
        line = " ".join([*map(str, head.values()), *pairs])
        if record.exc_info and record.exc_info[0] is not None:
            line += "\n" + self.formatException(record.exc_info)
        return line


def set_up(form: LogFormat, level: LogLevel = "info") -> None:
    """Send everything that this process logs, its libraries included, to standard error in this form."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLogFormatter() if form == "json" else TextLogFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def _head(record: logging.LogRecord) -> dict[str, Field]:
    at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
    return {
        "time": at.replace("+00:00", "Z"),
        "level": record.levelname.lower(),
        "logger": record.name,
        "message": record.getMessage(),
    }


def _fields(record: logging.LogRecord) -> dict[str, Field]:
    return {
        key: value
        for key, value in vars(record).items()
        if key not in _NOT_FIELDS and (value is None or isinstance(value, str | int | float | bool))
    }


def _word(value: Field) -> str:
    if isinstance(value, str):
        return value if _PLAIN.fullmatch(value) else json.dumps(value, ensure_ascii=False)
    return json.dumps(value)
