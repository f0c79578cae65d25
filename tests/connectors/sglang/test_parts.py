"""The small parts: hits of several pools, known pages, event streams, options."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvbm_common.errors import ConfigError
from kvbm_common.memory.committed_table import CommittedTable
from kvbm_connectors.client.weights import UnreadableWeights
from kvbm_connectors.sglang.committed_pages import CommittedPages
from kvbm_connectors.sglang.hits import combine, trailing_lengths
from kvbm_connectors.sglang.options import Options, Stream, stream_of
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
    """1. Nothing is listed before there is a table. 2. All must be in it. 3. Of another life, or
    of one that does not answer, nothing is known."""
    arena = str(tmp_path / "arena")
    seven = welcome(7, arena_path=arena)
    known = CommittedPages()
    assert not known.covers([name(1)], seven, epoch=7)
    table = CommittedTable.create(arena, slot_count=4, epoch=7)
    table.add([name(1), name(2)])
    assert known.covers([name(1), name(2)], seven, epoch=7)
    assert not known.covers([name(1), name(3)], seven, epoch=7)
    assert known.which([name(3), name(1)], seven, epoch=7) == [False, True]
    table.remove([name(1)])
    assert not known.covers([name(1)], seven, epoch=7)
    for later, epoch in ((None, 7), (seven, 0), (seven, 8), (welcome(8, arena_path=arena), 8)):
        assert not known.covers([name(2)], later, epoch=epoch)
        assert known.which([name(2)], later, epoch=epoch) is None
    known.close()
    table.close()


# --- events ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("endpoint", "rank", "found"),
    [
        ("tcp://*:5557", 0, "tcp://127.0.0.1:5557"),
        ("tcp://0.0.0.0:5557", 2, "tcp://127.0.0.1:5559"),
        ("tcp://[::]:5557", 1, "tcp://[::1]:5558"),
        ("tcp://10.0.0.1:5557", 0, ""),
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
    assert stream_of(config, rank) == (Stream(endpoint=found, topic="kv") if found else Stream())


@pytest.mark.parametrize(
    ("endpoint", "bind", "found"),
    [
        ("tcp://10.0.0.1:5557", True, "tcp://10.0.0.1:5557"),
        ("tcp://10.0.0.1:5557", None, ""),
        ("tcp://*:5557", None, "tcp://127.0.0.1:5557"),
        ("tcp://*:5557", False, ""),
        ("ipc:///run/x", False, ""),
    ],
)
def test_a_stream_that_sglang_connects_somewhere_is_not_followed(
    caplog: pytest.LogCaptureFixture, endpoint: str, bind: bool | None, found: str
) -> None:
    """A router listens there, and nothing of SGLang would answer us: the log says so."""
    replay = {"replay_endpoint": "tcp://*:5558"}
    config = json.dumps({"publisher": "zmq", "endpoint": endpoint, "bind": bind} | replay)
    stream = stream_of(config, 0)
    assert stream.endpoint == found
    assert bool(stream.replay_endpoint) == bool(found)
    assert bool(found) == ("SGLang connects to" not in caplog.text)


@pytest.mark.parametrize("format", [None, "default", "dynamo"])
def test_a_format_that_leaves_keys_out_is_logged(
    caplog: pytest.LogCaptureFixture, format: str | None
) -> None:
    """It is no warning: most engines have no request with a key."""
    caplog.set_level(logging.INFO)
    fields = {"publisher": "zmq", "endpoint": "tcp://*:5557", "format": format}
    config = json.dumps({name: value for name, value in fields.items() if value})
    stream = stream_of(config, 0)
    assert stream.endpoint
    assert stream.shows_extra_keys == (format == "dynamo")
    assert ("extra_key" in caplog.text) == (format != "dynamo")
    assert all(record.levelno == logging.INFO for record in caplog.records)


@pytest.mark.parametrize("config", [None, "", "{", "[]", '{"publisher":"null"}', "3"])
def test_no_stream(config: str | None) -> None:
    """Without a publisher that can be followed there are offers alone."""
    assert stream_of(config, 0) == Stream()


# --- weights --------------------------------------------------------------------------------


def test_models_that_are_served_under_one_name_are_two(tmp_path: Path) -> None:
    """The arguments tell them apart: the path, the revision, the files, and what changes them."""

    def revision(**arguments: object) -> str:
        return revision_of(SimpleNamespace(**arguments))

    path = str(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"1")
    before = revision(model_path=path)
    file.write_bytes(b"2")
    os.utime(file, ns=(0, 0))
    found = [
        before,
        revision(model_path=path),
        revision(model_path=path, kv_cache_dtype="fp8_e5m2"),
        revision(model_path=path, quantization="fp8"),
        revision(model_path=path, context_length=8192),
        revision(model_path=path, load_format="dummy"),
        revision(model_path=path, speculative_draft_model_path=path),
    ]
    assert len(set(found)) == len(found)
    assert revision(model_path=path, kv_cache_dtype="auto") == revision(model_path=path)


@pytest.mark.parametrize("arguments", [None, SimpleNamespace(load_format="auto")], ids=str)
def test_a_model_that_nothing_is_known_of_has_no_name(arguments: Any) -> None:
    """Goal: where a later SGLang keeps its arguments elsewhere, two models under one served name
    share no page. An operator may name the weights."""
    with pytest.raises(UnreadableWeights, match="arguments"):
        revision_of(arguments)
    assert revision_of(arguments, named="poet").startswith("poet")


def test_dummy_weights_are_named_by_the_engine_s_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each life draws its own, or is given others later; so may each replica be."""
    arguments = SimpleNamespace(model_path="org/nowhere", load_format="dummy")
    first, same = revision_of(arguments), revision_of(arguments)
    assert first == same != revision_of(arguments, replica=1)
    monkeypatch.setenv("SGLANG_RUN_ID", "another")
    assert first != revision_of(arguments)


