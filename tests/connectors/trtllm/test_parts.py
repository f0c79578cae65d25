"""The parts that need no engine: identity, refusals, promises, memory, plans; the import paths."""

from __future__ import annotations

import ctypes
import importlib
import json
import threading
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvbm_common.checksum import part_checksums
from kvbm_common.config.settings import Settings
from kvbm_common.cuda.reading import Gpu
from kvbm_common.identity import Hasher
from kvbm_common.memory.arena import Arena
from kvbm_common.tier.parts import ONE_PART, Grid
from kvbm_connectors.core.messages import Load
from kvbm_connectors.trtllm import __all__ as names
from kvbm_connectors.trtllm.arguments import plain
from kvbm_connectors.trtllm.identity import (
    Life,
    Lives,
    agree,
    namespace_of,
    refusal_of,
    stream_of,
)
from kvbm_connectors.trtllm.memory import CannotLend, regions_of_layout, regions_of_tensor
from kvbm_connectors.trtllm.promises import (
    PREFIX,
    PromisedLoad,
    PromiseKeeper,
    PromisePlan,
    PromiseReader,
)
from kvbm_connectors.trtllm.protocols import BAD_PAGE, DEFAULT_PRIORITY, SOURCES
from kvbm_connectors.trtllm.tracked import PromisedRequest, refusal_of_request
from kvbm_connectors.trtllm.worker import PromiseBroken, WorkerSide

from tests.connectors.helpers import NAMESPACE, name
from tests.connectors.trtllm.engine import PART_BYTES, LlmRequest, Tensor
from tests.connectors.trtllm.package import (
    KvCacheConfig,
    LlmArgs,
    LoadFormat,
    Mapping,
    ParallelConfig,
    args_of,
    installed,
)
from tests.gpu.fake_runtime import FakeRuntime
from tests.recording import recorded

pytestmark = pytest.mark.usefixtures("small_measurements")
LIFE = "0" * 16

# ---- the classes and where they come from ----------------------------------------------------


@pytest.mark.parametrize("source", SOURCES)
def test_the_engine_is_found_where_its_release_has_it(source: str) -> None:
    """KVBM's own names are the same classes."""
    with installed(source=source):
        module = importlib.import_module("kvbm_connectors.trtllm")
        classes = [getattr(module, name) for name in names]
        assert classes[:2] == classes[2:]
        assert [len(found.__abstractmethods__) for found in classes] == [0] * 4


def test_without_the_engine_it_is_said_what_is_missing() -> None:
    with pytest.raises(ModuleNotFoundError, match="TensorRT-LLM has none of"):
        importlib.import_module("kvbm_connectors.trtllm.connector")


def test_a_broken_engine_is_not_taken_for_a_missing_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is there, and something that it imports is not."""
    missing = ModuleNotFoundError("No module named 'torch'", name="torch")
    import_module = importlib.import_module

    def broken(path: str) -> Any:
        if path.startswith("tensorrt_llm"):
            raise missing
        return import_module(path)

    with installed():
        connector = importlib.import_module("kvbm_connectors.trtllm.connector")
        monkeypatch.setattr(importlib, "import_module", broken)
        with pytest.raises(ModuleNotFoundError, match="torch"):
            importlib.reload(connector)


# ---- identity --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"enable_block_reuse": False}, "enable_block_reuse to true"),
        ({"enable_partial_reuse": True}, "enable_partial_reuse to false"),
        ({"host_cache_size": 1 << 30}, "host_cache_size"),
        ({"max_attention_window": [4096]}, "sliding windows"),
    ],
)
def test_what_cannot_be_cached_is_said(
    change: dict[str, Any], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine then computes: every question has the answer that it would have without us."""
    args = args_of(**change)
    assert text in refusal_of(args)
    with installed():
        module = importlib.import_module("kvbm_connectors.trtllm")
        leader, worker = module.KvbmConnectorLeader(args), module.KvbmConnectorWorker(args)
        assert text in caplog.text
        worker.register_kv_caches(Tensor(4))
        request = LlmRequest(1, list(range(10)), [1])
        assert leader.get_num_new_matched_tokens(request, 0) == (0, False)
        worker.bind_connector_meta(leader.build_connector_meta(None))
        worker.start_load_kv(None)
        assert leader.request_finished(request, [0]) is False
        assert worker.get_finished([], []) == ([], [])


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (LlmArgs(parallel_config=ParallelConfig(Mapping(pp_size=2))), "pipeline"),
        (LlmArgs(parallel_config=ParallelConfig(Mapping(cp_size=2))), "context"),
        (LlmArgs(parallel_config=ParallelConfig(Mapping(world_size=65))), "64 parts"),
        (LlmArgs(enable_attention_dp=True), "attention data"),
        (LlmArgs(max_beam_width=2), "beam"),
    ],
)
def test_other_shapes_are_refused(args: LlmArgs, text: str) -> None:
    assert text in refusal_of(args)
    assert refusal_of(args_of()) == ""


