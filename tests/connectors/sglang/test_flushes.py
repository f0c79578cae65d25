"""Which engines forget with a flush, how one is seen, and that ranks which share pages agree."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvbm_common.errors import ConfigError
from kvbm_connectors.sglang import flushes as flushes_module
from kvbm_connectors.sglang.flushes import (
    EngineGeneration,
    FlushWatch,
    flushed_path,
    marks_of_pushed_weights,
)
from kvbm_connectors.sglang.options import Options
from kvbm_connectors.sglang.pages import names_of
from kvbm_connectors.sglang.storage import Storage

from tests.connectors.sglang.conftest import Attach
from tests.connectors.sglang.pool import Config, Pool, keys_of
from tests.waiting import wait_for


class HostPool(Pool):
    """One whose tables SGLang makes anew when it flushes."""

    def __init__(self, *, mla: bool = False) -> None:
        super().__init__(mla=mla)
        self.clear()

    def clear(self) -> None:
        self.slot_used, self.mem_state = [False] * self.size, [0] * self.size


def path_of(directory: Path) -> Path:
    return flushed_path(directory, bytes(16), bytes(8), 0)


@pytest.mark.parametrize(
    "argument",
    [
        {"enable_memory_saver": True},
        {"rl_on_policy_target": "fsdp"},
        {"custom_weight_loader": ["rl.load"]},
        {"checkpoint_engine_wait_weights_before_ready": True},
        {"load_format": "dummy"},
        {"load_format": SimpleNamespace(value="flash_rl")},
        {"enable_return_routed_experts": True},
    ],
    ids=str,
)
def test_engines_of_trainers_have_marks(argument: dict[str, Any]) -> None:
    assert marks_of_pushed_weights(SimpleNamespace(**argument)) == list(argument)


def test_other_engines_have_none() -> None:
    arguments = SimpleNamespace(
        load_format="auto", enable_memory_saver=False, custom_weight_loader=[]
    )
    assert marks_of_pushed_weights(arguments) == marks_of_pushed_weights(None) == []


def test_an_operator_may_choose_for_any_engine() -> None:
    def is_due(choice: str, pushed: bool) -> bool:
        pool = HostPool()
        watch = FlushWatch(choice, is_pushed=pushed)
        watch.add(pool)
        pool.clear()
        return watch.is_due()

    chosen = {
        name: [is_due(name, pushed) for pushed in (False, True)]
        for name in ("auto", "forget", "keep")
    }
    assert chosen == {"auto": [False, True], "forget": [True, True], "keep": [False, False]}
    extra = {"interface_v1": 1}
    assert Options.read(extra, {}).plain_reset == "auto"
    assert Options.read(extra | {"plain_reset": "keep"}, {}).plain_reset == "keep"
    with pytest.raises(ConfigError, match=r"plain_reset .* accepts auto, forget or keep"):
        Options.read(extra | {"plain_reset": "always"}, {})


def test_a_flush_is_seen_once() -> None:
    """Slots that are taken and given back are none."""
    first, second = HostPool(), HostPool()
    watch = FlushWatch("forget")
    watch.add(first)
    watch.add(second)
    first.slot_used[0] = True
    assert not watch.is_due()
    for pool in (first, second):
        pool.clear()
    assert [watch.is_due(), watch.is_due()] == [True, False]
    second.clear()
    assert watch.is_due()
    assert watch.counts == {"flushes_forgotten": 2}


class ComputingPool(Pool):
    """One that makes its table when it is asked for."""

    @property
    def slot_used(self) -> list[bool]:
        return [False] * self.size


def test_a_pool_without_tables_is_known_to_show_nothing() -> None:
    watch = FlushWatch("forget")
    watch.add(Pool())
    watch.add(ComputingPool())
    assert watch.is_blind
    assert not watch.is_due()
    watch.add(HostPool())
    assert not watch.is_blind


def test_weights_that_sglang_notes_are_a_mark() -> None:
    """1. A version: at once, and with each flush from then on. 2. An update whose path was the same
    shows with the next flush. 3. Who keeps, keeps."""
    weights: dict[str, Any] = {"version": "1", "noted": 0}

    def watch_of(choice: str) -> tuple[FlushWatch, HostPool]:
        pool = HostPool()
        watch = FlushWatch(
            choice, serving=lambda: weights["version"], updates=lambda: weights["noted"]
        )
        watch.add(pool)
        return watch, pool

    (watch, pool), (quiet, beside), (keeping, kept) = map(watch_of, ("auto", "auto", "keep"))
    pool.clear()
    assert not watch.is_due()
    weights["version"] = "2"
    assert [watch.is_due(), watch.is_due()] == [True, False]
    pool.clear()
    assert watch.is_due()
    assert quiet.is_due()
    (quiet, beside) = watch_of("auto")
    weights["noted"] = 1
    assert not quiet.is_due()
    beside.clear()
    assert quiet.is_due()
    kept.clear()
    assert [keeping.is_due(), keeping.is_due()] == [False, False]
    assert watch.counts == {"flushes_kept": 1, "flushes_forgotten": 2}


def test_weights_that_are_pushed_are_a_mark() -> None:
    """Also where SGLang notes nothing, and without a flush. Who keeps, keeps."""
    pushed = [0]
    pool = HostPool()
    watch, keeping = (FlushWatch(choice, pushes=lambda: pushed[-1]) for choice in ("auto", "keep"))
    watch.add(pool)
    pool.clear()
    assert not watch.is_due()
    pushed.append(2)
    assert [watch.is_due(), watch.is_due()] == [True, False]
    pool.clear()
    assert watch.is_due()
    assert not keeping.is_due()
    assert watch.counts == {"flushes_kept": 1, "flushes_forgotten": 2}


def test_a_configuration_that_comes_late_is_no_update() -> None:
    known: list[str | None] = [None]
    watch = FlushWatch(serving=lambda: known[-1])
    for version in ("1", None, "1"):
        known.append(version)
        assert not watch.is_due()
    known.append("2")
    assert watch.is_due()


def test_ranks_follow_those_that_store(tmp_path: Path) -> None:
    """1. Nothing is named by before the first flush. 2. Readers find what a writer has begun, and
    begin nothing. 3. With two writers, the last one counts for all."""
    path = path_of(tmp_path)
    writer, sibling = EngineGeneration(path), EngineGeneration(path)
    reader = EngineGeneration(path, is_writer=False)
    everybody = (writer, sibling, reader)
    assert {one.read() for one in everybody} == {b""}
    reader.renew()
    assert {one.read() for one in everybody} == {b""}
    writer.renew()
    (first,) = {one.read() for one in everybody}
    sibling.renew()
    (second,) = {one.read() for one in everybody}
    assert len({b"", first, second}) == 3


def test_a_file_that_is_lost_is_written_again(tmp_path: Path) -> None:
    """The writer's value counts; meanwhile a reader finds nothing that it has stored."""
    path = path_of(tmp_path)
    writer, reader = EngineGeneration(path), EngineGeneration(path, is_writer=False)
    writer.renew()
    value = reader.read()
    path.unlink()
    assert reader.read() == b""
    assert writer.read() == reader.read() == value