@pytest.mark.parametrize("given", ['load_format="dummy")', 'load_format="auto"), is_late=True'])
def test_ranks_of_an_engine_name_its_own_weights_alike(given: str) -> None:
    """Goal: where ranks share one copy (MLA), all of them find what the first rank stores. Another
    engine finds none of it, and where SGLang has drawn no name, nor does another rank."""
    code = (
        "from types import SimpleNamespace as S\n"
        "from kvbm_connectors.sglang.weights import revision_of\n"
        f'print(revision_of(S(model_path="org/nowhere", {given}))'
    )
    found = [
        subprocess.check_output(
            [sys.executable, "-c", code], env=dict(os.environ) | {"SGLANG_RUN_ID": run}
        )
        for run in ("one", "one", "two", "", "")
    ]
    assert found[0] == found[1]
    assert len(set(found)) == 4


def test_weights_may_be_others_when_a_storage_is_attached_late(tmp_path: Path) -> None:
    """SGLang does not say that they were updated: each attachment has a name of its own, but where
    an operator names them."""
    found = [revision(tmp_path), *(revision(tmp_path, is_late=True) for _ in range(2))]
    assert len(set(found)) == 3
    named = [revision(tmp_path, named="poet", is_late=late) for late in (False, True)]
    assert named == ["poet", "poet"]


def test_the_file_of_scales_counts_by_content(tmp_path: Path) -> None:
    """It lies outside the model's directory."""
    (tmp_path / "model.safetensors").write_bytes(b"1")
    path = tmp_path / "scales.other"
    arguments = SimpleNamespace(model_path=str(tmp_path), quantization_param_path=str(path))
    found = set()
    for content in ("{}", '{"1": 2}'):
        path.write_text(content)
        found.add(revision_of(arguments))
    assert len(found) == 2


@pytest.mark.parametrize("field", ["load_format", "speculative_draft_load_format"])
@pytest.mark.parametrize("kind", ["remote", "remote_instance", "private"])
def test_weights_that_are_not_the_model_s_files_have_no_name(
    tmp_path: Path, field: str, kind: str
) -> None:
    """Another engine or a server may bring any others."""
    path = str(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"1")
    named = {"model_path": path, "speculative_draft_model_path": path}
    revision_of(SimpleNamespace(**named, load_format="safetensors"))
    with pytest.raises(UnreadableWeights, match=f"load_format {kind}"):
        revision_of(SimpleNamespace(**named, **{field: kind}))


VITAL: list[dict[str, Any]] = [
    {"kt_method": "AMXINT4"}, {"flashinfer_mxfp4_moe_precision": "bf16"},
    {"moe_runner_backend": "marlin"}, {"rl_quant_profile": "p"}, {"enable_tf32_matmul": True},
    {"enable_w4a4_mxfp4_megamoe": True}, {"startup_weight_load_mode": "overlap"},
    {"speculative_draft_model_quantization": "fp8"}, {"of_a_later_release": 1},
]  # fmt: skip
HARMLESS: list[dict[str, Any]] = [
    {"port": 30001, "nccl_port": 1, "node_rank": 1, "base_gpu_id": 3},
    {"mem_fraction_static": 0.5, "max_total_tokens": 100, "cuda_graph_max_bs_decode": 8},
    {"served_model_name": "poet", "api_key": "1", "log_level": "debug", "random_seed": 3},
    {"hicache_ratio": 2.0, "hicache_storage_backend_extra_config": "{}"},
]


def revision(
    path: Path, *, version: str = "", named: str = "", is_late: bool = False, **changed: Any
) -> str:
    """The revision of a model, with further arguments."""
    (path / "model.safetensors").write_bytes(b"1")
    arguments = SimpleNamespace(model_path=str(path), **changed)
    return revision_of(arguments, named=named, version=version, is_late=is_late)