def test_what_makes_bytes_differ_is_in_the_namespace(tmp_path: Path) -> None:
    """The engine's release, the cache's precision, the quantisation, the ranks, the weights."""
    quant = SimpleNamespace(quant_algo=SimpleNamespace(value="FP8"), kv_cache_quant_algo=None)
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "model.safetensors").write_bytes(b"draft")
    draft = SimpleNamespace(speculative_model=tmp_path / "draft")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")
    args = replace(args_of(), model=tmp_path / "model", load_format="auto")
    kinds = [
        namespace_of(args, "1.2.1", LIFE),
        namespace_of(args, "1.2.2", LIFE),
        namespace_of(replace(args, kv_cache_config=KvCacheConfig(dtype="fp8")), "1.2.1", LIFE),
        namespace_of(replace(args, quant_config=quant), "1.2.1", LIFE),
        namespace_of(replace(args, parallel_config=ParallelConfig(Mapping(0, 2))), "1.2.1", LIFE),
        namespace_of(replace(args, load_format="dummy"), "1.2.1", LIFE),
        namespace_of(replace(args, model_kwargs={"rope_theta": 1.0}), "1.2.1", LIFE),
        namespace_of(replace(args, speculative_config=draft), "1.2.1", LIFE),
    ]
    (tmp_path / "draft" / "model.safetensors").write_bytes(b"other draft")
    kinds.append(namespace_of(replace(args, speculative_config=draft), "1.2.1", LIFE))
    (tmp_path / "model" / "model.safetensors").write_bytes(b"other weights")
    kinds.append(namespace_of(args, "1.2.1", LIFE))
    assert len({kind.digest for kind in kinds}) == len(kinds)
    assert kinds[3].quantisation == "FP8"


@dataclass
class Config:
    """One of the engine's own, as of `sparse_attention_config`."""

    algorithm: str = "skip_softmax"
    threshold: float | None = None


def digest_of(**changed: Any) -> bytes:
    """The digest of a namespace, with some arguments set."""
    args = args_of()
    for field, value in changed.items():
        setattr(args, field, value)
    return namespace_of(args, "1.2.1", LIFE).digest


@pytest.mark.parametrize(
    "changed",
    [
        {"sparse_attention_config": Config()}, {"sparse_attention_config": Config(threshold=3.0)},
        {"force_dynamic_quantization": True}, {"allreduce_strategy": "LOWPRECISION"},
        {"moe_config": Config("CUTLASS")}, {"of_a_later_release": False},
        {"env_overrides": {"TRTLLM_X": "1"}}, {"model_kwargs": {"rope_theta": 1.0}},
        {"quant_config": Config("exclude")}, {"load_format": "dummy", "enable_min_latency": True},
    ],
    ids=str,
)  # fmt: skip
def test_arguments_enter_the_name(changed: dict[str, Any]) -> None:
    """Each changes what a block holds, or may; so does one that nobody has looked at."""
    assert digest_of(**changed) != digest_of()


def test_arguments_of_the_cache_enter_the_name() -> None:
    cache, other = KvCacheConfig(), KvCacheConfig()
    vars(other)["sink_token_length"] = 4
    assert digest_of(kv_cache_config=cache) != digest_of(kv_cache_config=other)
    vars(cache)["free_gpu_memory_fraction"] = 0.5
    assert digest_of(kv_cache_config=cache) == digest_of()


