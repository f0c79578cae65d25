"""The pages: every file is served, from here only, under a policy that lets nothing else in."""

from __future__ import annotations

import re
from importlib.resources import files

import httpx
import pytest
from fastapi import FastAPI
from kvbm_metrics import pages

PARTS = ("live.css", "live.js", "draw.js", "lookups.js", "panels.js", "services.js", "story.js")


@pytest.fixture
def client() -> httpx.AsyncClient:
    """The pages alone."""
    app = FastAPI()
    app.include_router(pages.router)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://kvbm")


async def test_the_live_page_runs_its_own_files_only(client: httpx.AsyncClient) -> None:
    """The policy allows no inline script or style, and the page has none."""
    page = await client.get("/")
    assert page.status_code == 200
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
    assert not re.search(r"<script>|<style>|\sstyle=|\son\w+=", page.text)


@pytest.mark.parametrize("part", PARTS)
async def test_each_part(client: httpx.AsyncClient, part: str) -> None:
    """Its type is said and not guessed; the browser asks whether it has changed."""
    answer = await client.get(f"/live/{part}")
    assert answer.status_code == 200
    kind = "text/css" if part.endswith("css") else "text/javascript"
    assert answer.headers["content-type"].startswith(kind)
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-cache"


async def test_nothing_else_is_served(client: httpx.AsyncClient) -> None:
    """No path leads to another file of the package."""
    for path in ("/live/__init__.py", "/live/docs.html", "/live/..%2Fapi.py", "/live/"):
        assert (await client.get(path)).status_code in (404, 422), path


def test_no_file_names_another_site() -> None:
    """Only the name of SVG's namespace looks like an address."""
    for one in files("kvbm_metrics.pages").iterdir():
        if one.name.endswith((".html", ".css", ".js")):
            found = set(re.findall(r"(?:https?:)?//[a-z][\w.-]+\.\w+[^\"' ]*", one.read_text()))
            assert found <= {"http://www.w3.org/2000/svg"}, (one.name, found)


def test_every_import_and_part_is_known() -> None:
    """A module that the page imports can be had."""
    folder = files("kvbm_metrics.pages")
    for part in PARTS:
        for name in re.findall(r'from "\./([\w.]+)"', folder.joinpath(part).read_text()):
            assert name in PARTS