@pytest.mark.parametrize("changed", VITAL, ids=str)
def test_arguments_enter_the_revision(tmp_path: Path, changed: dict[str, Any]) -> None:
    """Each changes what a page holds, or may."""
    assert revision(tmp_path, **changed) != revision(tmp_path)


@pytest.mark.parametrize("changed", HARMLESS, ids=str)
def test_harmless_arguments_do_not(tmp_path: Path, changed: dict[str, Any]) -> None:
    """Ports, ranks, memory, names, logs."""
    assert revision(tmp_path, **changed) == revision(tmp_path)


def test_sglang_s_release_enters_the_revision(tmp_path: Path) -> None:
    """Kernels differ, and what a default means."""
    assert revision(tmp_path, version="0.5.23") != revision(tmp_path, version="0.5.24")


def test_resolved_arguments_count(tmp_path: Path) -> None:
    """What SGLang has chosen by itself, not what was left to it."""
    found = {
        revision(tmp_path, attention_backend=None, resolved_dict=lambda chosen=chosen: chosen)
        for chosen in ({"attention_backend": "fa3"}, {"attention_backend": "triton"})
    }
    assert len(found) == 2


@pytest.mark.parametrize("field", ["decrypted_config_file", "rl_quant_profile", "later_file"])
def test_a_file_counts_by_content(tmp_path: Path, field: str) -> None:
    """Its path says nothing of it, of any argument."""
    found = []
    for place, content in (("a", "{}"), ("b", "{}"), ("b", "[]")):
        path = tmp_path / place
        path.write_text(content)
        changed: dict[str, Any] = {field: str(path)}
        found.append(revision(tmp_path, **changed))
    first, copy, other = found
    assert first == copy != other


def test_further_weights_count_by_content(tmp_path: Path) -> None:
    """KTransformers computes experts on the CPU, with weights of their own."""
    further = tmp_path / "experts"
    further.mkdir()
    (tmp_path / "model").mkdir()
    found = set()
    for content in (b"1", b"2"):
        (further / "experts.safetensors").write_bytes(content)
        found.add(revision(tmp_path / "model", kt_weight_path=str(further)))
    assert len(found) == 2


@pytest.mark.parametrize(
    "given",
    [
        {"weight_cache_mode": "client"},
        {"custom_weight_loader": ["own.loader"]},
        {"checkpoint_engine_wait_weights_before_ready": True},
        {"model_loader_extra_config": '{"qlora_adapter_name_or_path": "/srv/adapter"}'},
        {"model_loader_extra_config": '{"pattern": "rank-{rank}.shard"}'},
        {"model_loader_extra_config": "{"},
        {"load_format": "npcache"},
        {"decrypted_config_file": "/nowhere"},
        {"trust_remote_code": True},
    ],
    ids=str,
)
def test_weights_and_code_from_elsewhere_have_no_name(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    """Another process, another repository, files that are not looked at."""
    (tmp_path / "config.json").write_text('{"auto_map": {"AutoModel": "other/repo--own.Model"}}')
    revision(tmp_path, weight_cache_mode="off", model_loader_extra_config='{"num_threads": 2}')
    with pytest.raises(UnreadableWeights):
        revision(tmp_path, **given)


def test_weights_that_are_not_there_have_no_name() -> None:
    """What "main" stands for in a hub may change: only a copy on this host says what it is."""
    with pytest.raises(UnreadableWeights):
        revision_of(SimpleNamespace(model_path="org/nowhere"))


# --- options ----------------------------------------------------------------


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


def test_no_call_waits_longer_than_sglangs_flush(caplog: pytest.LogCaptureFixture) -> None:
    """SGLang's scheduler ends where a flush waits 10 s for a thread; the lease stays as it is."""
    extra = {"interface_v1": 1, "offer_deadline_ms": 8_001, "lease_ms": 60_000}
    limits = Options.read(extra, {"KVBM_ONBOARD_DEADLINE_MS": "600000"}).limits
    assert (limits.onboard_deadline_ms, limits.offer_deadline_ms) == (8_000, 8_000)
    assert limits.lease_ms == 60_000
    assert [r.message for r in caplog.records if "flush" in r.message] == [
        "onboard_deadline_ms, offer_deadline_ms: 8000 ms here, SGLang's scheduler ends where a "
        "flush waits longer for a thread"
    ]


@pytest.mark.parametrize("extra", [{}, {"interface_v1": 0}, {"interface_v1": 1, "lease_ms": "x"}])
def test_wrong_options_fail_the_attachment(extra: dict[str, Any]) -> None:
    """Without `interface_v1` SGLang would copy every page, through calls that we do not serve."""
    with pytest.raises(ConfigError):
        Options.read(extra, {})
