"""One rank of SGLang, as far as storage goes: its real factory and host pools, driven by a test.

Run it in the environment that `make_env.py` makes. Commands come on stdin, replies go to stdout.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
from kvbm_connectors.sglang import generation, options

from tests.sglang import hollow
from tests.sglang.conversation import Command, Pool, Reply
from tests.sglang.plants import PLANTS

hollow.install()

import torch  # noqa: E402
from sglang.srt import runtime_context  # noqa: E402
from sglang.srt.disaggregation import kv_events  # noqa: E402
from sglang.srt.mem_cache import device_pool_info  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import (  # noqa: E402
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost  # noqa: E402
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.storage import StorageBackendFactory  # noqa: E402
from sglang.srt.mem_cache.utils import get_hash_str  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402

from tests.sglang import controller as controllers  # noqa: E402
from tests.sglang import tree as trees  # noqa: E402
from tests.sglang.bench_rank import ask, measure  # noqa: E402

ATTACH_S = 20.0
THREADS = 8
DTYPE = torch.bfloat16


def make_pool(spec: Pool) -> Any:
    """A real host pool in unpinned memory; the device's buffers are tiny and never used."""
    tokens = (spec.pages - 1) * spec.page_size  # The pool adds a page.
    common: dict[str, Any] = {
        "host_to_device_ratio": 1.0, "host_size": 0, "layout": spec.layout, "pin_memory": False,
        "device": "cpu",
    }  # fmt: skip
    layers = tuple(
        torch.zeros(1, spec.heads, spec.head_dim, dtype=DTYPE) for _ in range(spec.layers)
    )
    pointers = torch.zeros(spec.layers, dtype=torch.uint64)
    if spec.kind == "mha":
        info = device_pool_info.MHABufferInfo(
            buffers=device_pool_info.KVBuffers(
                k=layers, v=layers, k_data_ptrs=pointers, v_data_ptrs=pointers,
                layout=device_pool_info.KVBufferLayout.NHD,
            ),
            page_size=spec.page_size, head_num=spec.heads, head_dim=spec.head_dim,
            v_head_dim=spec.head_dim, dtype=DTYPE, device=torch.device("cpu"),
        )  # fmt: skip
        return MHATokenToKVPoolHost(
            info, page_size=spec.page_size, device_capacity_tokens=tokens, start_layer=0,
            end_layer=spec.layers, **common,
        )  # fmt: skip
    if spec.kind == "mla":
        rank, rope = spec.head_dim - 16, 16
        rows = tuple(torch.zeros(1, 1, spec.head_dim, dtype=DTYPE) for _ in range(spec.layers))
        mla = device_pool_info.MLABufferInfo(
            buffers=rows, data_ptrs=pointers, layer_indices=tuple(range(spec.layers)),
            device_layer_num=spec.layers, page_size=spec.page_size, kv_lora_rank=rank,
            qk_rope_head_dim=rope, kv_cache_dim=spec.head_dim, dtype=DTYPE,
            device=torch.device("cpu"),
        )  # fmt: skip
        return MLATokenToKVPoolHost(
            mla, page_size=spec.page_size, device_capacity_tokens=tokens, start_layer=0,
            end_layer=spec.layers, target_layer_num=spec.layers, **common,
        )  # fmt: skip
    states = device_pool_info.MambaStateBufferInfo(
        temporal=torch.zeros(spec.layers, 2, spec.heads, spec.head_dim),
        conv=(torch.zeros(spec.layers, 2, spec.head_dim, dtype=DTYPE),),
    )
    return MambaPoolHost(states, device_capacity=spec.pages - 1, **common)


