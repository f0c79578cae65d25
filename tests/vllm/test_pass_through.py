"""An engine that cannot be cached: it serves, and its operators see why."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from kvbm_cli.admin_client import token_of

from tests.vllm.harness import LiveStack, live_stack, prompt, wait_for
from tests.vllm.server import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

REASON = "prefix caching is off"


def asked(stack: LiveStack, path: str) -> str:
    """What the metrics service answers."""
    url = f"http://127.0.0.1:{stack.settings.metrics_port}{path}"
    token = token_of(stack.settings, asks_here=True)
    request = urllib.request.Request(url, headers={"authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=10) as reply:
        return bytes(reply.read()).decode()


def passing(stack: LiveStack) -> list[str]:
    """The lines of the live page."""
    status: dict[str, Any] = json.loads(asked(stack, "/v1/status"))
    return list(status["passing_through"])


def test_why_an_engine_is_not_cached_is_seen(model: str, log_dir: Path) -> None:
    """Goal: vLLM's metrics, KVBM's and the live page name the engine and the reason.

    1. The engine answers. 2. Its reason is a gauge of its own, and of the consolidator. 3. It is
    in the status, which the live page shows, and beside the workers. 4. It ends, and is gone.
    """
    with live_stack({"cpu_cache_gb": 0.01}) as stack:
        server = ServerProcess(
            model, stack.settings, log=log_dir / "passing.log",
            arguments=["--no-enable-prefix-caching"],
        )  # fmt: skip
        try:
            server.wait_started()
            answer, _ = server.complete(prompt(1, 100))
            assert len(answer.tokens) == 8
            wait_for(lambda: passing(stack), "nothing passes through", details=server.tail)
            [line] = passing(stack)
            assert line.endswith(f"computes without a cache: {REASON}")
            [worker] = json.loads(asked(stack, "/v1/workers"))
            assert (worker["passes_through"], worker["host_tier"]) == (REASON, "")
            assert stack.figures("consolidator")["passing_through"] == 1
            wait_for(lambda: "kvbm_consolidator_passing_through{" in asked(stack, "/metrics"), "")
            gauges = {
                name: value
                for name, value in server.metrics().items()
                if name.startswith("vllm:kvbm_connector_passes_through{")
            }
            assert [(f'reason="{REASON}"' in name, one) for name, one in gauges.items()] == [
                (True, 1.0)
            ]
        finally:
            server.stop()
        wait_for(lambda: not passing(stack), "an engine that has ended is listed")