@pytest.mark.parametrize(
    "changed",
    [
        {"max_batch_size": 8, "max_num_tokens": 64}, {"mpi_session": object()},
        {"tokenizer": object(), "tokenizer_mode": "slow"}, {"sleep_config": None},
        {"cuda_graph_config": Config("decode")}, {"of_a_later_release": None},
    ],
    ids=", ".join,
)  # fmt: skip
def test_harmless_arguments_do_not(changed: dict[str, Any]) -> None:
    """Sizes, processes, tokens' texts, and what is not set."""
    assert digest_of(**changed) == digest_of()


def test_what_was_computed_from_arguments_does_not_enter() -> None:
    """Goal: a name is the same, whether a cached property was read before or not."""

    class Computing(Config):
        @cached_property
        def mode(self) -> int:
            return 7

    read, unread = Computing(threshold=1.5), Computing(threshold=1.5)
    assert read.mode == 7
    assert plain(read) == plain(unread)


def test_a_value_has_one_text_in_every_process(tmp_path: Path) -> None:
    """Of an object that is no configuration only its type enters, and sets have no order."""
    value = {"a": LoadFormat.AUTO, "b": (tmp_path, None), "c": {"y", "x"}, "d": Lives(),
             "e": Config(threshold=1.5)}  # fmt: skip
    assert plain(value) == {
        "a": "AUTO", "b": [str(tmp_path), None], "c": ['"x"', '"y"'], "d": "Lives",
        "e": {"": "Config", "algorithm": "skip_softmax", "threshold": 1.5},
    }  # fmt: skip


def test_long_arguments_have_a_short_name() -> None:
    """A model's factors of its positions, for one: they had ended the engine's start."""
    scaling = [{"long_factor": [factor + n / 7 for n in range(1_000)]} for factor in (1.0, 2.0)]
    first, other = (digest_of(model_kwargs={"rope_scaling": found}) for found in scaling)
    assert first != other


def test_an_engine_that_cannot_be_named_passes_through(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever a namespace refuses, the engine starts."""
    args = replace(args_of(), attn_backend="x" * 5_000)
    with installed():
        module = importlib.import_module("kvbm_connectors.trtllm")
        leader, worker = module.KvbmConnectorLeader(args), module.KvbmConnectorWorker(args)
        assert "layout has" in caplog.text
        assert leader.get_num_new_matched_tokens(LlmRequest(1, [1, 2], [3]), 0) == (0, False)
        worker.register_kv_caches(Tensor(2))


def test_adapters_of_the_start_count_by_content(tmp_path: Path) -> None:
    """Their embeddings serve every request."""
    found = set()
    for content in (b"1", b"2"):
        (tmp_path / "adapter.safetensors").write_bytes(content)
        found.add(digest_of(lora_config=SimpleNamespace(lora_dir=[str(tmp_path)])))
    assert len(found) == 2
    args = args_of()
    vars(args)["lora_config"] = SimpleNamespace(lora_dir=["/nowhere"])
    assert "weights are not known" in refusal_of(args)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"sparse_attention_config": Config("dsa")}, "sparse attention"),
        ({"sparse_attention_config": Config("rocket")}, "sparse attention"),
        ({"kv_cache_compression_config": Config("evict")}, "compressed"),
        ({"kv_cache_config": KvCacheConfig(dtype="nvfp4")}, "NVFP4"),
        ({"quant_config": SimpleNamespace(kv_cache_quant_algo="NVFP4")}, "NVFP4"),
    ],
    ids=str,
)
def test_blocks_of_which_there_is_more_are_refused(changed: dict[str, Any], text: str) -> None:
    """Scales or an indexer's keys are in pools that are not lent."""
    args = args_of()
    vars(args).update(changed)
    assert text in refusal_of(args)


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("config.json", {"index_topk": 2048}, "sparse attention"),
        ("config.json", {"text_config": {"index_topk": 2048}}, "sparse attention"),
        ("hf_quant_config.json", {"quantization": {"kv_cache_quant_algo": "NVFP4"}}, "NVFP4"),
        ("hf_quant_config.json", {"quantization": {"kv_cache_quant_algo": "FP8"}}, ""),
        ("config.json", [], ""),
    ],
)
def test_a_checkpoint_says_what_else_a_block_has(
    tmp_path: Path, name: str, content: object, text: str
) -> None:
    """Without an argument of the engine."""
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / name).write_text(json.dumps(content))
    refusal = refusal_of(replace(args_of(), model=tmp_path, load_format=LoadFormat.AUTO))
    assert text in refusal
    assert bool(text) == bool(refusal)


