"""The small parts: hits of several pools, known pages, event streams, options, generations."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from kvbm_common.errors import ConfigError
from kvbm_common.roster import Roster
from kvbm_connectors.sglang.events import Stream, stream_of
from kvbm_connectors.sglang.generation import Generation
from kvbm_connectors.sglang.hits import combine, trailing_lengths
from kvbm_connectors.sglang.known import Known
from kvbm_connectors.sglang.options import Options
from kvbm_connectors.sglang.weights import revision_of

from tests.connectors.endpoints import welcome
from tests.connectors.helpers import name

# --- hits -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("present", "window", "lengths"),
    [
        ("11111", 1, [1, 2, 3, 4, 5]),
        ("00101", 1, [3, 5]),
        ("11011", 2, [1, 2, 5]),
        ("11111", 9, [1, 2, 3, 4, 5]),
        ("01111", 9, []),
        ("", 1, []),
    ],
)
def test_lengths_of_a_trailing_pool(present: str, window: int, lengths: list[int]) -> None:
    """A length can be restored if its last pages are there, however many are missing before."""
    assert trailing_lengths([here == "1" for here in present], window) == lengths


def test_pools_are_intersected() -> None:
    """The restorable lengths are those that every pool has; each pool tells its own farthest."""
    hits = combine("kv", 5, [("indexer", range(1, 5)), ("mamba", [2, 4, 5])])
    assert (hits.pages, hits.restorable) == (4, [2, 4])
    assert hits.by_pool == {"kv": 5, "indexer": 4, "mamba": 5}


def test_a_pool_without_its_part_leaves_nothing() -> None:
    hits = combine("kv", 3, [("mamba", [])])
    assert (hits.pages, hits.restorable, hits.by_pool) == (0, [], {"kv": 3})
    assert combine("kv", 0, []).by_pool == {}


# --- known pages ----------------------------------------------------------------------------


def test_known_pages_are_those_of_the_present_arena(tmp_path: Path) -> None:
    """1. Nothing is listed before there is a roster. 2. All must be in it. 3. Of another life, or
    of one that does not answer, nothing is known."""
    arena = str(tmp_path / "arena")
    seven = welcome(7, arena_path=arena)
    known = Known()
    assert not known.covers([name(1)], seven, epoch=7)
    roster = Roster.create(arena, slot_count=4, epoch=7)
    roster.add([name(1), name(2)])
    assert known.covers([name(1), name(2)], seven, epoch=7)
    assert not known.covers([name(1), name(3)], seven, epoch=7)
    assert known.which([name(3), name(1)], seven, epoch=7) == [False, True]
    roster.remove([name(1)])
    assert not known.covers([name(1)], seven, epoch=7)
    for later, epoch in ((None, 7), (seven, 0), (seven, 8), (welcome(8, arena_path=arena), 8)):
        assert not known.covers([name(2)], later, epoch=epoch)
        assert known.which([name(2)], later, epoch=epoch) == [False]
    known.close()
    roster.close()


# --- events ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("endpoint", "rank", "found"),
    [
        ("tcp://*:5557", 0, "tcp://127.0.0.1:5557"),
        ("tcp://0.0.0.0:5557", 2, "tcp://127.0.0.1:5559"),
        ("tcp://[::]:5557", 1, "tcp://[::1]:5558"),
        ("tcp://10.0.0.1:5557", 0, "tcp://10.0.0.1:5557"),
        ("ipc:///run/x", 0, "ipc:///run/x"),
        ("ipc:///run/x", 1, ""),
        ("tcp://*:0", 0, ""),
        ("tcp://nonsense", 0, ""),
        ("inproc://x", 0, ""),
    ],
)
def test_where_a_rank_publishes(endpoint: str, rank: int, found: str) -> None:
    """SGLang adds the rank to the port, and only to a port."""
    config = json.dumps({"publisher": "zmq", "endpoint": endpoint, "topic": "kv"})
    assert stream_of(config, rank) == Stream(endpoint=found, topic="kv")


@pytest.mark.parametrize("config", [None, "", "{", "[]", '{"publisher":"null"}', "3"])
def test_no_stream(config: str | None) -> None:
    """Without a publisher that can be followed there are offers alone."""
    assert stream_of(config, 0) == Stream()


# --- weights --------------------------------------------------------------------------------


def test_models_that_are_served_under_one_name_are_two(tmp_path: Path) -> None:
    """The arguments tell them apart: the path, the revision, the files, and what changes them."""

    def revision(**arguments: object) -> str:
        return revision_of(SimpleNamespace(**arguments))

    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"1")
    directory = revision(model_path=str(tmp_path))
    weights.write_bytes(b"12")
    found = [
        directory,
        revision(model_path=str(tmp_path)),
        revision(model_path="a/b"),
        revision(model_path="a/c"),
        revision(model_path="a/b", revision="1"),
        revision(model_path="a/b", kv_cache_dtype="fp8_e5m2"),
        revision(model_path="a/b", quantization="fp8"),
    ]
    assert len(set(found)) == len(found)
    assert revision(model_path="a/b", kv_cache_dtype="auto") == revision(model_path="a/b")
    assert revision_of(None) == ""


# --- options and generations ----------------------------------------------------------------


def test_options_are_settings_and_sglangs_own_keys(caplog: pytest.LogCaptureFixture) -> None:
    extra = {
        "backend_name": "kvbm", "interface_v1": 1, "prefetch_threshold": 64, "revision": "abc",
        "lease_ms": 700, "KVBM_OFFER_DEADLINE_MS": 900, "nonsense": 1,
    }  # fmt: skip
    options = Options.read(extra, {"KVBM_VERIFY_HOST_READS": "always"})
    assert (options.limits.lease_ms, options.limits.offer_deadline_ms) == (700, 900)
    assert (options.verify_every, options.revision) == (1, "abc")
    assert [r.message for r in caplog.records if "extra_config" in r.message] == [
        "hicache_storage_backend_extra_config.nonsense is not a setting"
    ]


@pytest.mark.parametrize("extra", [{}, {"interface_v1": 0}, {"interface_v1": 1, "lease_ms": "x"}])
def test_wrong_options_fail_the_attachment(extra: dict[str, object]) -> None:
    """Without `interface_v1` SGLang would copy every page, through calls that we do not serve."""
    with pytest.raises(ConfigError):
        Options.read(extra, {})


def test_a_generation_is_seen_by_all_and_survives(tmp_path: Path) -> None:
    """1. None at first. 2. One engine clears, another one sees it. 3. So does a later one.
    4. Another namespace is not touched."""
    ours, theirs = (Generation(tmp_path, b"a" * 32) for _ in range(2))
    assert ours.read() == theirs.read() == b""
    ours.renew()
    first = theirs.read()
    assert len(first) == 8
    assert ours.read() == first
    theirs.renew()
    assert first != ours.read() == theirs.read() == Generation(tmp_path, b"a" * 32).read()
    assert Generation(tmp_path, b"b" * 32).read() == b""


def test_a_generation_that_cannot_be_read_is_not_none(tmp_path: Path) -> None:
    """What was cleared must not come back because a file cannot be read."""
    generation = Generation(tmp_path, bytes(32))
    generation.renew()
    (path,) = (tmp_path / "sglang").iterdir()
    os.unlink(path)
    path.mkdir()
    with pytest.raises(IsADirectoryError):
        Generation(tmp_path, bytes(32)).read()