class Rank:
    """The storage that is attached, and its pools."""

    def __init__(self) -> None:
        self.pools: dict[str, Any] = {}
        self.specs: dict[str, Pool] = {}
        self.backend: Any = None
        self.controller: Any = None
        self.publisher: Any = None
        self.tree: Any = None
        self.counting = threading.Lock()

    def attach(self, command: Command) -> Reply:
        """As HiCacheController and its hybrid kind do it. Pools outlive a storage."""
        kv = self._prepare(command)
        fields: dict[str, Any] = {
            "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0,
            "attn_cp_size": 1, "is_mla_model": self.specs["kv"].kind == "mla",
            "enable_storage_metrics": True, "is_page_first_layout": kv.layout == "page_first",
            "model_name": "tiny", "extra_config": dict(command.extra),
        }  # fmt: skip
        config = HiCacheStorageConfig(**(fields | command.config))
        self.backend = StorageBackendFactory.create_backend(command.backend, config, kv)
        self.backend.register_mem_pool_host(kv)
        for name in command.pools if len(command.pools) > 1 else ():
            self.backend.register_mem_host_pool_v2(self.pools[name], PoolName(name))
        self.backend.on_host_pools_registered()
        return Reply(flags=[command.backend != "dynamic" or self.storage.wait_attached(ATTACH_S)])

    def _prepare(self, command: Command) -> Any:
        """Take the server's arguments and make the pools; return that of KV."""
        arguments = SimpleNamespace(**command.arguments) if command.arguments else None
        runtime_context.get_server_args = lambda: arguments
        for name, spec in command.pools.items():
            if self.specs.get(name) != spec:
                self.pools[name], self.specs[name] = make_pool(spec), spec
        return self.pools["kv"]

    def control(self, command: Command) -> Reply:
        """Attach by SGLang's cache controller, whose threads then call the storage."""
        kv = self._prepare(command)
        self.controller = controllers.make_controller(
            kv, is_latent=self.specs["kv"].kind == "mla", ranks=command.config,
            backend=command.backend, extra=command.extra,
        )  # fmt: skip
        self.backend = self.controller.storage_backend
        return Reply(flags=[self.storage.wait_attached(ATTACH_S)])

    def back_up(self, command: Command) -> Reply:
        slots, wait = self.slots(command), command.rounds > 0
        return Reply(number=controllers.back_up(self.controller, command.tokens, slots, wait))

    def prefetch(self, command: Command) -> Reply:
        slots, wait = self.slots(command), command.rounds > 0
        return Reply(number=controllers.prefetch(self.controller, command.tokens, slots, wait))

    def flush(self, command: Command) -> Reply:
        controllers.flush(self.controller)
        return Reply()

    def serve(self, command: Command) -> Reply:
        """Publish SGLang's configuration in this process, as a scheduler's."""
        runtime_context.publish(ServerArgs(**command.arguments), role="scheduler")
        return Reply()

    def note_weights(self, command: Command) -> Reply:
        """Note other weights as SGLang's scheduler and model runner do after an update."""
        runtime_context.get_context().override("a test", **command.arguments)
        return Reply()

    def push(self, command: Command) -> Reply:
        controllers.push(command.keys[0])
        return Reply()

    def release(self, command: Command) -> Reply:
        self.controller.detach_storage_backend()
        self.controller = self.backend = None
        return Reply()

    @property
    def storage(self) -> Any:
        """Ours, behind the fault injector if there is one."""
        return getattr(self.backend, "_backend", self.backend).storage

    def slots(self, command: Command) -> torch.Tensor:
        size = self.pools[command.pool].page_size
        pages = torch.tensor(command.pages, dtype=torch.int64)
        return (pages[:, None] * size + torch.arange(size)).reshape(-1)

    def fill(self, command: Command) -> Reply:
        pool = self.pools[command.pool]
        for page, seed in zip(command.pages, command.seeds, strict=True):
            pool.set_from_flat_data_page(page * pool.page_size, content(pool, seed))
        return Reply()

    def holds(self, command: Command) -> Reply:
        """By SGLang's own way to read a page."""
        pool = self.pools[command.pool]
        found = []
        for page, seed in zip(command.pages, command.seeds, strict=True):
            there = pool.get_data_page(page * pool.page_size, flat=True)
            expected = content(pool, seed)
            found.append(torch.equal(as_bytes(there), as_bytes(expected)))
        return Reply(flags=found)

    def set(self, command: Command) -> Reply:
        extra = HiCacheStorageExtraInfo()
        return Reply(flags=self.backend.batch_set_v1(command.keys, self.slots(command), extra))

    def get(self, command: Command) -> Reply:
        extra = HiCacheStorageExtraInfo()
        return Reply(flags=self.backend.batch_get_v1(command.keys, self.slots(command), extra))

    def exists(self, command: Command) -> Reply:
        return Reply(number=self.backend.batch_exists(command.keys, HiCacheStorageExtraInfo()))

    def transfer(self, command: Command) -> PoolTransfer:
        policy = PoolHitPolicy.TRAILING_PAGES if command.window else PoolHitPolicy.ALL_PAGES
        keys = command.keys[-command.window :] if command.window else command.keys
        slots = self.slots(command) if command.pages else None
        return PoolTransfer(
            name=PoolName(command.pool), keys=keys, host_indices=slots, hit_policy=policy
        )

    def set_v2(self, command: Command) -> Reply:
        found = self.backend.batch_set_v2([self.transfer(command)], HiCacheStorageExtraInfo())
        return Reply(flags=found[PoolName(command.pool)])

    def get_v2(self, command: Command) -> Reply:
        found = self.backend.batch_get_v2([self.transfer(command)], HiCacheStorageExtraInfo())
        return Reply(flags=found[PoolName(command.pool)])

    def exists_v2(self, command: Command) -> Reply:
        found = self.backend.batch_exists_v2(
            command.keys, [self.transfer(command)], HiCacheStorageExtraInfo()
        )
        return Reply(
            number=found.kv_hit_pages, lengths=found.restorable_prefix_pages,
            counts={str(name): n for name, n in found.extra_pool_hit_pages.items()},
        )  # fmt: skip

    def threads(self, command: Command) -> Reply:
        """Eight threads on pages of their own: what each batch came to, in pages."""
        counts: Counter[str] = Counter()
        size = len(command.pages) // THREADS
        workers = [
            threading.Thread(target=self._one_thread, args=(command, number, size, counts))
            for number in range(THREADS)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return Reply(counts=dict(counts))

    def _one_thread(self, command: Command, number: int, size: int, counts: Counter[str]) -> None:
        own = command.pages[number * size : (number + 1) * size]
        for turn in range(command.rounds):
            seeds = [10_000 * number + 100 * turn + page for page in range(size)]
            this = Command(
                what="", keys=[f"{command.keys[0]}-{s}" for s in seeds], pages=own, seeds=seeds
            )
            self.fill(this)
            stored = sum(self.set(this).flags)
            found = self.exists(this).number
            self.fill(Command(what="", pages=own, seeds=[7] * size))
            loaded, right = self.get(this).flags, self.holds(this).flags
            with self.counting:
                counts["asked"] += size
                counts["stored"] += stored
                counts["found"] += found
                counts["loaded"] += sum(loaded)
                counts["wrong"] += sum(
                    here and not same for here, same in zip(loaded, right, strict=True)
                )

    def publish(self, command: Command) -> Reply:
        """SGLang's own publisher says one of three things of a sequence."""
        if self.publisher is None:
            config = json.dumps(command.extra)
            self.publisher = kv_events.EventPublisherFactory.create(config)
        tokens, size = command.seeds, self.pools["kv"].page_size
        keys = get_hash_str_pages(tokens, size)
        hashes = [int.from_bytes(bytes.fromhex(key[:16]), "big", signed=True) for key in keys]
        stored = kv_events.BlockStored(
            block_hashes=hashes, parent_block_hash=None, token_ids=tokens, block_size=size,
            lora_id=None, medium="GPU",
        )  # fmt: skip
        mirror = kv_events.BlockStored(
            block_hashes=hashes, parent_block_hash=None, token_ids=tokens, block_size=size,
            lora_id=None, medium="CPU_PINNED",
        )  # fmt: skip
        removed = kv_events.BlockRemoved(block_hashes=hashes[-1:], medium="GPU")
        event = (stored, mirror, removed)[command.rounds - 1]
        self.publisher.publish(kv_events.KVEventBatch(ts=time.time(), events=[event]))
        return Reply(number=min(hashes), flags=[value < 0 for value in hashes])

    def cache(self, command: Command) -> Reply:
        """Have SGLang's tree cache some prompts, and its publisher say so: one batch."""
        config, page_size = json.dumps(command.extra), self.pools["kv"].page_size
        if self.publisher is None:
            self.publisher = kv_events.EventPublisherFactory.create(config)
            is_dynamo = kv_events.uses_dynamo_format(config)
            self.tree = trees.make_tree(page_size=page_size, is_dynamo=is_dynamo)
        for prompt in command.prompts:
            trees.cache(self.tree, prompt)
        events = self.tree.kv_events.take()
        self.publisher.publish(kv_events.KVEventBatch(ts=time.time(), events=events))
        return Reply(number=len(events))

    def follow(self, command: Command) -> Reply:
        """Compare the endpoint that we follow with that of SGLang's own publisher."""
        config = json.dumps(command.extra)
        publisher = kv_events.EventPublisherFactory.create(config)
        source = publisher.describe_local_source(block_size=16) or {"endpoint": ""}
        publisher.shutdown()
        return Reply(flags=[options.stream_of(config, 0).endpoint == source["endpoint"]])

    def clear(self, command: Command) -> Reply:
        self.backend.clear()
        return Reply()

    def begin_again(self, command: Command) -> Reply:
        """As after another start of the engine, with the weights that it has now: it has cleared
        nothing yet."""
        generation.CLEARED.clear()
        return Reply()

    def counts(self, command: Command) -> Reply:
        stats = self.backend.get_stats()
        pages = {"prefetch_pgs": sum(stats.prefetch_pgs), "backup_pgs": sum(stats.backup_pgs)}
        return Reply(counts=self.storage.all_counts() | pages)

    def wait(self, command: Command) -> Reply:
        return Reply(flags=[self.storage.wait_attached(ATTACH_S)])

    def detach(self, command: Command) -> Reply:
        self.backend.close()
        self.backend = None
        return Reply(number=threading.active_count())

    def bench(self, command: Command) -> Reply:
        return Reply(rates=measure(self.backend, self.pools["kv"], command))

    def bench_exists(self, command: Command) -> Reply:
        return Reply(rates={"exists": ask(self.backend, command)})


def get_hash_str_pages(tokens: Sequence[int], size: int) -> list[str]:
    """The page keys of a sequence, by SGLang's function."""
    keys: list[str] = []
    for start in range(0, len(tokens), size):
        keys.append(get_hash_str(tokens[start : start + size], keys[-1] if keys else None))
    return keys


def content(pool: Any, seed: int) -> torch.Tensor:
    """A flat page that only this seed gives."""
    page = pool.get_dummy_flat_data_page()
    generator = torch.Generator().manual_seed(seed)
    size = page.numel() * page.element_size()
    random = torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)
    return random.view(page.dtype)


def as_bytes(page: torch.Tensor) -> torch.Tensor:
    return page.contiguous().view(torch.uint8)


def answer(rank: Rank, command: Command) -> Reply:
    """Carry a command out; what it raises is an answer too."""
    try:
        reply: Reply = getattr(rank, command.what)(command)
        return reply
    except Exception as error:
        logging.getLogger(__name__).exception("%s failed", command.what)
        return Reply(error=f"{type(error).__name__}: {error}")


def main(arguments: Sequence[str]) -> None:
    logging.basicConfig(level=logging.INFO)
    faulthandler.register(signal.SIGUSR1)
    if plant := os.environ.get("KVBM_TEST_PLANT"):
        PLANTS[plant]()
    rank = Rank()
    for line in sys.stdin.buffer:
        reply = answer(rank, msgspec.json.decode(line, type=Command))
        sys.stdout.buffer.write(msgspec.json.encode(reply) + b"\n")
        sys.stdout.buffer.flush()
    if rank.backend is not None:
        rank.backend.close()


if __name__ == "__main__":
    main(sys.argv[1:])