def test_a_later_attachment_begins_without_a_value(tmp_path: Path) -> None:
    """Also where the earlier one was not closed."""
    path = path_of(tmp_path)
    EngineGeneration(path).renew()
    again, reader = EngineGeneration(path), EngineGeneration(path, is_writer=False)
    assert again.read() == reader.read() == b""
    again.renew()
    again.close()
    assert list(path.parent.iterdir()) == []


def test_a_file_that_cannot_be_written_hides_what_was_stored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The writer goes on with its own value, not the last one that it could tell; others find
    nothing of it, and the log says so."""
    path = path_of(tmp_path)
    writer, reader = EngineGeneration(path), EngineGeneration(path, is_writer=False)
    writer.renew()
    told = reader.read()
    path.unlink()
    path.parent.rmdir()
    path.parent.write_text("")
    writer.renew()
    assert len({told, writer.read(), reader.read()}) == 3
    assert "other ranks find no page" in caplog.text
    path.parent.unlink()
    wait_for(lambda: writer.read() == reader.read() != told)


@pytest.mark.parametrize("is_unreadable", [True, False])
@pytest.mark.parametrize("flushes", [1, 2])
def test_old_weights_stay_hidden_when_a_directory_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flushes: int, *, is_unreadable: bool
) -> None:
    """1. The directory is a link to itself, or a file, while SGLang flushes. 2. It is back, with
    the old value: the writer does not take it, and writes its own after a while."""
    monkeypatch.setattr(flushes_module, "WRITE_AGAIN_S", 0.0)
    path = path_of(tmp_path)
    writer, reader = EngineGeneration(path), EngineGeneration(path, is_writer=False)
    writer.renew()
    told, aside = writer.read(), path.parent.with_name("aside")
    path.parent.rename(aside)
    if is_unreadable:
        path.parent.symlink_to(path.parent)
    else:
        path.parent.write_text("")
    for _ in range(flushes):
        writer.renew()
    path.parent.unlink()
    aside.rename(path.parent)
    assert path.read_bytes() == told
    assert writer.read() == reader.read() != told


def test_a_file_that_cannot_even_be_read_hides_what_was_stored(tmp_path: Path) -> None:
    """A flush that raises here would leave the pools that come after with the old names.

    1. The directory is a link to itself: the writer begins another value all the same, and its
    calls fail. 2. The directory is back, with the old value: that is not found.
    """
    path = path_of(tmp_path)
    writer = EngineGeneration(path)
    writer.renew()
    told, aside = writer.read(), path.parent.with_name("aside")
    path.parent.rename(aside)
    path.parent.symlink_to(path.parent)
    writer.renew()
    with pytest.raises(OSError, match="symbolic links"):
        writer.read()
    path.parent.unlink()
    aside.rename(path.parent)
    assert path.read_bytes() == told
    assert writer.read() != told


@pytest.mark.slow
def test_a_storage_names_pages_afresh_after_a_flush(
    attach: Attach, caplog: pytest.LogCaptureFixture
) -> None:
    """1. What was stored is not found after a flush, and other engines find it. 2. What is stored
    then is found. 3. An engine that keeps says what it may have to be told."""
    caplog.set_level(logging.INFO, "kvbm_connectors")
    pool, beside = HostPool(), HostPool()
    engine = attach(pool, extra={"plain_reset": "forget"})
    other = attach(beside)
    keys = keys_of("flushed", 4)
    store(engine, pool, keys)
    pool.clear()
    assert engine.exists(keys) == 0
    assert "nothing that was stored so far" in caplog.text
    store(engine, pool, keys)
    assert engine.exists(keys) == other.exists(keys) == 4
    beside.clear()
    assert other.exists(keys) == 4
    assert "set plain_reset to forget" in caplog.text
    assert other.all_counts()["flushes_kept"] == 1


def test_a_page_on_its_way_keeps_the_name_of_its_weights(
    attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: a write-back that began before a flush is not found after it."""
    pool = HostPool()
    engine = attach(pool, extra={"plain_reset": "forget"})
    keys = keys_of("on its way", 2)
    named, go_on = threading.Event(), threading.Event()

    def slow(*given: Any) -> list[Any]:
        names: list[Any] = names_of(*given)
        if threading.current_thread() is writing:
            named.set()
            assert go_on.wait(30)
        return names

    monkeypatch.setattr("kvbm_connectors.sglang.storage.names_of", slow)
    stored: list[bool] = []
    writing = threading.Thread(
        target=lambda: stored.extend(engine.set(keys, pool.indices([0, 1]), None))
    )
    writing.start()
    assert named.wait(30)
    pool.clear()
    assert engine.exists(keys) == 0
    go_on.set()
    writing.join(30)
    assert stored == [True, True]
    assert engine.exists(keys) == 0


