"""Reads tool calls out of an answer while it is generated. Pure Python.

Text goes in as it comes, content and calls come out as soon as they are certain: a call is told when its name and the
first brace of its arguments are there, its arguments piece by piece. What comes out depends on the text only, not on
how it was cut, so a stream that goes on at another replica reads the text so far again and is at the same place.

What looks like a call but is none (no name, an unknown tool, arguments that are no object) is content, as it stands.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from busbar.workloads.serving.toolformat import ToolFormat

LONGEST_HEAD = 4096
"""Characters of a call before its arguments."""
SPACE = " \t\r\n"


class _NoCall(Exception):
    """The text is no tool call."""


@dataclass
class CallPiece:
    """A new call (with its id and name), or more of one's arguments."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


@dataclass
class Pieces:
    """What some text has made certain."""

    content: str = ""
    calls: list[CallPiece] = field(default_factory=list)


class ToolReader:
    """One answer, read as it grows."""

    def __init__(
        self,
        form: ToolFormat,
        names: Collection[str],
        *,
        parallel: bool = True,
        answer: str = "",
    ) -> None:
        """`answer` names it, for the ids of its calls. Without `parallel` nothing is read behind the first call."""
        self._form = form
        self._names = frozenset(names)
        self._parallel = parallel
        self._answer = answer
        self._text = ""
        """Not read yet."""
        self._opened = ""
        """What stood before the call that is being read."""
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._arguments = False
        """In the arguments rather than behind them."""
        self._out = Pieces()
        self._state: Callable[[], bool] = self._begin
        self.calls = 0
        self.over = False
        """The first call is whole, and there is to be no other."""

    def feed(self, text: str) -> Pieces:
        """What is certain with `text`."""
        self._text += text
        while self._state():
            pass
        found, self._out = self._out, Pieces()
        return found

    def end(self) -> Pieces:
        """What was held back, when nothing follows."""
        if self._state not in (self._value, self._after_call, self._after_mark, self._drop):
            self._show(self._opened + self._text)
        found, self._out = self._out, Pieces()
        self._text = self._opened = ""
        self._state = self._drop
        return found

    # -- states: each reads what it can, and says whether another one is to go on -------------------

    def _begin(self) -> bool:
        """The beginning of the answer: in Llama's format calls stand here or nowhere."""
        if self._form is not ToolFormat.LLAMA:
            return self._become(self._content)
        bare = self._text.lstrip(SPACE)
        if not bare:
            return False
        if bare[0] != "{":
            return self._become(self._plain)
        return self._open(len(self._text) - len(bare))

    def _plain(self) -> bool:
        """No call comes any more."""
        self._show(self._text)
        self._text = ""
        return False

    def _content(self) -> bool:
        """Text before, between and behind calls."""
        opening = self._form.opening
        at = self._text.find(opening)
        if at < 0:
            begun = next((n for n in range(len(opening) - 1, 0, -1) if self._text.endswith(opening[:n])), 0)
            shown = self._text[: len(self._text) - begun].rstrip(SPACE)  # space before a call is no content
            self._show(shown)
            self._text = self._text[len(shown) :]
            return False
        shown = self._text[:at].rstrip(SPACE)
        self._show(shown)
        self._opened = self._text[len(shown) : at + len(opening)]
        self._text = self._text[at + len(opening) :]
        return self._become(self._named if self._form is ToolFormat.MISTRAL_ARGS else self._before_call)

    def _before_call(self) -> bool:
        """Behind the opening: white space, and in Mistral's format the list's bracket."""
        bare = self._text.lstrip(SPACE + "[" if self._form is ToolFormat.MISTRAL else SPACE)
        if not bare:
            return False
        if bare[0] != "{":
            return self._no_call()
        return self._open(len(self._text) - len(bare))

    def _open(self, skipped: int) -> bool:
        self._opened += self._text[:skipped]
        self._text = self._text[skipped:]
        return self._become(self._head)

    def _head(self) -> bool:
        """From the call's brace to that of its arguments."""
        try:
            found = _read_head(self._text, self._form.argument_key)
            if found is None:
                if len(self._text) > LONGEST_HEAD:
                    raise _NoCall
                return False
            name, arguments, end, inside = found
            if name not in self._names:
                raise _NoCall
        except _NoCall:
            return self._no_call()
        self._call(name, arguments)
        self._text = self._text[end:]
        self._arguments, self._depth = inside, 0 if inside else 1
        return self._become(self._value)

    def _named(self) -> bool:
        """Mistral's newer format: the name, [ARGS], and the arguments' brace."""
        at = self._text.find("{")
        if at < 0:
            return self._no_call() if len(self._text) > LONGEST_HEAD else False
        name = self._text[:at].partition("[")[0].strip(SPACE)
        if name not in self._names:
            return self._no_call()
        self._call(name, "")
        self._text = self._text[at:]
        self._arguments, self._depth = True, 0
        return self._become(self._value)

    def _value(self) -> bool:
        """Through the arguments, and behind them through the rest of the call."""
        for at, character in enumerate(self._text):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = character == "\\"
                self._in_string = character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return self._close(at + 1)
        self._more(self._text)
        self._text = ""
        return False

    def _close(self, end: int) -> bool:
        """The arguments, or the call, end before `end`."""
        self._more(self._text[:end])
        self._text = self._text[end:]
        self._opened = ""
        if self._arguments and self._form is not ToolFormat.MISTRAL_ARGS:
            self._arguments, self._depth = False, 1
            return True
        self._arguments = False
        self.over = not self._parallel
        return self._become(self._drop if self.over else self._after_call)

    def _after_call(self) -> bool:
        """Separators and closing marks; then the next call, or text."""
        closing = {ToolFormat.HERMES: "</tool_call>", ToolFormat.LLAMA: ";", ToolFormat.MISTRAL: ","}
        bare = self._text.lstrip(SPACE)
        mark = closing.get(self._form, "")
        if not bare or (mark.startswith(bare) and bare != mark):
            return False
        if mark and bare.startswith(mark):
            self._text = bare[len(mark) :]
            return self._become(self._after_mark)
        if self._form is ToolFormat.MISTRAL and bare[0] == "]":
            self._text = bare[1:]
            return self._become(self._content)
        self._text = bare
        if self._form is ToolFormat.LLAMA:
            return self._become(self._plain)
        return self._become(self._content)

    def _after_mark(self) -> bool:
        bare = self._text.lstrip(SPACE)
        if not bare:
            return False
        self._text = bare
        if self._form is ToolFormat.HERMES:
            return self._become(self._content)
        if bare[0] == "{":
            return self._become(self._head)
        return self._become(self._plain)

    def _drop(self) -> bool:
        self._text = ""
        return False

    # -- inside -------------------------------------------------------------------------------

    def _become(self, state: Callable[[], bool]) -> bool:
        self._state = state
        return True

    def _no_call(self) -> bool:
        """What was taken for a call is shown; behind it one may still come."""
        self._show(self._opened)
        self._opened = ""
        return self._become(self._plain if self._form is ToolFormat.LLAMA else self._content)

    def _show(self, text: str) -> None:
        self._out.content += text

    def _call(self, name: str, arguments: str) -> None:
        index = self.calls
        self.calls += 1
        self._out.calls.append(CallPiece(index, arguments, call_id(self._form, self._answer, index), name))

    def _more(self, text: str) -> None:
        if not (self._arguments and text):
            return
        calls = self._out.calls
        if calls and calls[-1].index == self.calls - 1:
            calls[-1].arguments += text
        else:
            calls.append(CallPiece(self.calls - 1, text))


