"""Plants: defects that the fuzzer must find, put back by replacing methods of the product.

Each is the behaviour from before a defect was mended, or a mistake that one might make: `engine.py`
plants in engines, `sitecustomize.py` in services. Only KVBM_FUZZ_PLANT says which; the product
does not know that variable. Where the product has other methods by now, adapt them here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.vllm.fuzz.offer_plants import (
    keep_offers_of_a_reset,
    keep_offers_of_preempted,
    offer_before_marks,
    offer_everything_early,
    offer_unfinished,
)
from tests.vllm.fuzz.patches import add, original, replace, replace_if_there, restore

if TYPE_CHECKING:  # A name that the product has changed is seen without vLLM.
    from kvbm_common.tier.kv_groups import GroupRun
    from kvbm_connectors.vllm.kv_groups import KvGroup

VARIABLE = "KVBM_FUZZ_PLANT"
PREFIX = "kvbm_connectors."


def nothing() -> None:
    """Not here."""


@dataclass(frozen=True)
class Plant:
    """One defect."""

    what: str
    shapes: tuple[str, ...]
    """Those whose programs can show it."""
    before: Callable[[], None] = nothing
    """In an engine's process, before the engine is made."""
    service: Callable[[], None] = nothing
    """In every service: its lane has a stack of its own."""
    restarts: bool = False
    """It must be there when an engine starts."""
    often: tuple[str, ...] = ()
    """Acts without which it cannot show, and which few programs have: drawn often for it."""


# --- KV groups --------------------------------------------------------------------------------


def hold_nothing() -> None:
    """Blocks that leave their window while they are on offer are overwritten while read."""

    def count(self: Any, blocks: Sequence[int]) -> None:
        self._count += len(blocks)

    def forget(self: Any, blocks: Sequence[int]) -> None:
        self._count -= len(blocks)

    replace(f"{PREFIX}vllm.block_holds", "BlockHolds", "hold", count)
    replace(f"{PREFIX}vllm.block_holds", "BlockHolds", "release", forget)


def shorten_windows() -> None:
    """A hit brings one block of a window too few."""
    blocks = original(f"{PREFIX}vllm.kv_groups", "", "window_blocks")

    def fewer(spec: Any) -> int:
        count = int(blocks(spec))
        return max(1, count - 1) if count else 0

    replace(f"{PREFIX}vllm.kv_groups", "", "window_blocks", fewer)


def shorten_chunks() -> None:
    """A hit brings one block of a chunk too few."""
    needed = original(f"{PREFIX}vllm.kv_groups", "KvGroup", "needed_indices")
    first = original("kvbm_common.tier.kv_groups", "GroupRun", "first_needed")

    def fewer(self: KvGroup, begin: int, end: int) -> range:
        found: range = needed(self, begin, end)
        return range(min(found.start + bool(self.chunk_tokens), found.stop), found.stop)

    def later(self: GroupRun, tokens: int) -> int:
        index, end = int(first(self, tokens)), tokens // self.block_tokens
        return min(index + 1, end) if self.chunk_tokens else index

    replace("kvbm_common.tier.kv_groups", "GroupRun", "first_needed", later)
    replace(f"{PREFIX}vllm.kv_groups", "KvGroup", "needed_indices", fewer)


def store_states_of_another_boundary() -> None:
    """A recurrent state is stored as the one a block later."""
    hold = original(f"{PREFIX}vllm.device_offers", "DeviceOffers", "_hold_states")

    def later(self: Any, tracked: Any, handed: Any) -> None:
        sizes = {group.table: group.block_tokens for group in self._groups}
        moved = [(at, block, tokens + sizes[at]) for at, block, tokens in handed if at in sizes]
        hold(self, tracked, moved)

    replace(f"{PREFIX}vllm.device_offers", "DeviceOffers", "_hold_states", later)


def hit_states_alone() -> None:
    """A hit brings the last block of each group: the state, and not the KV before it."""
    from dataclasses import replace as changed

    _change_groups(lambda group, first: changed(group, window_blocks=1, chunk_tokens=0))


def share_a_block_size() -> None:
    """Every group's blocks are named as if they had as many tokens as the first one's."""
    from dataclasses import replace as changed

    from kvbm_common.identity import Hasher
    from msgspec import structs

    def alike(group: KvGroup, first: KvGroup) -> KvGroup:
        size = first.block_tokens
        own = structs.replace(group.hasher.namespace, block_tokens=size)
        return changed(group, hasher=Hasher(own))

    _change_groups(alike)


def _change_groups(change: Callable[[KvGroup, KvGroup], KvGroup]) -> None:
    """Change every KV group of an engine; `change` is given the first one, too."""
    groups = original(f"{PREFIX}vllm.kv_groups", "", "groups_of")

    def changed(*arguments: Any) -> Any:
        found = groups(*arguments)
        return tuple(change(group, found[0]) for group in found)

    replace(f"{PREFIX}vllm.kv_groups", "", "groups_of", changed)
    replace(f"{PREFIX}vllm.connector", "", "groups_of", changed)


