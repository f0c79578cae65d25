"""Hashes of SGLang's events: its own functions, stood in for where another release may differ."""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import sys
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.connectors.sglang.test_backend import BACKEND, NewStorage, install

EVENTS, KEYS, UTILS = (
    f"sglang.srt.{name}"
    for name in ("disaggregation.kv_events", "mem_cache.radix_cache", "mem_cache.utils")
)
CONFIG = json.dumps({"publisher": "zmq", "endpoint": "tcp://*:5557", "format": "dynamo"})


@dataclass
class RadixKey:
    """What a page holds."""

    token_ids: array[int]
    extra_key: str | None = None
    cache_salt: str | None = None


def hashes_of(node: Any, page_size: int) -> list[str]:
    """The salted hash of one page, as 0.5.23 has it."""
    key = node.key
    salt = f"sglang-cache-salt-v1\0{key.cache_salt}".encode()
    seed = b"" if key.cache_salt is None else hashlib.sha256(salt).digest()
    tokens = b"".join(token.to_bytes(4, "little") for token in key.token_ids[:page_size])
    return [hashlib.sha256(seed + tokens).hexdigest()]


def namespace_seed(*, extra_key: str | None, cache_salt: str | None) -> bytes | None:
    """The seed of a namespace, as 0.5.23 has it."""
    parts = [None if part is None else part.encode() for part in (extra_key, cache_salt)]
    if parts == [None, None]:
        return None
    said = (
        b"\0" if part is None else b"\1" + len(part).to_bytes(8, "little") + part for part in parts
    )
    return hashlib.sha256(b"sglang-kv-event-namespace-v1" + b"".join(said)).digest()


def namespaced(block_hash: int, *, namespace_seed: bytes | None) -> int:
    """The hash in a namespace, as 0.5.23 has it."""
    if namespace_seed is None:
        return block_hash
    content = namespace_seed + block_hash.to_bytes(8, "big", signed=True)
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big", signed=True)


def signed(text: str) -> int:
    """The first 64 bits of a digest."""
    return int.from_bytes(bytes.fromhex(text)[:8], "big", signed=True)


FUNCTIONS: dict[str, dict[str, Any]] = {
    EVENTS: {"kv_event_namespace_seed": namespace_seed, "namespaced_block_hash": namespaced},
    KEYS: {"RadixKey": RadixKey},
    UTILS: {"compute_node_event_hash_values": hashes_of, "hash_str_to_int64": signed},
}


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The back end, beside an SGLang that has the functions of 0.5.23."""
    install(monkeypatch, NewStorage, "0.5.23")
    monkeypatch.setitem(sys.modules, "sglang.srt.disaggregation", ModuleType("disaggregation"))
    for name, functions in FUNCTIONS.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**functions))
    yield importlib.import_module(BACKEND)
    sys.modules.pop(BACKEND)


def shown(backend: Any, **arguments: Any) -> bool:
    """Return whether extra keys are looked for in events."""
    stream = backend.events_of(SimpleNamespace(kv_events_config=CONFIG, **arguments), 0)
    assert stream.endpoint == "tcp://127.0.0.1:5557"
    return bool(stream.shows_extra_keys)


def test_keys_are_looked_for_where_the_hashes_are_known(
    backend: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert shown(backend)
    assert not caplog.text


@pytest.mark.parametrize(
    ("module", "change"),
    [
        (UTILS, {"compute_node_event_hash_values": lambda *given: ["00" * 32]}),
        (UTILS, {"compute_node_event_hash_values": None}),
        (EVENTS, {"namespaced_block_hash": lambda block_hash, namespace_seed: block_hash}),
        (EVENTS, {"namespaced_block_hash": lambda block_hash, namespace_seed: 7}),
        (KEYS, {"RadixKey": RadixKey.__eq__}),
    ],
)
def test_no_key_is_looked_for_in_other_hashes(
    backend: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, module: str,
    change: dict[str, Any],
) -> None:  # fmt: skip
    """Goal: with a later SGLang, routers go on to find its prompts."""
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(**FUNCTIONS[module] | change))
    assert not shown(backend)
    assert "blocks of requests with an extra_key look like those without" in caplog.text
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_a_module_that_is_missing_costs_only_the_keys(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, KEYS, None)
    assert not shown(backend)


def test_keys_that_the_engine_gives_all_requests_are_not_looked_for(
    backend: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert not shown(backend, elastic_ep_backend="mooncake")
    assert "elastic_ep_backend gives one to every request" in caplog.text
    assert shown(backend, elastic_ep_backend=None)
