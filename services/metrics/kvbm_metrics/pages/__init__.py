"""The pages for people: plain files, without a build step and without outside resources."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files
from typing import Literal

from fastapi import APIRouter
from fastapi.responses import HTMLResponse, Response

router = APIRouter(include_in_schema=False)

Part = Literal[
    "live.css", "live.js", "draw.js", "lookups.js", "panels.js", "services.js", "story.js"
]
TYPES = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8"}
CLOSED = (
    "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
"""A page talks to us only, and no other site frames it."""
_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


@router.get("/")
async def live() -> HTMLResponse:
    """Serve the live page; it asks the API, with the token that the reader gives it."""
    return _page("live.html", "script-src 'self'; style-src 'self'")


@router.get("/live/{part}")
async def live_part(part: Part) -> Response:
    """Serve a script or the style of the live page."""
    return _part(part)


@router.get("/docs")
async def docs() -> HTMLResponse:
    """Serve a page with every route, its parameters and bodies, to read and to try."""
    return _page("docs.html", None)


@cache
def _page(name: str, policy: str | None) -> HTMLResponse:
    text = _text(name)
    sources = _inline_sources(text) if policy is None else policy
    return HTMLResponse(text, headers=_headers(f"{CLOSED}; {sources}"))


@cache
def _part(name: str) -> Response:
    # Asked again each time: a page must not run with the scripts of another version.
    headers = _headers("default-src 'none'") | {"cache-control": "no-cache"}
    return Response(_text(name), media_type=TYPES[name.rsplit(".")[-1]], headers=headers)


def _text(name: str) -> str:
    return files("kvbm_metrics.pages").joinpath(name).read_text(encoding="utf-8")


def _headers(policy: str) -> dict[str, str]:
    return {
        "content-security-policy": policy,
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }


def _inline_sources(text: str) -> str:
    """Return a policy under which only scripts and styles in the page itself run."""
    hashes: dict[str, list[str]] = {"script": [], "style": []}
    for kind, body in _INLINE.findall(text):
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{digest}'")
    return f"script-src {' '.join(hashes['script'])}; style-src {' '.join(hashes['style'])}"
