"""The live page in a headless Chromium, over the API and services that say what the test wants.

`tests/integration/test_live_page.py` has the page over a whole stack.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from kvbm_common.access.http_access import Access
from kvbm_common.identity import Namespace
from kvbm_common.nats.bus import Bus, VerbHandler
from kvbm_common.registry.nats_entry import NatsRegistration
from kvbm_common.registry.nats_kv import NatsRegistry
from kvbm_common.runtime.metrics import Metrics
from kvbm_common.wire.explain import (
    ExplainListReply,
    ExplainListRequest,
    ExplainReply,
    ExplainRequest,
    Explanation,
    Segment,
)
from kvbm_common.wire.metrics import MetricsSnapshot
from kvbm_common.wire.verbs import StatsReply
from kvbm_metrics.shell.api import create_app
from kvbm_metrics.shell.fleet import Fleet
from kvbm_metrics.shell.http_server import HttpServer
from kvbm_metrics.shell.state import Api
from playwright.async_api import Browser

from tests.browser import Tab, chromium, needs_chromium, tab
from tests.services.metrics.samples import WORKER, stats, tier_stats

pytestmark = [pytest.mark.slow, needs_chromium, pytest.mark.timeout(180)]

HASH = "ab" * 16
NAMESPACE = Namespace(model="meta-llama/Llama-3.1-70B-Instruct", block_tokens=16)
KINDS = ("index", "host-tier", "disk-tier")
OF_BOTH = "Math.abs(parseFloat(document.querySelector('#hits').textContent) - 62.5) < 5"
"""The hit rate of both hosts: found are 4 and 1 of 4 each, counted at moments that differ a bit."""
MISS = Explanation(
    request="", engine="engine-a", ts_ms=0, blocks=5, hit_blocks=2, reason="evicted",
    segments=[
        Segment(blocks=2, tier="host", hash="cd" * 16),
        Segment(blocks=3, tier="disk", reason="evicted", hash=HASH, policy="lru"),
    ],
)  # fmt: skip


@dataclass
class Services:
    """Services of two hosts that answer `stats`; host `a` finds all blocks, host `b` one of four.

    Each has a registry of its own, as a process has: it can fall silent alone.
    """

    bus: Bus
    engine: str = "engine-{}"
    request: str = "chat/7 of {}"
    namespace: Namespace = NAMESPACE
    begun_s: float = field(default_factory=time.monotonic)
    registries: list[NatsRegistry] = field(default_factory=list)
    entries: dict[tuple[str, str], NatsRegistration] = field(default_factory=dict)

    def says(self, kind: str, host: str) -> StatsReply:
        """Return what one of them has counted until now."""
        if kind == "index":
            return stats(kind, host=host)
        times = 20 * (time.monotonic() - self.begun_s)
        found = 4 if host == "a" else 1
        worker = msgspec.structs.replace(
            WORKER, engine=self.engine.format(host), block_bytes=2_097_152,
            namespace=self.namespace,
        )  # fmt: skip
        figures = {
            "lookups": times, "matched_tokens": 16 * found * times,
            "lookup_blocks.host": found * times, "lookup_blocks.miss": (4 - found) * times,
            "offload_blocks_d2h": 61 * times, "bytes.d2h": 1e8 * times, "bytes.h2d": 3e9 * times,
            "onboard_blocks_h2d": 777 * times,
        }  # fmt: skip
        return tier_stats(
            kind, used=3, total=4, host=host, figures=figures, policy="lru",
            workers=[worker] if kind == "host-tier" else [],
        )  # fmt: skip

    async def add(self, kind: str, host: str) -> None:
        """Start one of them."""

        async def answer_stats(_payload: bytes) -> bytes:
            return msgspec.json.encode(self.says(kind, host))

        async def answer_metrics(_payload: bytes) -> bytes:
            return msgspec.json.encode(MetricsSnapshot(kind, host, "0", 1, []))

        async def explain_list(payload: bytes) -> bytes:
            engine, now_ms = self.engine.format(host), time.time_ns() // 1_000_000
            asked = msgspec.json.decode(payload, type=ExplainListRequest)
            said = [
                msgspec.structs.replace(
                    MISS, ts_ms=now_ms, engine=engine, request=self.request.format(host)
                )
            ]
            mine = said if asked.engine in ("", engine) else []
            return msgspec.json.encode(ExplainListReply(requests=mine))

        async def explain(payload: bytes) -> bytes:
            asked = msgspec.json.decode(payload, type=ExplainRequest).request
            said = [msgspec.structs.replace(MISS, request=asked)]
            mine = said if asked.endswith(host) else []
            return msgspec.json.encode(ExplainReply(requests=mine, kept=1))

        verbs: dict[str, VerbHandler] = {"stats": answer_stats, "metrics": answer_metrics}
        if kind == "host-tier":
            verbs |= {"explain_list": explain_list, "explain": explain}
        await self.bus.add_verbs(kind, "0", host, verbs)
        registry = NatsRegistry(self.bus, ttl_s=1.0)
        self.registries.append(registry)
        self.entries[kind, host] = await registry.register(kind, host, "0")


@pytest.fixture
async def services(bus: Bus) -> AsyncIterator[Services]:
    """An index and a disk tier on host `a`, a host tier on `a` and on `b`."""
    found = Services(bus)
    for kind, host in [("index", "a"), ("host-tier", "a"), ("host-tier", "b"), ("disk-tier", "a")]:
        await found.add(kind, host)
    yield found
    for registry in found.registries:
        await registry.close()


@pytest.fixture
async def url(bus: Bus, services: Services) -> AsyncIterator[str]:
    """Where the page is; a second of its fleet's clock is a tenth of a real one."""
    registry, counters = NatsRegistry(bus, ttl_s=5.0), Metrics()
    fleet = Fleet(bus, registry, counters, cache_s=2.0, clock_s=lambda: 10 * time.monotonic())
    api = Api(fleet=fleet, expected=KINDS, version="1", access=Access(without_token="admin"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = HttpServer(create_app(api, counters), counters)
        tasks = [
            asyncio.create_task(server.serve(sockets=[listener])),
            asyncio.create_task(fleet.follow()),
        ]
        await server.is_up.wait()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        server.end()
        tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await registry.close()


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    """Of this machine."""
    async with chromium() as started:
        yield started


async def until_figures(shown: Tab, polls: int = 2) -> None:
    """Wait until the page has asked so often."""
    await shown.until(f"Number(document.body.dataset.polls) >= {polls}")


async def cards(shown: Tab) -> list[list[str]]:
    """Return the lines and the class of each card of a service."""
    found: list[list[str]] = await shown.evaluate(
        "[...document.querySelectorAll('#cards li')].map(one =>"
        " [...[...one.children].map(line => line.textContent), one.className])"
    )
    return found


async def choose(shown: Tab, host: str) -> None:
    """Choose a host, and wait for its figures."""
    await shown.page.select_option("#host", host)
    await shown.until(f"document.body.dataset.host === '{host}'")


async def test_a_dead_service_turns_red_where_it_stands(
    services: Services, url: str, browser: Browser
) -> None:
    """1. Four cards. 2. The host tier of `a` falls silent: its card, and no other, says since when.

    3. The disk tier leaves by itself: that is no alarm. 4. What was lost is back.
    """
    async with tab(browser, url) as shown:
        await until_figures(shown)
        names = [one[:2] for one in await cards(shown)]
        assert names == [
            ["disk-tier 0", "a"], ["host-tier 0", "a"], ["host-tier 0", "b"], ["index 0", "a"],
        ]  # fmt: skip
        assert {one[3] for one in await cards(shown)} == {""}
        await services.entries["host-tier", "a"].stop()
        await shown.until("document.querySelector('#cards').textContent.includes('lost')")
        await services.entries["disk-tier", "a"].revoke()
        await shown.until("document.querySelector('#cards').textContent.includes('left')")
        found = await cards(shown)
        assert [one[:2] for one in found] == names
        assert [one[3] for one in found] == ["left", "bad", "", ""]
        assert found[1][2].startswith("lost ")
        assert "lost" in await shown.text("#tiers tr:has-text('host 0') td:last-child")
        await services.add("host-tier", "a")
        await shown.until("!document.querySelector('#cards').textContent.includes('lost')")
        assert [one[:2] for one in await cards(shown)] == names


async def test_a_new_tab_has_the_last_hour(url: str, browser: Browser) -> None:
    """1. One hit rate, with its window. 2. The first curves of a second tab have the points that
    the first one's have, and its figures."""
    enough = "Number(document.querySelector('#hits-spark').dataset.points) >= 4"
    async with tab(browser, url) as shown:
        await shown.until(enough)
        assert await shown.evaluate(OF_BOTH)
        note = await shown.text("#hits-note")
        assert re.fullmatch(r"of the blocks asked for over the last \d\d s", note), note
    async with tab(browser, url) as other:
        await until_figures(other, 1)
        await other.until("document.querySelector('#hits-spark').dataset.points")
        assert await other.evaluate(enough)
        assert "Curves: the last" in await other.text("#curves-note")


async def test_links_from_a_miss_and_a_worker(url: str, browser: Browser) -> None:
    """1. From a miss to its explanation. 2. From there to a block's story, and back.

    3. From a worker to its lookups, and from one to its explanation. 4. The address can be sent.
    """
    async with tab(browser, url) as shown:
        await until_figures(shown)
        await shown.page.locator("#misses button.go").first.click()
        await shown.until(
            "document.querySelector('#story-body').textContent.includes('3 blocks missed: evicted')"
        )
        assert (await shown.text("#story-name")).startswith("chat/7 of ")
        await shown.page.locator(f"#story button.block >> text={HASH}").click()
        await shown.until(f"document.querySelector('#story-name').textContent === '{HASH}'")
        assert await shown.text("#story-title") == "Block"
        await shown.page.keyboard.press("Escape")
        await shown.until("!document.querySelector('#story').open")
        await shown.page.locator("#workers button.go >> text=engine-b").click()
        await shown.until("document.querySelector('#story-body button.go')")
        assert await shown.text("#story-name") == "engine-b"
        await shown.page.locator("#story-body button.go").first.click()
        await shown.until("document.querySelector('#story-body button.block')")
        sent = shown.page.url
    async with tab(browser, sent) as other:
        await other.until("document.querySelector('#story-body button.block')")
        assert await other.text("#story-name") == "chat/7 of b"


async def test_a_host_is_chosen(url: str, browser: Browser) -> None:
    """1. All hosts. 2. One: figures, cards, tiers, workers and misses are its own. 3. The address
    has it. 4. All again."""
    async with tab(browser, url) as shown:
        await until_figures(shown)
        assert await shown.evaluate("[...host.options].map(one => one.value)") == ["", "a", "b"]
        await shown.until(OF_BOTH)
        await choose(shown, "b")
        await shown.until("document.querySelector('#hits').textContent === '25 %'")
        assert [one[:2] for one in await cards(shown)] == [["host-tier 0", "b"]]
        assert await shown.evaluate("document.querySelectorAll('#tiers tbody tr').length") == 1
        workers = await shown.text("#workers tbody")
        assert ("engine-a" in workers, "engine-b" in workers) == (False, True)
        await shown.until("document.querySelectorAll('#misses tbody tr').length === 1")
        await shown.until("Number(document.querySelector('#hits-spark').dataset.points) >= 1")
        assert shown.page.url == f"{url}?host=b"
        await choose(shown, "")
        await shown.until("document.querySelectorAll('#cards li').length === 4")
        assert shown.page.url == url
    async with tab(browser, f"{url}?host=a") as other:
        await other.until("document.querySelector('#hits').textContent === '100 %'")
        assert await other.evaluate("host.value") == "a"


BROKEN_WORDS = """() => {
  const broken = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walk.nextNode(); node; node = walk.nextNode()) {
    if (!node.parentElement.checkVisibility() || node.parentElement.closest("script, option"))
      continue;
    for (const word of node.textContent.matchAll(/[^\\s\\-\\/·]+/g)) {
      const range = document.createRange();
      range.setStart(node, word.index);
      range.setEnd(node, word.index + word[0].length);
      const lines = new Set([...range.getClientRects()].map(one => Math.round(one.top)));
      if (lines.size > 1) broken.push(word[0]);
    }
  }
  return broken;
}"""
OUTSIDE = """() => [...document.querySelectorAll("th, td, h2, h3, p, .chips li, .legend li")]
  .filter(node => node.checkVisibility() && !node.closest(".hidden"))
  .filter(node => !node.matches("td.long")
    && node.scrollWidth > node.clientWidth + 1 && node.clientWidth > 1
    || node.getBoundingClientRect().right > document.documentElement.clientWidth)
  .map(node => node.outerHTML.slice(0, 120))"""
CUT = """() => [...document.querySelectorAll("td.long")]
  .filter(node => node.checkVisibility() && node.scrollWidth > node.clientWidth + 1)
  .map(node => [node.title, node.textContent, getComputedStyle(node).textOverflow])"""
SHOTS = os.environ.get("LIVE_PAGE_SHOTS")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 768, 1200])
async def test_no_word_is_broken(
    services: Services, url: str, browser: Browser, tmp_path: Path, width: int,
    scheme: Literal["light", "dark"],
) -> None:  # fmt: skip
    """Goal: on a phone, a tablet and a desk each word stays in one line and within the page.

    The pictures are of the whole page; LIVE_PAGE_SHOTS names a folder that keeps them.
    """
    async with tab(browser, url, width=width, height=844, scheme=scheme) as shown:
        await until_figures(shown, 3)
        await services.entries["host-tier", "b"].stop()
        await shown.until("document.querySelector('#cards').textContent.includes('lost')")
        picture = Path(SHOTS or tmp_path) / f"live-{width}-{scheme}.png"
        await shown.page.screenshot(path=picture, full_page=True)
        assert width_of(picture) == width
        assert await shown.evaluate("document.documentElement.scrollWidth") <= width
        assert await shown.evaluate(BROKEN_WORDS) == []
        assert await shown.evaluate(OUTSIDE) == []
        # The lookups of a host tier are gone with it.
        await shown.until("document.querySelectorAll('#misses tbody tr').length === 1")
        await shown.page.locator("#misses button.go").first.click()
        await shown.until("document.querySelector('#story-body button.block')")
        assert await shown.evaluate(BROKEN_WORDS) == []