@pytest.mark.parametrize("load_format", ["dummy", LoadFormat.DUMMY])
def test_dummy_weights_are_named_by_the_engine_s_life(load_format: object) -> None:
    """Each life draws its own, or is given others later; all of its ranks agree on the life."""
    args = replace(args_of(), load_format=load_format)
    first, same, other = (namespace_of(args, "1.2.1", life).digest for life in ("1", "1", "2"))
    assert first == same != other


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"load_format": LoadFormat.VISION_ONLY}, "load_format is vision_only"),
        ({"load_format": "gms"}, "load_format is gms"),
        ({"checkpoint_format": "MX"}, "checkpoint_format is MX"),
        ({"checkpoint_loader": object()}, "checkpoint_loader is object"),
    ],
)
def test_weights_that_are_not_the_model_s_files_are_refused(
    tmp_path: Path, change: dict[str, Any], text: str
) -> None:
    """A server or a loader of the user's may bring any others."""
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    args = replace(args_of(), model=tmp_path, load_format=LoadFormat.AUTO)
    assert refusal_of(args) == ""
    assert text in refusal_of(replace(args, **change))


def test_weights_that_are_not_there_are_refused() -> None:
    """What "main" stands for in a hub may change: only a copy on this host says what it is."""
    args = replace(args_of(), model="org/nowhere", load_format="auto")
    assert "weights" in refusal_of(args)


def test_all_ranks_of_an_engine_have_one_life() -> None:
    """Two halves of one process share it by their arguments; other ranks hear it from rank 0."""
    args, lives = args_of(), Lives()
    ours = lives.of(args)
    assert lives.of(args) is ours
    assert lives.of(args_of()) is not ours  # Equal arguments of another engine.
    theirs = Life("0" * 16, args_of(1, 2))
    agree(theirs, 2, lambda value, root: ours.incarnation)
    assert theirs.incarnation == ours.incarnation
    agree(theirs, 1, lambda value, root: pytest.fail("nobody else is there"))


def test_ranks_that_cannot_meet_pass_through(caplog: pytest.LogCaptureFixture) -> None:
    """An engine without MPI: the worker lends nothing, and so nothing is ever promised."""
    with installed() as broadcast:
        module = importlib.import_module("kvbm_connectors.trtllm")
        broadcast.broken = RuntimeError("MPI is not there")
        worker = module.KvbmConnectorWorker(args_of(1, 2))
        assert "MPI is not there" in caplog.text
        worker.register_kv_caches(Tensor(2))
        worker.start_load_kv(None)
        assert worker.get_finished([3], []) == ([3], [])


