"""An observer of vLLM's scheduler: counts what really happened, so that a dead draw is visible."""

from __future__ import annotations

from collections import Counter
from typing import Any


class Observer:
    """Wraps two methods of a scheduler."""

    def __init__(self, scheduler: Any) -> None:
        self.counts: Counter[str] = Counter()
        self._scheduler = scheduler
        self._preempted: dict[str, int] = {}
        self._loading: set[str] = set()
        self._schedule, self._update = scheduler.schedule, scheduler.update_from_output
        scheduler.schedule, scheduler.update_from_output = self.schedule, self.update

    def schedule(self, *arguments: Any, **more: Any) -> Any:
        """Look at what a step computes, and for which request."""
        output = self._schedule(*arguments, **more)
        self.counts["steps"] += 1
        self._see_preemptions()
        self._see_hits(output)
        return output

    def _see_preemptions(self) -> None:
        for request in self._scheduler.requests.values():
            before = self._preempted.get(request.request_id, 0)
            if request.num_preemptions > before:
                self.counts["preemptions"] += request.num_preemptions - before
                self._preempted[request.request_id] = request.num_preemptions
            if request.status.name == "WAITING_FOR_REMOTE_KVS":
                self._loading.add(request.request_id)
                self.counts["steps while loading"] += 1

    def _see_hits(self, output: Any) -> None:
        """Device hits, and among them those on a block that this very step computes."""
        new = output.scheduled_new_reqs
        self.counts["batched steps"] += len(output.num_scheduled_tokens) > 1
        if not new:
            return
        written = self._written(output)
        for request in new:
            self.counts["admitted"] += 1
            if not request.num_computed_tokens:
                continue
            self.counts["admitted with a hit"] += 1
            blocks = request.block_ids[0][: request.num_computed_tokens // self._block_size]
            others = {block for block in blocks if written.get(block, request.req_id)
                      != request.req_id}  # fmt: skip
            self.counts["hits on blocks of the same step"] += bool(others)

    @property
    def _block_size(self) -> int:
        return int(self._scheduler.block_size)

    def _written(self, output: Any) -> dict[int, str]:
        """Blocks that the step writes, with the request that does."""
        size = self._block_size
        written: dict[int, str] = {}
        for name, tokens in output.num_scheduled_tokens.items():
            request = self._scheduler.requests.get(name)
            if request is None:
                continue
            table = self._scheduler.kv_cache_manager.get_block_ids(name)[0]
            end = request.num_computed_tokens  # vLLM has counted this step's tokens already.
            for block in table[max(0, end - tokens) // size : -(-end // size)]:
                written[block] = name
        return written

    def update(self, output: Any, result: Any, *arguments: Any, **more: Any) -> Any:
        """Look at what speculation came to."""
        rejected = 0
        for name, drafts in output.scheduled_spec_decode_tokens.items():
            index = result.req_id_to_index.get(name)
            if index is not None:
                taken = len(result.sampled_token_ids[index]) - 1
                self.counts["drafts taken"] += max(0, taken)
                rejected += len(drafts) - max(0, taken)
        self.counts["drafts rejected"] += rejected
        return self._update(output, result, *arguments, **more)

    def aborted(self, name: str) -> None:
        """A request is about to be aborted: where does it stand?"""
        self.counts["aborts"] += 1
        for request in self._scheduler.requests.values():
            if name in request.request_id:
                status = request.status.name
                self.counts["aborts in load"] += status == "WAITING_FOR_REMOTE_KVS"
                self.counts["aborts before admission"] += status == "WAITING"
                self.counts["aborts in prefill"] += (
                    status == "RUNNING" and not request.num_output_tokens
                )
