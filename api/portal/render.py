"""Templates, static files and the frame that every page shares."""

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

from fastapi import Request
from fastapi.responses import HTMLResponse, Response
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from busbar.api.access.identity import Caller
from busbar.api.dependencies import services_of
from busbar.api.errors import NotFound

HERE = Path(__file__).parent
STATIC = HERE / "static"
TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".txt": "text/plain"}
FOREVER = "public, max-age=31536000, immutable"


@cache
def templates() -> Environment:
    """The templates: everything is escaped, a misspelt variable is an error."""
    environment = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    environment.globals["static"] = static_url
    return environment


@cache
def static_files() -> dict[str, tuple[bytes, str, str]]:
    """Path to (content, type, digest) of every file that browsers may fetch."""
    found = {}
    for path in sorted(STATIC.rglob("*")):
        if path.is_file() and path.suffix in TYPES:
            content = path.read_bytes()
            digest = hashlib.sha256(content).hexdigest()[:12]
            found[str(path.relative_to(STATIC))] = (content, TYPES[path.suffix], digest)
    return found


def static_url(name: str) -> str:
    """The address of a static file, which changes with its content."""
    return f"/static/{name}?v={static_files()[name][2]}"


def static_response(name: str, version: str | None) -> Response:
    """A static file; cached for ever when asked for by its digest."""
    try:
        content, kind, digest = static_files()[name]
    except KeyError:
        raise NotFound(f"/static/{name} does not exist") from None
    caching = FOREVER if version == digest else "no-cache"
    return Response(content, media_type=kind, headers={"Cache-Control": caching})


def is_fragment(request: Request) -> bool:
    """Whether htmx asks for a part of a page."""
    return request.headers.get("HX-Request") == "true"


async def frame(request: Request, caller: Caller, active: str) -> dict[str, Any]:
    """What the layout needs."""
    services = services_of(request)
    return {
        "active": active,
        "subject": caller.subject,
        "admin": await services.authorizer.administers(caller),
        "sees_all": await services.authorizer.is_admin(caller),
        "csrf": services.sessions.csrf(caller.session) if caller.session else "",
    }


def html(template: str, context: dict[str, Any], status: int = 200) -> HTMLResponse:
    """A rendered template."""
    return HTMLResponse(templates().get_template(template).render(context), status_code=status)
