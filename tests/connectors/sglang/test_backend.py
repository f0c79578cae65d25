"""The class that SGLang loads, where its package is another release than we test with."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.connectors.sglang.pool import Config, Pool, keys_of

BACKEND = "kvbm_connectors.sglang.backend"
BASE = "sglang.srt.mem_cache.hicache_storage"


class OldStorage:
    """HiCacheStorage as 0.5.22 has it: no call says that all host pools are registered."""

    def register_mem_pool_host(self, mem_pool_host: object) -> None:
        self.mem_pool_host = mem_pool_host


def install(monkeypatch: pytest.MonkeyPatch, base: type, version: str) -> None:
    """Make a package `sglang` importable that has this base class."""
    names = BASE.split(".")
    for end in range(1, len(names) + 1):
        monkeypatch.setitem(sys.modules, name := ".".join(names[:end]), ModuleType(name))
    monkeypatch.setattr(sys.modules["sglang"], "__version__", version, raising=False)
    for name, value in (("HiCacheStorage", base), ("PoolTransferResult", object)):
        monkeypatch.setattr(sys.modules[BASE], name, value, raising=False)
    monkeypatch.delitem(sys.modules, BACKEND, raising=False)


def test_an_older_release_passes_through_and_the_log_names_the_one_needed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It would register its pools, and never start the storage."""
    install(monkeypatch, OldStorage, "0.5.22")
    backend = importlib.import_module(BACKEND)
    extra = {"interface_v1": 1, "runtime_dir": str(tmp_path), "state_dir": str(tmp_path)}
    storage = backend.KvbmHiCacheStorage(Config(extra_config=extra))
    assert "KVBM passes through: SGLang 0.5.22 is too old: 0.5.23 or later" in caplog.text
    pool = Pool()
    storage.register_mem_pool_host(pool)
    keys = keys_of("old", 2)
    assert storage.batch_set_v1(keys, pool.indices([0, 1])) == [False, False]
    assert storage.batch_exists(keys) == 0
    assert storage.storage.all_counts() == {"refused.set": 1, "refused.exists": 1}
    storage.close()
    sys.modules.pop(BACKEND)