def call_id(form: ToolFormat, answer: str, index: int) -> str:
    """The id of an answer's call: the same on every replica that works on the answer. Mistral's templates take ids of
    nine letters and digits only."""
    digest = hashlib.blake2b(f"{answer}/{index}".encode(), digest_size=12).hexdigest()
    return digest[:9] if form.opening == "[TOOL_CALLS]" else f"call_{digest}"


def _read_head(text: str, key_of_arguments: str) -> tuple[str, str, int, bool] | None:
    """(name, arguments that are complete, where to go on, whether the arguments begin there) of a call's object.

    None: more text is needed. Raises _NoCall.
    """
    name, arguments, at = "", "", 1
    while True:
        at = _skip(text, at, SPACE + ",")
        if at >= len(text):
            return None
        if text[at] == "}":
            if not name:
                raise _NoCall
            return name, arguments or "{}", at, False
        end = _string_end(text, at)
        if end < 0:
            return None
        key = _string(text[at:end])
        at = _skip(text, end, SPACE)
        if at >= len(text):
            return None
        if text[at] != ":":
            raise _NoCall
        at = _skip(text, at + 1, SPACE)
        if at >= len(text):
            return None
        if key in (key_of_arguments, "arguments", "parameters"):
            if text[at] != "{":
                raise _NoCall
            if name:
                return name, "", at, True
        end = _value_end(text, at)
        if end < 0:
            return None
        if key == "name":
            name = _string(text[at:end])
            if arguments:
                return name, arguments, end, False
        elif key in (key_of_arguments, "arguments", "parameters"):
            arguments = text[at:end]
        at = end


def _skip(text: str, at: int, characters: str) -> int:
    while at < len(text) and text[at] in characters:
        at += 1
    return at


def _string(text: str) -> str:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise _NoCall from error
    if not isinstance(found, str):
        raise _NoCall
    return found


def _string_end(text: str, at: int) -> int:
    """Behind the string that begins at `at`; -1 where it is not whole."""
    if text[at] != '"':
        raise _NoCall
    at += 1
    while at < len(text):
        if text[at] == "\\":
            at += 1
        elif text[at] == '"':
            return at + 1
        at += 1
    return -1


def _value_end(text: str, at: int) -> int:
    """Behind the value that begins at `at`; -1 where it is not whole."""
    if text[at] == '"':
        return _string_end(text, at)
    depth = 0
    while at < len(text):
        character = text[at]
        if character == '"':
            at = _string_end(text, at)
            if at < 0:
                return -1
            continue
        if character in "{[":
            depth += 1
        elif character in "}]":
            if depth == 0:
                return at
            depth -= 1
            if depth == 0:
                return at + 1
        elif depth == 0 and character in "," + SPACE:
            return at
        at += 1
    return -1
