"""A headless Chromium of the machine, driven over the DevTools protocol."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from playwright.async_api import Browser, Page, async_playwright

from tests.waiting import ask_until

CHROMIUM = shutil.which("chromium") or ""
needs_chromium = pytest.mark.skipif(
    not CHROMIUM, reason="no chromium on this machine (Debian: apt-get install chromium)"
)
DEADLINE_S = 60.0
POLL_S = 0.05

# Tasks that keep the page from drawing, and the time between two frames.
WATCH = """
window.longest = {task: 0, frame: 0};
new PerformanceObserver(found => {
  for (const one of found.getEntries())
    window.longest.task = Math.max(window.longest.task, one.duration);
}).observe({entryTypes: ["longtask"]});
let last = performance.now();
const tick = now => {
  window.longest.frame = Math.max(window.longest.frame, now - last);
  last = now;
  requestAnimationFrame(tick);
};
requestAnimationFrame(tick);
"""


@dataclass(slots=True)
class Tab:
    """A page, and what it has complained of."""

    page: Page
    complaints: list[str] = field(default_factory=list)

    async def text(self, selector: str) -> str:
        """What an element says."""
        return (await self.page.locator(selector).first.inner_text()).strip()

    async def until(self, condition: str) -> None:
        """Wait for a condition, in JavaScript: asked from here, the page's policy forbids eval."""
        await ask_until(lambda: self.page.evaluate(condition), deadline_s=DEADLINE_S, poll_s=POLL_S)

    async def evaluate(self, code: str) -> Any:
        """What some JavaScript finds."""
        return await self.page.evaluate(code)


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """The browser; ends it."""
    async with async_playwright() as driver:
        # As root there is no sandbox; it shows pages of ours only.
        browser = await driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            await browser.close()


@asynccontextmanager
async def tab(
    browser: Browser,
    url: str,
    *,
    width: int = 1200,
    height: int = 900,
    scheme: Literal["light", "dark"] = "light",
) -> AsyncIterator[Tab]:
    """A fresh profile with one page; it counts what is written to the console."""
    context = await browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme
    )
    try:
        page = await context.new_page()
        shown = Tab(page)
        page.on("pageerror", lambda error: shown.complaints.append(str(error)))
        page.on(
            "console",
            lambda said: (
                shown.complaints.append(said.text) if said.type in ("error", "warning") else None
            ),
        )
        await page.add_init_script(WATCH)
        await page.goto(url)
        yield shown
    finally:
        await context.close()