@pytest.mark.parametrize("width", [390, 768, 1200])
async def test_a_long_name_pushes_no_column_out(
    services: Services, url: str, browser: Browser, width: int
) -> None:
    """Goal: what a name is next to stays on the page. A name that is cut is whole in its title."""
    services.engine = "6f1c2a9e_8d7b_4c55_9a55_" + "0a" * 16 + "_{}"
    services.request = "chatcmpl_" + "0a" * 32 + "_{}"
    services.namespace = Namespace(model="/models/" + "quantised_" * 8, block_tokens=16)
    host = "ip_10_0_23_45_eu_central_1_compute_internal_" + "0" * 16
    await services.add("disk-tier", host)
    async with tab(browser, url, width=width, height=844) as shown:
        await until_figures(shown, 3)
        await shown.until("document.querySelectorAll('#misses tbody tr').length === 2")
        await shown.until("document.querySelectorAll('#tiers tbody tr').length === 4")
        assert await shown.evaluate("document.documentElement.scrollWidth") <= width
        assert await shown.evaluate(OUTSIDE) == []
        cut = await shown.evaluate(CUT)
        assert cut
        assert [title for title, text, how in cut if (title, how) != (text, "ellipsis")] == []


def width_of(picture: Path) -> int:
    """Return the width that a PNG names in its head."""
    head: Any = picture.read_bytes()[:24]
    assert head[12:16] == b"IHDR"
    return int.from_bytes(head[16:20])