def hold_what_waits() -> None:
    """Blocks that are held of a request without a step are offered with its next one: it may wait
    for them."""
    replace(
        f"{PREFIX}vllm.device_offers", "DeviceOffers", "offer_of_others",
        lambda self, requests, scheduled: None,
    )  # fmt: skip


def load_again() -> None:
    """A request whose load over several groups has failed is loaded once more: vLLM puts it before
    those that have their blocks, and may wait for room for ever."""
    loaded = original(f"{PREFIX}vllm.scheduler_side", "SchedulerSide", "_loaded")

    def again(self: Any, result: Any) -> None:
        loaded(self, result)
        tracked = self._requests.get(result.load.request)
        if tracked is not None:
            tracked.unloadable = False

    replace(f"{PREFIX}vllm.scheduler_side", "SchedulerSide", "_loaded", again)


def report_no_failed_request() -> None:
    """A load over several groups that failed is taken for one that has ended well."""
    replace(f"{PREFIX}vllm.worker_side", "WorkerSide", "failed", lambda self: set())


# --- loads ------------------------------------------------------------------------------------


def leave_refused_bytes() -> None:
    """What was refused stays in device memory."""
    replace_if_there(f"{PREFIX}client.pulls", "Pulls", "_clear", lambda self, blocks: None)


def verify_few() -> None:
    """One load in 16 is verified."""
    every = property(lambda self: 16)
    replace(f"{PREFIX}client.engine_options", "EngineOptions", "verify_every", every)


def verify_none() -> None:
    """No load is verified; on several ranks that was so by default."""
    every = property(lambda self: 0)
    replace(f"{PREFIX}client.engine_options", "EngineOptions", "verify_every", every)


def load_into_another_group() -> None:
    """A load over several KV groups writes its first block where its last one belongs."""
    from dataclasses import replace as changed

    begin = original(f"{PREFIX}client.pulls", "Pulls", "begin")

    def swapped(self: Any, load: Any, *arguments: Any) -> None:
        first, *middle, last = load.blocks if len(load.blocks) > 1 else (*load.blocks, None)
        turned = load if last is None else changed(load, blocks=(last, *middle, first))
        begin(self, turned, *arguments)

    replace(f"{PREFIX}client.pulls", "Pulls", "begin", swapped)


def believe_every_checksum() -> None:
    """What was loaded is summed up, and every sum is found right."""
    replace(f"{PREFIX}client.pulls", "Pulls", "_wrong", lambda self, *arguments: set())


def fail_requests() -> None:
    """A failed load ends its request: vLLM's default policy."""
    scheduler = "vllm.v1.core.sched.scheduler"
    fails = property(lambda self: False, lambda self, value: None)
    add(scheduler, "Scheduler", "recompute_kv_load_failures", fails)


def lose_loads() -> None:
    """Now and then the end of a load is not told."""
    arrived, count = original(f"{PREFIX}vllm.worker_side", "WorkerSide", "arrived"), [0]

    def some(self: Any) -> set[str]:
        names: set[str] = arrived(self)
        count[0] += bool(names)
        return set() if names and count[0] % 5 == 0 else names

    replace(f"{PREFIX}vllm.worker_side", "WorkerSide", "arrived", some)


def load_for_ever() -> None:
    """A read that its owner does not serve has no deadline: its load ends with the owner."""
    read = original(f"{PREFIX}client.arena_reader", "NixlReader", "read")

    def unbounded(self: Any, *arguments: Any, deadline_s: float, **more: Any) -> Any:
        return read(self, *arguments, deadline_s=100_000.0, **more)

    replace(f"{PREFIX}client.arena_reader", "NixlReader", "read", unbounded)


# --- names ------------------------------------------------------------------------------------


def refuse_resets() -> None:
    """A reset of the connector's cache is refused, and nothing is another name after it."""
    replace(f"{PREFIX}vllm.connector", "KvbmConnector", "reset_cache", lambda self: False)


def ignore_resets() -> None:
    """The same, but it says that it was done."""
    replace(f"{PREFIX}vllm.connector", "KvbmConnector", "reset_cache", lambda self: True)


def name_adapters_by_name() -> None:
    """An adapter's content is not in a name."""
    replace_if_there(
        f"{PREFIX}vllm.adapters", "Adapters", "value_of", lambda self, lora: lora.lora_name
    )