def test_ranks_of_latent_attention_agree_after_a_flush(
    attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. Rank 0 stores after a flush, and rank 1 finds it, whoever was asked first. 2. Rank 1 alone
    sees two flushes where rank 0 sees one: they agree. 3. Replicas are engines of their own."""
    monkeypatch.setenv("SGLANG_RUN_ID", "one")
    pools = [HostPool(mla=True) for _ in range(3)]
    first, second, replica = (
        attach(
            pool,
            Config(tp_rank=rank, tp_size=2, dp_rank=dp_rank, is_mla_model=True),
            extra={"plain_reset": "forget"},
        )
        for pool, rank, dp_rank in zip(pools, (0, 1, 0), (0, 0, 1), strict=True)
    )
    keys = keys_of("latent flush", 3)
    store(first, pools[0], keys)
    assert second.exists(keys) == 3
    for turn in range(3):
        for pool in pools:
            pool.clear()
        second.exists(keys)  # It may find what rank 0 does not: SGLang takes the minimum.
        if turn == 1:
            pools[1].clear()
        assert first.exists(keys) == 0
        assert second.exists(keys) == 0
        store(first, pools[0], keys)
        assert first.exists(keys) == second.exists(keys) == 3
        assert replica.exists(keys) == 0


def store(storage: Storage, pool: Pool, keys: list[str]) -> None:
    """Store the first pages of a pool under these keys."""
    assert all(storage.set(keys, pool.indices(range(len(keys))), None))
