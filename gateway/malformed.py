"""Answers to what cannot be parsed as HTTP, which reaches no handler.

aiohttp answers with the line that it could not read, and logs it with a traceback. That line may be the header with the
key, so here neither the answer nor the log line has any of it.
"""

from __future__ import annotations

import logging

from aiohttp import web
from aiohttp.http_exceptions import ContentEncodingError, HttpProcessingError, LineTooLong

from busbar.gateway.errors import BadRequest, body

log = logging.getLogger("busbar.gateway.malformed")
_SENTENCES: tuple[tuple[type[HttpProcessingError], str], ...] = (
    (LineTooLong, "A line of the request's head is too long: at most 8,190 bytes are read. Shorten it."),
    (
        ContentEncodingError,
        "The body's Content-Encoding is not read here; send it as it is, or as gzip or deflate.",
    ),
    (
        HttpProcessingError,
        "The request is not well-formed HTTP/1.1; check its first line, headers and chunks.",
    ),
)
"""The first kind that fits."""


class Connection(web.RequestHandler):
    """aiohttp's protocol of one connection, with our answers."""

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if not isinstance(exc, HttpProcessingError) or request.writer.output_size > 0:
            return super().handle_error(request, status, exc, message)
        log.info("malformed_request", extra={"problem": type(exc).__name__})
        error = BadRequest(next(sentence for kind, sentence in _SENTENCES if isinstance(exc, kind)))
        answer = web.json_response(body(error), status=error.status, headers={"Server": "busbar"})
        answer.force_close()
        return answer
