"""TensorRT-LLM's executor around our two halves: its calls in its order, on real memory.

One step, as `PyExecutor._executor_loop` of release 1.2 does it (py_executor.py, resource_manager.py
and kv_cache_connector.py):

    prepare_resources    per new request: the device's own match, get_num_new_matched_tokens,
                         update_state_after_alloc; then SchedulerOutput for all that are scheduled
    start_batch          build_connector_meta on rank 0, broadcast (pickled), bind, start_load_kv
    forward              per layer wait_for_layer_load and save_kv_layer; wait_for_save
    update               tokens; request_finished for who is done; who was cancelled is freed
                         without a word
    terminate            get_finished on every rank; who all ranks have named is unpinned

With `deferred` a request is asked about some steps before it is scheduled, and with `honoured` the
engine takes less than it was promised, and says so: the V2 manager of the 1.3 candidates (its docs/
source/features/kv-cache-connector.md, "Serving a prefix on KVCacheManagerV2").

The model is replaced by bytes that follow from the tokens before them: before a request computes,
everything that it looks back on is compared with what it must be.
"""

from __future__ import annotations

import hashlib
import pickle
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from kvbm_common.identity import SequenceHash
from kvbm_connectors.sim.paged import BlockPool
from kvbm_connectors.sim.pages import Content

BLOCK_TOKENS = 4
LAYERS, KV_FACTOR, WORDS = 2, 2, 8
PART_BYTES = LAYERS * KV_FACTOR * WORDS * 8


@dataclass
class LlmRequest:
    """What `LlmRequest` shows of a request."""

    request_id: int
    tokens: list[int]
    output: list[int]
    """What it will generate, token by token."""
    cache_salt: str | None = None
    cache_salt_id: int | None = None
    lora_task_id: int | None = None
    multimodal_positions: list[int] | None = None
    priorities: list[int] | None = None
    """By block; of the retention configuration."""
    deferred: int = 0
    """Steps between the question and the first step."""
    honoured: int | None = None
    """Tokens of the promise that the engine has room for; None: all."""
    prompt_len: int = 0
    blocks: list[int] = field(default_factory=list)
    position: int = 0
    """`context_current_position`: tokens whose KV is there."""
    local: list[int] | None = None
    """Blocks of the device's own match, held since the connector was asked; None: not yet."""
    device_hit: int = 0
    external: int = 0
    cancelled: bool = False
    done: bool = False
    reported: int = 0

    def __post_init__(self) -> None:
        self.prompt_len = self.prompt_len or len(self.tokens)

    def get_tokens(self, beam: int) -> list[int]:
        assert beam == 0
        return list(self.tokens)


@dataclass
class RequestData:
    """Of kv_cache_connector.py."""

    request_id: int
    new_tokens: list[int]
    new_block_ids: list[int]
    computed_position: int
    num_scheduled_tokens: int
    priorities: list[int] | None = None


@dataclass
class SchedulerOutput:
    """Of kv_cache_connector.py."""

    new_requests: list[RequestData] = field(default_factory=list)
    cached_requests: list[RequestData] = field(default_factory=list)


