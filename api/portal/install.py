from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from busbar.api.errors import ApiError, body_of
from busbar.api.services import Services


def install(app: FastAPI, services: Services) -> None: ...
def error_page(request: Request, error: ApiError) -> Response:
    return JSONResponse(body_of(error), status_code=error.status)
