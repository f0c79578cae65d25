"""What `make bench-sglang` does in a rank's process: set, exists and get of the same pages."""

from __future__ import annotations

import time
from typing import Any

import torch

from tests.sglang.conversation import Command

BATCH = 128
"""As many pages as SGLang ever gives to one call."""


def measure(backend: Any, pool: Any, command: Command) -> dict[str, float]:
    """One round: GB/s of set and get, thousand keys per second of exists.

    `file` is called as SGLang calls it: by flat pages, which it copies from and to the pool.
    """
    count, size = len(command.keys), pool.page_size
    copies = command.backend == "file"
    seconds = {"set": 0.0, "exists": 0.0, "get": 0.0}
    moved = 0
    for start in range(0, count, BATCH):
        keys = command.keys[start : start + BATCH]
        slots = torch.arange(len(keys) * size)
        moved += len(keys) * _page_bytes(pool)
        seconds["set"] += _timed(_set_file if copies else _set, backend, pool, keys, slots)
    for start in range(0, count, BATCH):
        keys = command.keys[start : start + BATCH]
        slots = torch.arange(len(keys) * size)
        seconds["exists"] += _timed(_exists, backend, pool, keys, slots)
        seconds["get"] += _timed(_get_file if copies else _get, backend, pool, keys, slots)
    return {
        "set": moved / seconds["set"] / 1e9,
        "get": moved / seconds["get"] / 1e9,
        "exists": count / seconds["exists"] / 1e3,
    }


def ask(backend: Any, command: Command) -> float:
    """Thousand keys per second of exists alone."""
    started = time.perf_counter()
    for start in range(0, len(command.keys), BATCH):
        keys = command.keys[start : start + BATCH]
        assert backend.batch_exists(keys) == len(keys)
    return len(command.keys) / (time.perf_counter() - started) / 1e3


def _page_bytes(pool: Any) -> int:
    page = pool.get_dummy_flat_data_page()
    return int(page.numel() * page.element_size())


def _timed(call: Any, *arguments: Any) -> float:
    started = time.perf_counter()
    assert call(*arguments)
    return time.perf_counter() - started


def _set(backend: Any, pool: Any, keys: list[str], slots: Any) -> bool:
    return all(backend.batch_set_v1(keys, slots))


def _get(backend: Any, pool: Any, keys: list[str], slots: Any) -> bool:
    return all(backend.batch_get_v1(keys, slots))


def _exists(backend: Any, pool: Any, keys: list[str], slots: Any) -> bool:
    return bool(backend.batch_exists(keys) == len(keys))


def _set_file(backend: Any, pool: Any, keys: list[str], slots: Any) -> bool:
    """HiCacheController._generic_page_set."""
    size = pool.page_size
    return bool(
        backend.batch_set(keys, [pool.get_data_page(slots[i * size]) for i in range(len(keys))])
    )


def _get_file(backend: Any, pool: Any, keys: list[str], slots: Any) -> bool:
    """HiCacheController._generic_page_get."""
    targets = [pool.get_dummy_flat_data_page() for _ in keys]
    pages = backend.batch_get(keys, targets)
    for i, page in enumerate(pages):
        if page is None:
            return False
        pool.set_from_flat_data_page(slots[i * pool.page_size], page)
    return True