def name_weights_by_times() -> None:
    """A checkpoint is known by sizes and times of its files."""
    import hashlib
    from pathlib import Path

    def fingerprint(directory: Path) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for path in sorted(Path(directory).iterdir()):
            if path.is_file() and path.suffix in (".safetensors", ".json"):
                stat = path.stat()
                digest.update(f"{path.name}:{stat.st_size}:{stat.st_mtime_ns};".encode())
        return digest.hexdigest()

    replace(f"{PREFIX}client.weights", "", "fingerprint", fingerprint)
    replace(f"{PREFIX}vllm.loading", "", "fingerprint", fingerprint)


# --- services ---------------------------------------------------------------------------------


def promise_memory() -> None:
    """The arena has holes: the kernel ends who touches one when memory is full."""
    replace_if_there("kvbm_common.memory.arena", "Arena", "_allocate", _leave_holes)


def _leave_holes(self: Any, *_arguments: Any, **_more: Any) -> None:
    os.ftruncate(self._fd, self.bytes)
    self._allocated = True


CHUNKED = ("chunked",)
DEVICE: tuple[str, ...] = ()
"""Plants that need a device of ours: `test_device.py` or `test_device_tiers.py` shows them."""
PLANTS = {
    "unfinished-offers": Plant(
        "blocks are offered while they are computed", CHUNKED, before=offer_unfinished
    ),
    "early-offers": Plant(
        "blocks are offered before their step has run", CHUNKED, before=offer_everything_early
    ),
    "refused-bytes": Plant(
        "a refused load leaves its bytes", CHUNKED, before=leave_refused_bytes
    ),
    "lost-loads": Plant("the end of a load is not told", CHUNKED, before=lose_loads),
    "refused-reset": Plant("a reset is refused", CHUNKED, before=refuse_resets),
    "ignored-reset": Plant(
        "a reset does nothing", CHUNKED, before=ignore_resets, often=("weights",)
    ),
    "sampled": Plant("one load in 16 is verified", CHUNKED, before=verify_few, restarts=True),
    "fail-policy": Plant(
        "a failed load ends its request", CHUNKED, before=fail_requests, restarts=True
    ),
    "weights-times": Plant(
        "weights are their times", CHUNKED, before=name_weights_by_times, restarts=True,
        often=("fine-tune",),
    ),
    "promised-memory": Plant(
        "the arena has holes", CHUNKED, service=promise_memory, restarts=True,
        often=("fill memory",),
    ),
    "adapter-names": Plant(
        "an adapter is its name", ("lora",), before=name_adapters_by_name
    ),
    "kept-offers": Plant(
        "offers of preempted requests stand", ("tiny",), before=keep_offers_of_preempted,
        often=("pause",),
    ),
    "endless-load": Plant(
        "a load has no deadline", ("nixl",), before=load_for_ever, often=("stop",)
    ),
    "unheld-windows": Plant(
        "blocks that leave their window are not held", ("hybrid-tiny",), before=hold_nothing,
        restarts=True,
    ),
    "short-windows": Plant(
        "a window is a block too short", ("hybrid",), before=shorten_windows, restarts=True
    ),
    "unreported-loads": Plant(
        "a failed load of several groups is not told", ("hybrid",),
        before=report_no_failed_request, often=("corrupt arena",),
    ),
    "short-chunks": Plant(
        "a chunk is a block too short", ("chunks",), before=shorten_chunks, restarts=True
    ),
    "later-states": Plant(
        "a state is stored for another boundary", ("states",),
        before=store_states_of_another_boundary, restarts=True,
    ),
    "states-alone": Plant(
        "a state is loaded without its KV", ("states",), before=hit_states_alone, restarts=True
    ),
    "one-size": Plant(
        "groups are named with one block size", ("sizes",), before=share_a_block_size,
        restarts=True,
    ),
    "waiting-windows": Plant(
        "held blocks wait for their request", DEVICE, before=hold_what_waits,
    ),
    "early-drafts": Plant(
        "what a draft model still writes is offered", DEVICE, before=offer_before_marks,
    ),
    "freed-offers": Plant(
        "blocks that a reset has freed are offered on", DEVICE, before=keep_offers_of_a_reset,
    ),
    "second-loads": Plant(
        "a load of several groups that failed is tried again", DEVICE, before=load_again,
    ),
    "wrong-groups": Plant(
        "a load writes into another group's block", DEVICE, before=load_into_another_group,
    ),
    "believed-sums": Plant(
        "every checksum is found right", DEVICE, before=believe_every_checksum,
    ),
    "unverified": Plant(
        "no rank of two verifies", ("tp2",), before=verify_none, restarts=True,
        often=("corrupt arena",),
    ),
}  # fmt: skip


def arrange(name: str | None = None) -> None:
    """Put in place the named plant, or that of the environment, and take away what was there."""
    restore()
    name = os.environ.get(VARIABLE, "") if name is None else name
    plant = PLANTS[name] if name else None
    if plant is not None:
        plant.before()


def plant_service() -> None:
    """In a service, what the environment names."""
    name = os.environ.get(VARIABLE, "")
    if name:
        PLANTS[name].service()
