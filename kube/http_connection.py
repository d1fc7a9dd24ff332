"""A connection of the processes that serve with aiohttp: our answers to what reaches no handler, or reaches it broken.

aiohttp alone answers a request that it cannot parse with the line that it could not read, and logs that line with a
traceback. It may be the header with the caller's key, so here neither the answer nor the log line has any of it. Nor does
aiohttp tell a handler that the body it reads went wrong in one of its chunks: it would wait for the rest until its time limit.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from aiohttp import StreamReader, web
from aiohttp.http_exceptions import ContentEncodingError, HttpProcessingError, LineTooLong
from aiohttp.web_protocol import _ErrInfo

log = logging.getLogger(__name__)
Refuse = Callable[[int, str], web.Response]
"""Makes the answer of a status and of what is wrong: a sentence without capital and full stop."""
_MALFORMED: tuple[tuple[type[HttpProcessingError], str], ...] = (
    (LineTooLong, "a line of the request's head is too long: at most 8,190 bytes are read. Shorten it"),
    (
        ContentEncodingError,
        "the body's Content-Encoding is not read here; send it as it is, or as gzip or deflate",
    ),
    (
        HttpProcessingError,
        "the request is not well-formed HTTP/1.1; check its first line, headers and chunks",
    ),
)
"""The first kind that fits."""
_EXPECT = "the Expect header asks for what is not done here; leave it out, or make it 100-continue"


class MalformedBody(web.RequestPayloadError):
    """The chunks of a body are not well-formed."""


def body_problem(error: web.RequestPayloadError) -> str:
    """What is wrong with a body that a handler could not read."""
    if isinstance(error, MalformedBody):
        return str(error)
    return "the body cannot be read: it is not what Content-Encoding says"


def connections(runner: web.AppRunner, refuse: Refuse, **options: Any) -> Callable[[], Connection]:
    """A factory for `create_server`. The runner has been set up; `options` are those of aiohttp's protocol."""
    assert runner.server is not None
    loop = asyncio.get_running_loop()
    return partial(Connection, runner.server, refuse=refuse, loop=loop, access_log=None, **options)


class Connection(web.RequestHandler):
    """aiohttp's protocol of one connection."""

    def __init__(self, manager: web.Server, *, refuse: Refuse, **options: Any) -> None:
        super().__init__(manager, **options)
        self._refuse = refuse

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        malformed = bool(self._messages) and isinstance(self._messages[-1][0], _ErrInfo)
        for body in list(self._unfinished()):
            if malformed:
                self._break(body)
            if body.exception() is not None:
                body.feed_eof()  # or aiohttp reads on for the rest, meets the same error, and logs it with a traceback

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if not isinstance(exc, HttpProcessingError) or request.writer.output_size > 0:
            return super().handle_error(request, status, exc, message)
        return self._answer(400, _told(exc))

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        if isinstance(resp, web.HTTPExpectationFailed):  # raised before any middleware
            resp = self._answer(resp.status, _EXPECT)
        return await super().finish_response(request, resp, start_time)

    def _unfinished(self) -> Iterator[StreamReader]:
        """Bodies of which the end has not come."""
        current = self._current_request
        bodies = [current.content] if current is not None else []
        for body in (*bodies, *(body for _, body in self._messages)):
            if not body.is_eof():
                yield body

    def _break(self, body: StreamReader) -> None:
        """Tell who reads the body, who answers in place of the error, and take nothing more."""
        error, _ = self._messages.pop()
        assert isinstance(error, _ErrInfo)
        body.set_exception(MalformedBody(_told(error.exc)))
        self.close()

    def _answer(self, status: int, problem: str) -> web.Response:
        answer = self._refuse(status, problem)
        answer.force_close()
        return answer


def _told(error: BaseException) -> str:
    """What is wrong, which is logged without anything that was sent."""
    log.info("malformed_request", extra={"problem": type(error).__name__})
    return next(sentence for kind, sentence in _MALFORMED if isinstance(error, kind))
