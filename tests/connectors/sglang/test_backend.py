"""The class that SGLang loads, where its package is another release than we test with."""

from __future__ import annotations

import importlib
import logging
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from kvbm_connectors.sglang import pushes

from tests.connectors.sglang.pool import Config, Pool, keys_of

BACKEND = "kvbm_connectors.sglang.backend"
BASE = "sglang.srt.mem_cache.hicache_storage"
CONTEXT = "sglang.srt.runtime_context"


class OldStorage:
    """HiCacheStorage as 0.5.22 has it: no call says that all host pools are registered."""

    def register_mem_pool_host(self, mem_pool_host: object) -> None:
        self.mem_pool_host = mem_pool_host


class NewStorage(OldStorage):
    """HiCacheStorage as 0.5.23 has it."""

    def on_host_pools_registered(self) -> None:
        """Do nothing."""


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


def test_an_engine_whose_pushes_are_not_seen_forgets_with_each_flush(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A later SGLang may have its model runner elsewhere, or name its methods anew."""
    install(monkeypatch, NewStorage, "0.5.23")
    backend = importlib.import_module(BACKEND)
    for module in (None, SimpleNamespace(WeightUpdater=type("WeightUpdater", (), {}))):
        if module is not None:
            monkeypatch.setitem(sys.modules, pushes.MODULE, module)
        extra = {"interface_v1": 1, "runtime_dir": str(tmp_path), "state_dir": str(tmp_path)}
        storage = backend.KvbmHiCacheStorage(Config(extra_config=extra))
        assert "each flush of its caches counts as a push" in caplog.text
        caplog.clear()
        storage.close()
    sys.modules.pop(BACKEND)


def test_calls_that_write_weights_are_counted_before_and_after() -> None:
    """Also one that fails, and once however often a storage is attached."""
    seen: list[int] = []

    def write(self: object, fails: bool = False) -> int:
        seen.append(watched.count)
        if fails:
            raise ValueError("no such weights")
        return 7

    owner = type("WeightUpdater", (), dict.fromkeys(pushes.METHODS, write))
    watched = pushes.Pushes()
    for _ in range(2):
        watched.watch(owner)
    assert owner().update_weights_from_tensor() == 7
    with pytest.raises(ValueError, match="no such weights"):
        owner().end_weight_update(fails=True)
    assert (seen, watched.count) == ([1, 3], 4)


def test_an_engine_of_a_trainer_says_what_a_flush_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """1. The marks are named. 2. With latent attention on two hosts no page is loaded afterwards.
    3. What SGLang notes of its weights is read where it notes it."""
    caplog.set_level(logging.INFO, BACKEND)
    install(monkeypatch, NewStorage, "0.5.23")
    arguments = SimpleNamespace(
        enable_memory_saver=True, nnodes=2, hicache_storage_backend="dynamic"
    )
    noted = [("start", {"ep_size": 1}), ("update", {"weight_version": "7"})]
    context = SimpleNamespace(
        get_server_args=lambda: arguments,
        get_context=lambda: SimpleNamespace(overrides_log=lambda: noted),
        get_serving=lambda: SimpleNamespace(weight_version="7"),
        get_model=lambda: SimpleNamespace(model_path="/weights"),
    )
    monkeypatch.setitem(sys.modules, CONTEXT, context)
    backend = importlib.import_module(BACKEND)
    extra = {"interface_v1": 1, "runtime_dir": str(tmp_path), "state_dir": str(tmp_path)}
    storage = backend.KvbmHiCacheStorage(Config(extra_config=extra, is_mla_model=True))
    assert "marks of pushed weights are ['enable_memory_saver']" in caplog.text
    assert "ranks on other hosts share pages until" in caplog.text
    assert (backend.serving(), backend.updates()) == (("7", "/weights"), 1)
    monkeypatch.delitem(sys.modules, CONTEXT)
    assert (backend.serving(), backend.updates()) == (None, 0)
    storage.close()
    sys.modules.pop(BACKEND)