class Tensor:
    """The KV pool of one rank, as torch shows it: [blocks, layers, K and V, rest]."""

    def __init__(self, block_count: int, device: str = "cpu") -> None:
        shape = (block_count, LAYERS, KV_FACTOR, WORDS)
        self.memory = np.zeros(shape, dtype=np.uint64)
        self.shape = shape
        self.device = type("Device", (), {"type": device})()

    def stride(self) -> tuple[int, ...]:
        return tuple(step // 8 for step in self.memory.strides)

    def element_size(self) -> int:
        return 8

    def data_ptr(self) -> int:
        return self.memory.ctypes.data


def truth(tokens: Sequence[int], salt: object) -> SequenceHash:
    """What a block is, by the engine's own account: all tokens up to its end, and the salt."""
    text = f"{salt}/{','.join(map(str, tokens))}"
    return SequenceHash(hashlib.blake2b(text.encode(), digest_size=16).digest())


def _block_count(request: LlmRequest) -> int:
    """Blocks of a whole request, from its prompt to its last token."""
    return -(-(request.prompt_len + len(request.output)) // BLOCK_TOKENS)


class Executor:
    """One engine of one or several ranks, in one process and one thread."""

    def __init__(
        self,
        leader: Any,
        workers: Sequence[Any],
        *,
        blocks: int = 64,
        chunk_tokens: int = 1 << 20,
        overtake: bool = False,
        rematch: bool = False,
    ) -> None:
        """`chunk_tokens` is the length of a prefill's chunks. `overtake`: the ranks' answers of
        every other step come too late for that step. `rematch`: a request that has waited looks
        for its beginning on the device again, as under `aggressive_prefix_budgeting`."""
        self.leader, self.workers = leader, list(workers)
        self.pool = BlockPool(blocks)
        self.tensors = [Tensor(blocks) for _ in workers]
        self._content = [Content(PART_BYTES, rank=rank) for rank in range(len(self.workers))]
        self._chunk_tokens = chunk_tokens
        self._overtake = overtake
        self._rematch = rematch
        self.waiting: list[LlmRequest] = []
        self.active: list[LlmRequest] = []
        self.saving: dict[int, list[int]] = {}
        """Requests whose blocks are pinned until all ranks have named them."""
        self._new_saving: list[int] = []
        self._named: list[set[int]] = [set() for _ in workers]
        self.steps = 0
        self.compared = 0
        self.counts: Counter[str] = Counter()
        for worker, tensor in zip(self.workers, self.tensors, strict=True):
            assert worker.register_forward_pass_callable() is None
            worker.register_kv_caches(tensor)

    # --- the loop ---------------------------------------------------------------------------

    def submit(self, request: LlmRequest) -> LlmRequest:
        self.waiting.append(request)
        return request

    def step(self) -> None:
        """One iteration of the loop."""
        self.steps += 1
        scheduled = self._schedule()
        if scheduled:
            output = self._prepare(scheduled)
            plan = pickle.dumps(self.leader.build_connector_meta(output))
            for worker in self.workers:
                worker.bind_connector_meta(pickle.loads(plan))
                worker.start_load_kv(None)
            self._forward(scheduled)
            self._update(scheduled)
        self._terminate()
        self.pool.check()

    def _schedule(self) -> list[LlmRequest]:
        """GUARANTEED_NO_EVICT: a request begins when all its blocks are free."""
        free = self.pool.free_count
        free -= sum(_block_count(request) for request in self.active if not request.blocks)
        while self.waiting:
            free -= _block_count(self.waiting[0])
            if free < 0:
                break
            self.active.append(self.waiting.pop(0))
        return list(self.active)

    def _prepare(self, scheduled: Sequence[LlmRequest]) -> SchedulerOutput:
        output = SchedulerOutput()
        for request in scheduled:
            is_new = not request.blocks
            if is_new and request.local is None:
                self._ask(request)
            if is_new and request.deferred:
                request.deferred -= 1
                continue
            if is_new:
                self._allocate(request)
            remaining = request.prompt_len - request.position
            count = min(remaining, self._chunk_tokens) if remaining > 0 else 1
            data = self._data(request, count)
            (output.new_requests if is_new else output.cached_requests).append(data)
        return output

    def _ask(self, request: LlmRequest) -> None:
        """The manager matches, and asks the connector."""
        local: list[int] = []
        usable = (request.prompt_len - 1) // BLOCK_TOKENS
        for index in range(usable):
            block = self.pool.find(self._truth(request, index))
            if block is None:
                break
            local.append(block)
        self.pool.hold(local)
        request.local = local
        request.device_hit = len(local) * BLOCK_TOKENS
        matched, is_async = self.leader.get_num_new_matched_tokens(request, request.device_hit)
        assert is_async is False
        assert request.device_hit + matched < request.prompt_len, "nothing is left to compute"
        request.external = matched

    def _allocate(self, request: LlmRequest) -> None:
        """It allocates what is missing; then the Python side tells the connector."""
        assert request.local is not None
        if self._rematch:
            self._match_again(request, request.local)
        local, start, promised = request.local, request.device_hit, request.external
        if request.honoured is not None and request.honoured < promised:
            request.external = matched = request.honoured
            self.leader.cancel_load(request, start + matched, start + promised)
        allocated = self.pool.allocate(_block_count(request) - len(local))
        assert allocated is not None
        for tensor in self.tensors:  # Somebody else's bytes are in new blocks.
            tensor.memory[allocated[0]] = 0xBAD
        request.blocks = [*local, *allocated[0]]
        request.position = request.device_hit + request.external
        self.leader.update_state_after_alloc(request, list(request.blocks))

    def _match_again(self, request: LlmRequest, local: list[int]) -> None:
        """Give back the beginning of an offer that is on the device by now; the rest stays."""
        start, usable = request.device_hit, (request.prompt_len - 1) // BLOCK_TOKENS
        while len(local) < usable:
            block = self.pool.find(self._truth(request, len(local)))
            if block is None:
                break
            self.pool.hold([block])
            local.append(block)
        request.device_hit = len(local) * BLOCK_TOKENS
        overlap = min(request.device_hit - start, request.external)
        if overlap:
            request.external -= overlap
            self.leader.cancel_load(request, start, start + overlap)

    def _data(self, request: LlmRequest, count: int) -> RequestData:
        new = request.blocks[request.reported :]
        priorities = request.priorities
        if priorities is not None:
            priorities = [
                priorities[min(i, len(priorities) - 1)]
                for i in range(request.reported, request.reported + len(new))
            ]
        external = request.external if request.reported == 0 else 0
        request.reported += len(new)
        return RequestData(
            request.request_id, list(request.tokens), new, request.position - external, count,
            priorities,
        )  # fmt: skip

    def _forward(self, scheduled: Sequence[LlmRequest]) -> None:
        scheduled = [request for request in scheduled if request.blocks]
        for request in scheduled:
            self._compare(request)
        for layer in range(LAYERS):
            for worker in self.workers:
                worker.wait_for_layer_load(layer, None)
                worker.save_kv_layer(layer, None)
        for request in scheduled:
            remaining = request.prompt_len - request.position
            count = min(remaining, self._chunk_tokens) if remaining > 0 else 1
            self._compute(request, request.position + count)
        for worker in self.workers:
            worker.wait_for_save(None)

    def _compare(self, request: LlmRequest) -> None:
        """Attention looks back on every full block before the position."""
        for index in range(request.position // BLOCK_TOKENS):
            name = self._truth(request, index)
            for tensor, content in zip(self.tensors, self._content, strict=True):
                held = tensor.memory[request.blocks[index]].reshape(-1)
                assert content.holds(held, name), f"request {request.request_id}, block {index}"
            self.compared += 1

    def _compute(self, request: LlmRequest, end: int) -> None:
        first, last = request.position // BLOCK_TOKENS, end // BLOCK_TOKENS
        for index in range(first, last):
            for tensor, content in zip(self.tensors, self._content, strict=True):
                content.fill(tensor.memory[request.blocks[index]].reshape(-1),
                             self._truth(request, index))  # fmt: skip
        self.counts["computed"] += end - request.position
        request.position = end

    def _truth(self, request: LlmRequest, index: int) -> SequenceHash:
        salt = (request.cache_salt, request.cache_salt_id, request.lora_task_id)
        return truth(request.tokens[: (index + 1) * BLOCK_TOKENS], salt)

    # --- the end of a step ------------------------------------------------------------------

    def _update(self, scheduled: Sequence[LlmRequest]) -> None:
        scheduled = [request for request in scheduled if request.blocks]
        for request in scheduled:
            if request.position >= request.prompt_len:
                generated = len(request.tokens) - request.prompt_len
                request.tokens.append(request.output[generated])
                request.done = generated + 1 == len(request.output)
        pinned: set[int] = set()
        for request in scheduled:
            if request.done and self.leader.request_finished(request, list(request.blocks)):
                pinned.add(request.request_id)
                self._new_saving.append(request.request_id)
                self.saving[request.request_id] = request.blocks
        for request in [r for r in self.active if r.done or r.cancelled]:
            self.active.remove(request)
            if not request.blocks:  # V2 says so of one that was asked about and never ran.
                self.leader.cancel_load(request, request.device_hit, request.prompt_len)
                self.pool.release(request.local or [])
                continue
            self._store_for_reuse(request)
            if request.request_id not in pinned:
                self.pool.release(request.blocks)

    def _store_for_reuse(self, request: LlmRequest) -> None:
        for index in range(request.position // BLOCK_TOKENS):
            block, name = request.blocks[index], self._truth(request, index)
            if self.pool.find(name) is None:
                self.pool.give_name(block, name)

    def _terminate(self) -> None:
        news, self._new_saving = self._new_saving, []
        for rank, worker in enumerate(self.workers):
            saved, loaded = worker.get_finished(list(news), [])
            assert loaded == []
            assert set(saved) <= self.saving.keys() - self._named[rank], "an id of nobody"
            self._named[rank] |= set(saved)
        if self._overtake and self.steps % 2:
            return  # The allgather of this step came before the last rank's answer.
        for request in set.intersection(*self._named):
            self.pool.release(self.saving.pop(request))
            for named in self._named:
                named.discard(request)

    def cancel(self, request: LlmRequest) -> None:
        """The client has gone: freed at the end of the step, and the connector is not told."""
        if request in self.waiting:
            self.waiting.remove(request)
        request.cancelled = True

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.active and not self.saving
