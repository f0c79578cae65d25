"""The pages for people: one file each, without a build step and without outside resources."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

router = APIRouter(include_in_schema=False)

_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


@router.get("/docs")
async def docs() -> HTMLResponse:
    """Every route with its parameters and bodies, to read and to try."""
    return _page("docs.html")


@cache
def _page(name: str) -> HTMLResponse:
    text = files("kvbm_metrics.pages").joinpath(name).read_text(encoding="utf-8")
    headers = {"content-security-policy": _policy(text), "referrer-policy": "no-referrer"}
    return HTMLResponse(text, headers=headers)


def _policy(text: str) -> str:
    """Only the scripts and styles that are in the page itself run, and they talk to us only."""
    hashes: dict[str, list[str]] = {"script": [], "style": []}
    for kind, body in _INLINE.findall(text):
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{digest}'")
    return (
        f"default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; "
        f"form-action 'none'; frame-ancestors 'none'; "
        f"script-src {' '.join(hashes['script'])}; style-src {' '.join(hashes['style'])}"
    )