@pytest.mark.parametrize("refusing", [0, 1])
def test_a_rank_that_refuses_alone_leaves_no_other_waiting(
    refusing: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The weights are on one host and not on the other. 1. Both ranks take part in the broadcast:
    it would take the engine's next message otherwise. 2. The one that refuses lends nothing, nor
    does any without a name; the log says why."""
    (tmp_path / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")
    with installed() as broadcast:
        module = importlib.import_module("kvbm_connectors.trtllm")
        connector = importlib.import_module("kvbm_connectors.trtllm.connector")
        sides = recorded(monkeypatch, connector, "WorkerSide")
        for rank in range(2):
            broadcast.rank = rank
            args = args_of(rank, 2)
            args.load_format = LoadFormat.AUTO
            args.model = "org/nowhere" if rank == refusing else str(tmp_path)
            worker = module.KvbmConnectorWorker(args)
            worker.shutdown()
    assert broadcast.calls == [0, 1]
    assert len(sides) == refusing  # That of rank 0, where it does not refuse.
    assert ("rank 1" in caplog.text) is (refusing == 1)


def test_events_are_followed_where_they_are_published() -> None:
    """By the engine itself (1.3), on KVBM's port, or not at all."""
    life = Life("0" * 16, args_of())
    config = SimpleNamespace(publisher="zmq", endpoint="tcp://*:5557",
                             replay_endpoint="tcp://0.0.0.0:5657", topic="kv")  # fmt: skip
    pushed = stream_of(args_of(kv_events_config=config), life, NAMESPACE, 20081)
    assert (pushed.endpoint, pushed.replay_endpoint, pushed.topic) == (
        "tcp://127.0.0.1:5557", "tcp://127.0.0.1:5657", "kv",
    )  # fmt: skip
    pulled = stream_of(args_of(), life, NAMESPACE, 20081)
    assert (pulled.endpoint, pulled.replay_endpoint) == (
        "tcp://127.0.0.1:20081", "tcp://127.0.0.1:21081",
    )  # fmt: skip
    assert stream_of(args_of(), life, NAMESPACE, None).endpoint == ""


# ---- requests --------------------------------------------------------------------------------


def test_requests_whose_tokens_mean_something_else_are_refused() -> None:
    for field, reason in (
        ("lora_task_id", "lora"),
        ("multimodal_positions", "multimodal"),
        ("multimodal_hashes", "multimodal"),
        ("multimodal_embedding", "multimodal"),
        ("mrope_rotary_cos_sin", "multimodal"),
        ("prompt_embedding_table", "prompt_tuning"),
        ("prompt_vocab_size", "prompt_tuning"),
        ("is_dummy_request", "dummy"),
    ):
        request: Any = SimpleNamespace(**{field: [1]})
        assert refusal_of_request(request) == reason
    assert refusal_of_request(LlmRequest(1, [1], [])) == ""


def test_images_without_hashes_are_refused() -> None:
    """The engine could not make them: the tokens are those of any other image. A tensor has no
    truth of its own."""
    image: Any = SimpleNamespace(multimodal_hashes=None, py_multimodal_data={"image": {"x": 1}})
    assert refusal_of_request(image) == "multimodal"
    tensor: Any = SimpleNamespace(multimodal_embedding=np.zeros(2))
    assert refusal_of_request(tensor) == "multimodal"
    text: Any = SimpleNamespace(
        multimodal_hashes=[], py_multimodal_data={}, multimodal_embedding=None, prompt_vocab_size=0
    )
    assert refusal_of_request(text) == ""


@given(st.lists(st.none() | st.integers(0, 100)), st.integers(0, 100))
def test_the_prefix_of_high_priority(priorities: list[int | None], least: int) -> None:
    """The longest run from the first block on in which no block is below."""
    tracked = PromisedRequest(priorities=list(priorities), table=list(range(len(priorities))))
    count = tracked.deserving(least)
    values = [DEFAULT_PRIORITY if priority is None else priority for priority in priorities]
    assert all(value >= least for value in values[:count])
    assert count == len(values) or values[count] < least


def test_a_block_without_a_page_ends_what_is_offered() -> None:
    hasher = Hasher(NAMESPACE)
    tracked = PromisedRequest(names=[name(n) for n in (1, 2, 3)])
    run = tracked.run_to_offer(hasher, [5, 6, BAD_PAGE], 1, 3)
    assert (run.parent, run.hashes, run.blocks) == (name(1), (name(2),), (6,))
    assert tracked.run_to_offer(hasher, [BAD_PAGE, 6, 7], 0, 3).blocks == ()


# ---- promises --------------------------------------------------------------------------------

BLOCK_BYTES = 100


def load_of(arena: Arena, slots: list[int], *, rotten: int | None = None) -> Load:
    """Of these slots of an arena, whose slots are as large as blocks."""
    sums = [part_checksums(arena.view(slot * BLOCK_BYTES, BLOCK_BYTES), ONE_PART) for slot in slots]
    if rotten is not None:
        sums[rotten] = sums[rotten][::-1]
    return Load(
        request="r", epoch=1, lease=1, slots=tuple(slots), blocks=tuple(range(len(slots))),
        hashes=tuple(name(n) for n in slots), checksums=tuple(sums),
        block_bytes=BLOCK_BYTES, deadline_ms=1 << 60,
    )  # fmt: skip


def test_what_is_promised_is_a_copy(tmp_path: Path) -> None:
    """1. Two of three blocks are kept, the last is not what it should be. 2. The arena changes: a
    worker still reads what was promised. 3. What is given up is used again; nothing is left."""
    with Arena.create(tmp_path, "arena", 10 * BLOCK_BYTES) as arena:
        arena.array[:] = np.arange(10 * BLOCK_BYTES, dtype=np.uint8)
        keeper = PromiseKeeper(tmp_path, "1", 4 * 128)
        assert keeper.room(BLOCK_BYTES) == 4
        kept = keeper.keep(load_of(arena, [7, 2, 5], rotten=2), 3, arena, BLOCK_BYTES)
        assert (len(kept.slots), kept.corrupt, keeper.promised) == (2, 2, 2)
        expected = bytes(arena.view(2 * BLOCK_BYTES, BLOCK_BYTES))
        arena.array[:] = 0
        reader = PromiseReader(tmp_path, "1")
        mapped = Arena.attach(reader.path, writable=False)
        offset = kept.slots[1] * keeper.slot_bytes
        assert bytes(mapped.view(offset, BLOCK_BYTES)) == expected
        keeper.give_up(kept.slots)
        keeper.check()
        assert keeper.keep(load_of(arena, [1, 1, 1, 1]), 4, arena, BLOCK_BYTES).corrupt is None
        assert keeper.room(BLOCK_BYTES) == 0
        assert keeper.room(2 * BLOCK_BYTES) == 0
        mapped.close()
        reader.close()
        keeper.close()
    assert list(tmp_path.iterdir()) == []


def test_promises_of_a_dead_engine_are_removed(tmp_path: Path) -> None:
    """Its file is there and nobody holds it; that of a living one stays."""
    (tmp_path / "kvbm-promises-dead").write_bytes(b"x")
    alive = PromiseKeeper(tmp_path, "alive", 4096)
    other = PromiseKeeper(tmp_path, "other", 4096)
    found = sorted(path.name for path in tmp_path.iterdir())
    assert found == ["kvbm-promises-alive", "kvbm-promises-other"]
    alive.close()
    other.close()


# ---- memory and plans ------------------------------------------------------------------------


class PoolRegion:
    """A region as the V2 manager describes it, in memory of ours."""

    def __init__(self, tensor: Tensor, offset: int, size: int) -> None:
        self.base, self.size = tensor.data_ptr() + offset, size
        self.stride, self.num_slots = PART_BYTES, tensor.shape[0]
        self._tensor = tensor

    def as_tensor(self) -> Tensor:
        return self._tensor


def group(*regions: PoolRegion, replicated: tuple[PoolRegion, ...] = (), **fields: Any) -> Any:
    return SimpleNamespace(
        regions=regions, replicated_regions=replicated, window_size=fields.get("window_size")
    )


def test_one_tensor_is_one_region() -> None:
    """V1's pool has its blocks outermost."""
    tensor = Tensor(5)
    [region] = regions_of_tensor(tensor)
    assert (region.address, region.stride, region.piece_bytes, region.blocks) == (
        tensor.data_ptr(), PART_BYTES, PART_BYTES, 5,
    )  # fmt: skip


def test_a_layout_s_regions_are_ours() -> None:
    """V2's pools, those that all ranks have alike among them."""
    tensor = Tensor(5)
    own, shared = PoolRegion(tensor, 0, 64), PoolRegion(tensor, 64, 32)
    layout = SimpleNamespace(groups=[group(own, replicated=(shared,))])
    regions = regions_of_layout(layout)
    assert [(region.address - tensor.data_ptr(), region.piece_bytes) for region in regions] == [
        (0, 64), (64, 32),
    ]  # fmt: skip
    assert {region.stride for region in regions} == {PART_BYTES}


def test_a_layout_without_shared_regions_is_whole() -> None:
    """Not every candidate of 1.3 has `replicated_regions`."""
    tensor = Tensor(5)
    bare = SimpleNamespace(regions=(PoolRegion(tensor, 0, 64),), window_size=None)
    [region] = regions_of_layout(SimpleNamespace(groups=[bare]))
    assert region.piece_bytes == 64


def test_memory_that_cannot_be_lent_is_said() -> None:
    tensor, meta = Tensor(2), Tensor(2, device="meta")
    region = PoolRegion(tensor, 0, 64)
    with pytest.raises(CannotLend, match="on meta"):
        regions_of_tensor(meta)
    with pytest.raises(CannotLend, match="on meta"):
        regions_of_layout(SimpleNamespace(groups=[group(PoolRegion(meta, 0, 64))]))
    with pytest.raises(CannotLend, match="2 layer groups"):
        regions_of_layout(SimpleNamespace(groups=[group(region), group(region)]))
    with pytest.raises(CannotLend, match="windows"):
        regions_of_layout(SimpleNamespace(groups=[group(region, window_size=8)]))


class GpuPool(Tensor):
    """A pool in the memory of a GPU that keeps CUDA's order, and no other promise of its."""

    def __init__(self, runtime: FakeRuntime) -> None:
        super().__init__(5, device="cuda")
        self._address = runtime.allocate(self.memory.nbytes)
        memory = (ctypes.c_uint8 * self.memory.nbytes).from_address(self._address)
        self.memory = np.frombuffer(memoryview(memory), np.uint64).reshape(self.memory.shape)

    def data_ptr(self) -> int:
        return self._address


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_plan_is_carried_out_once(tmp_path: Path, ranks: int, on_gpu: bool) -> None:
    """1. Each rank takes its part of the promised blocks. 2. The engine leaves a plan bound: the
    second time it is offered nothing happens. 3. A plan that cannot be carried out raises, and so
    does one whose blocks have changed since they were promised."""
    settings = Settings.load({}, {"shm_dir": tmp_path, "runtime_dir": tmp_path})
    with Arena.create(tmp_path, "arena", 4 * ranks * PART_BYTES) as arena:
        arena.array[:] = np.random.default_rng(1).integers(0, 256, arena.bytes, np.uint8)
        life = Life("0" * 16, args_of())
        keeper = PromiseKeeper(tmp_path, life.incarnation, 1 << 16)
        source = arena.array.reshape(4, ranks * PART_BYTES).copy()
        size = ranks * PART_BYTES
        load = Load(
            request="r", epoch=1, lease=1, slots=(2, 1), blocks=(0, 1), hashes=(name(2), name(1)),
            checksums=tuple(part_checksums(source[slot], Grid(heads=ranks)) for slot in (2, 1)),
            block_bytes=size, deadline_ms=1 << 60,
        )  # fmt: skip
        assert keeper.room(size)
        kept = keeper.keep(load, 2, arena, size)
        sums = keeper.checksums(kept.slots)
        plan = PromisePlan(2, keeper.slot_bytes, (PromisedLoad(7, kept.slots, (3, 0), sums),))
        memory = Arena.attach(tmp_path / (PREFIX + life.incarnation))
        for rank in range(ranks):
            runtime = FakeRuntime(seed=rank)
            tensor = GpuPool(runtime) if on_gpu else Tensor(5)
            side = WorkerSide(life, NAMESPACE, settings, rank=rank, world_size=ranks)
            with pytest.raises(PromiseBroken, match="no memory"):
                side.start(PromisePlan(1, keeper.slot_bytes, plan.loads))
            side.register(regions_of_tensor(tensor), partial(Gpu, runtime) if on_gpu else None)
            compute = runtime.stream(urgent=False)
            side.start(plan, compute_stream=compute)
            # The copy begins after the stream that the engine has named for this very step.
            assert on_gpu is any(
                call[0] == "record" and call[2] == compute for call in runtime.calls
            )
            blocks = tensor.memory.reshape(5, -1).view(np.uint8)
            part = slice(rank * PART_BYTES, (rank + 1) * PART_BYTES)
            assert np.array_equal(blocks[3], source[2][part])
            assert np.array_equal(blocks[0], source[1][part])
            tensor.memory[:] = 0
            side.start(plan)
            assert not tensor.memory.any()
            outside = PromisedLoad(7, kept.slots, (3, 5), sums)
            with pytest.raises(PromiseBroken, match="not in the pool"):
                side.start(PromisePlan(3, keeper.slot_bytes, (outside,)))
            flipped = memory.view(kept.slots[1] * keeper.slot_bytes + part.stop - 1, 1)
            flipped[0] ^= 1
            with pytest.raises(PromiseBroken, match="not what was promised"):
                side.start(PromisePlan(4, keeper.slot_bytes, plan.loads))
            assert side.counts["promises_corrupt"] == 1
            refused = list(plan.loads[0].blocks)
            assert not blocks[refused].any(), "bytes that were refused stay in device memory"
            flipped[0] ^= 1
            side.close()
        memory.close()
        keeper.close()


def test_refused_bytes_are_zeroed_in_a_thread_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's own keeps its way of capturing graphs, which ours change."""
    settings = Settings.load({}, {"shm_dir": tmp_path, "runtime_dir": tmp_path})
    life, size = Life("0" * 16, args_of()), PART_BYTES
    with Arena.create(tmp_path, "arena", size) as arena:
        arena.array[:] = 7
        sums = part_checksums(arena.view(0, size), ONE_PART)
        keeper = PromiseKeeper(tmp_path, life.incarnation, 1 << 16)
        load = Load(
            request="r", epoch=1, lease=1, slots=(0,), blocks=(0,), hashes=(name(1),),
            checksums=(sums,), block_bytes=size, deadline_ms=1 << 60,
        )  # fmt: skip
        assert keeper.room(size)
        kept = keeper.keep(load, 1, arena, size)
    runtime = FakeRuntime(seed=1)
    side, tensor = WorkerSide(life, NAMESPACE, settings), GpuPool(runtime)
    side.register(regions_of_tensor(tensor), partial(Gpu, runtime))
    threads, enter = [], FakeRuntime.enter

    def entered(self: FakeRuntime) -> None:
        threads.append(threading.current_thread())
        enter(self)

    monkeypatch.setattr(FakeRuntime, "enter", entered)
    tensor.memory[:] = 1
    wrong = PromisedLoad(7, kept.slots, (3,), (sums[::-1],))
    with pytest.raises(PromiseBroken, match="not what was promised"):
        side.start(PromisePlan(1, keeper.slot_bytes, (wrong,)))
    assert not tensor.memory.reshape(5, -1)[3].any()
    assert side.counts["cleared_blocks"] == 1
    assert threads
    assert threading.current_thread() not in threads
    side.close()
    keeper.close()


@pytest.mark.parametrize(
    ("local", "tokens", "kept", "cut"),
    [(0, (0, 16), (), (1, 2, 3, 4)), (0, (8, 16), (1, 2), (3, 4)), (0, (0, 4), (2, 3, 4), (1,)),
     (2, (8, 16), (3, 4), (1, 2)), (2, (12, 24), (1,), (2, 3, 4)),
     (0, (8, 8), (1, 2, 3, 4), ()), (0, (1, 4), (1, 2, 3, 4), ()),
     (0, (0, 5), (2, 3, 4), (1,)), (2, (0, 8), (1, 2, 3, 4), ())],
)  # fmt: skip
def test_what_is_taken_back_of_an_offer(
    local: int, tokens: tuple[int, int], kept: tuple[int, ...], cut: tuple[int, ...]
) -> None:
    """Of four promised blocks of four tokens: whole ones only, and the rest stays where it is."""
    request = PromisedRequest(local=local, promised=(1, 2, 3, 4))
    assert request.cut(*tokens, 4) == cut
    assert request.promised == kept
    assert request.local == local + (len(cut) if kept and kept[-1] == 4 else 0)
