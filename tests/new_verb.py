"""A program for `test_recipes.py`: start services that have `touch_all`; print where it is seen.

It runs in a process of its own, whose common library is the copy that has the verb.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import urllib.request
from typing import Any

from kvbm_cli.stack import Stack
from kvbm_common.nats.bus import Bus
from kvbm_common.wire.verbs import verb_subject

from release import asyncapi, wire_manual

VERB = "touch_all"


async def seen_in_a_stack() -> dict[str, Any]:
    """Ask for 3 touches on NATS, 4 over HTTP and 5 by the command."""
    services = ("host-tier", "metrics")
    async with Stack.private(
        {"cpu_cache_gb": 0.001, "admin_open": "admin"}, services=services
    ) as stack:
        url = stack.services["metrics"].description
        bus = await Bus.connect(stack.admin, "test")
        subject = verb_subject("host-tier", VERB, host=stack.settings.host, instance="0")
        reply = await bus.request(subject, b'{"times": 3}', deadline_s=5.0)
        await bus.close()
        return {
            "nats": json.loads(reply),
            "http": await asyncio.to_thread(post, f"{url}/v1/{VERB}", {"tier": "host", "times": 4}),
            "command": await asyncio.to_thread(command, "touchall", "5", "--tier", "host", url=url),
            "openapi": [path for path in (await asyncio.to_thread(openapi, url)) if VERB in path],
        }


def post(url: str, body: object) -> Any:
    """Return the outcomes of a change."""
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["outcomes"]


def command(*arguments: str, url: str) -> Any:
    """Return the outcomes that a command prints, or why there are none."""
    line = [sys.executable, "-m", "kvbm_cli.main", *arguments, "--json", "--url", url]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    return json.loads(done.stdout)["outcomes"] if done.stdout else done.stderr


def openapi(url: str) -> list[str]:
    """Return the paths that the document describes."""
    with urllib.request.urlopen(f"{url}/openapi.json") as answer:
        return list(json.load(answer)["paths"])


if __name__ == "__main__":
    seen = asyncio.run(seen_in_a_stack())
    seen["asyncapi"] = sorted(one for one in asyncapi.document()["operations"] if VERB in one)
    seen["manual"] = [line for line in wire_manual.table().splitlines() if VERB in line]
    print(json.dumps(seen))
