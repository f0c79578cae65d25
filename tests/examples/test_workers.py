"""What the proxies of `examples/vllm` share, without their processes."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import httpx
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples" / "vllm"
VLLM_CLOSES_S = 5.0
"""The age of an idle connection at which vLLM's HTTP server closes it, by default."""


def test_no_connection_is_kept_until_vllm_closes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: no request leaves on a connection that a healthy engine closes at that moment."""
    limits: list[httpx.Limits] = []

    class Client(httpx.AsyncClient):
        """A client that notes its limits."""

        def __init__(self, **more: Any) -> None:
            limits.append(more.get("limits") or httpx.Limits())
            super().__init__(**more)

    monkeypatch.setattr(httpx, "AsyncClient", Client)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    routing, disagg = (importlib.import_module(f"{name}_proxy") for name in ("routing", "disagg"))
    routing.make_app(routing.Options({"a": "http://a"}))
    disagg.make_app(["http://a"], ["http://b"])
    assert len(limits) == 4, "one before the engines, one before KVBM, and one each of two kinds"
    assert all((one.keepalive_expiry or VLLM_CLOSES_S) <= VLLM_CLOSES_S / 2 for one in limits)
