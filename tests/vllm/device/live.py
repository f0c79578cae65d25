"""The engine of `engine.py` on the product's tiers: its device memory is bytes that are lent.

Both sides of the connector start as vLLM starts them, on the KV tensors that vLLM's model runner
would make. Nothing stands in for host tier, disk tier or the worker half: what they do takes its
own time, and every wait here has a deadline. Runs in vLLM's environment.
"""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

from kvbm_common.identity import SequenceHash
from kvbm_connectors.core.messages import Hit, LoadResult
from kvbm_connectors.vllm import connector as connector_module
from kvbm_connectors.vllm.metadata import KvbmWorkerMetadata
from kvbm_connectors.vllm.plan import NEWS

from tests.vllm.device.engine import Engine, Step
from tests.vllm.device.kinds import Kind
from tests.vllm.device.memory import Blocks, Cell, WrongBytes
from tests.vllm.device.pages import Pages, allocated, laid_out
from tests.waiting import wait_for

QUIET_DEADLINE_S = 40.0
ATTACH_DEADLINE_S = 40.0
LONG_PASSES, PASS_S = 0.2, 0.04
"""How often a draft model's pass takes long, and how long at most."""


class LiveEngine(Engine):
    """One life of an engine of a kind. `close` ends it."""

    def __init__(
        self, kind: Kind, vllm_config: Any, seed: int, right: dict[SequenceHash, Cell]
    ) -> None:
        """`right` is what the names of earlier engines stand for."""
        # What writes KV here is no draft model that vLLM knows.
        rewritten = 0 if kind.draft_groups else None
        with mock.patch.object(connector_module, "rewritten_by_drafts", return_value=rewritten):
            super().__init__(kind, vllm_config, seed)
        self.right = right
        self._has_draft_model = bool(kind.draft_groups)
        self._hits: dict[str, Hit] = {}
        """Of the requests that load."""
        self.worker = self._worker_of(vllm_config)

    def _config(self, kind: Kind, vllm_config: Any) -> Any:
        self._laid_out = laid_out(super()._config(kind, vllm_config), vllm_config)
        return self._laid_out

    def _blocks(self, count: int) -> Blocks:
        self._tensors = allocated(self._laid_out)
        self._pages = Pages(self._laid_out, self._tensors)
        return self._pages

    def _worker_of(self, vllm_config: Any) -> Any:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

        worker = KVConnectorFactory.create_connector(
            config=vllm_config, role=KVConnectorRole.WORKER, kv_cache_config=self._laid_out
        )
        worker.register_kv_caches(self._tensors)
        return worker

    # --- attached ---------------------------------------------------------------------------

    def wait_attached(self, epoch: int) -> None:
        """Step until both halves know this life of the host tier."""
        give_up_s = time.monotonic() + ATTACH_DEADLINE_S
        while self.scheduler.has_requests() and not self._is_attached(epoch):
            assert time.monotonic() < give_up_s, f"not attached to {epoch}: {self._epochs()}"
            self.step()
        wait_for(
            lambda: self._is_attached(epoch),
            lambda: f"not attached to {epoch}: {self._epochs()}",
            deadline_s=ATTACH_DEADLINE_S,
        )

    def _is_attached(self, epoch: int) -> bool:
        return set(self._epochs()) == {epoch} and self.connector._scheduler_half.streams_attached

    def _epochs(self) -> list[int]:
        lent = self.worker._worker._half
        return [self.connector._scheduler_half.epoch, 0 if lent is None else lent.epoch]

    def close(self) -> None:
        """End both sides, whatever is in flight. From then on the memory is another's."""
        self.worker.shutdown()
        self.scheduler.shutdown()
        self._pages.spoil()

    def check_closed(self) -> None:
        """Raise WrongBytes if anything was written since."""
        if not self._pages.is_spoilt:
            raise WrongBytes("bytes of a load have come after the engine's end")

    # --- steps ------------------------------------------------------------------------------

    def _before_plan(self) -> None:
        """A step without work waits for news, as in an engine."""

    def _pull(self) -> None:
        """The host tier pulls when it likes."""

    def _planned(self, output: Any) -> Step:
        for load in output.kv_connector_metadata.plan.loads:
            request = self.scheduler.requests[load.request]
            self._hits[load.request] = self.connector._scheduler.hit_of(request)
        return super()._planned(output)

    def _catch_up(self, step: Step) -> None:
        """KV is in host memory: when the worker begins a load or lays a mark, it is written."""
        plan, output = step.output.kv_connector_metadata.plan, step.output
        begins = output.new_block_ids_to_zero or output.kv_cache_block_copies
        if self._has_draft_model and plan.offering and self._lag.random() < LONG_PASSES:
            self._let_pull()
        if output.num_scheduled_tokens or begins or plan.loads or plan.mark:
            self.memory.catch_up()
        else:
            self.memory.catch_up(self._lag.randrange(2))

    def _let_pull(self) -> None:
        """Have the draft model's pass last until the host tier has read all that is on offer."""
        give_up_s = time.monotonic() + PASS_S
        while not self.connector._scheduler_half.idle() and time.monotonic() < give_up_s:
            NEWS.wait(PASS_S / 100)
            NEWS.clear()

    def _begin_loads(self, output: Any) -> None:
        self.worker.handle_preemptions(output.kv_connector_metadata)
        self.worker.bind_connector_metadata(output.kv_connector_metadata)
        if output.has_sync_kv_loads:
            self.worker.start_load_kv(None)

    def _end_step(self, output: Any) -> Any:
        """In the order of vLLM's `KVConnectorModelRunnerMixin`."""
        from vllm.v1.outputs import KVConnectorOutput

        if not output.has_sync_kv_loads:
            self.worker.start_load_kv(None)
        self.worker.wait_for_save()
        ended = self.worker.get_transfer_results(output.finished_req_ids)
        invalid = self.worker.get_block_ids_with_load_errors()
        report = self.worker.build_connector_worker_meta()
        self.worker.clear_connector_metadata()
        for result in report.report.results if isinstance(report, KvbmWorkerMetadata) else ():
            self._check_load(result)
        return KVConnectorOutput(
            finished_sending=ended.finished_sending, finished_recving=ended.finished_recving,
            failed_recving=ended.failed_recving, invalid_block_ids=invalid,
            kv_connector_worker_meta=report,
        )  # fmt: skip

    def _check_load(self, result: LoadResult) -> None:
        """What a load has brought is what its names stand for; nothing of what was refused is
        left."""
        load, hit = result.load, self._hits.pop(result.load.request)
        for at, (name, block) in enumerate(zip(load.hashes, load.blocks, strict=True)):
            if result.intact[at]:
                self._check_block(name, block)
            elif at in result.corrupt and not self._pages.is_clear(block):
                raise WrongBytes(f"{load.request}: refused bytes are left in block {block}")
        self.counts["corrupt blocks"] += len(result.corrupt)
        if result.usable < len(load.blocks):
            self.counts[f"failed loads: {result.reason}"] += 1
            return
        self.counts["loads"] += 1
        self.counts["blocks from host"] += hit.host
        self.counts["blocks from disk"] += hit.disk

    def _check_block(self, name: SequenceHash, block: int) -> None:
        right = self.right[name]
        (number,) = {group for group, _ in right.values()}
        prefixes = [prefix for _, prefix in right.values()]
        group, count = self.groups[number], len(right)
        at = self._pages.first_wrong(group, [block] * count, list(right), prefixes)
        if at is not None:
            place = list(right)[at]
            found = self._pages.found(group, block, place)
            raise WrongBytes(f"block {block} was loaded as {right}, and place {place} is {found}")

    # --- the end ----------------------------------------------------------------------------

    def _quiet(self) -> None:
        give_up_s = time.monotonic() + QUIET_DEADLINE_S
        half, side = self.connector._scheduler_half, self.connector._scheduler
        while time.monotonic() < give_up_s:
            if not self.scheduler.has_requests() and side.idle and half.idle():
                break
            self.step()
        else:
            raise AssertionError(f"requests or offers do not end: {self.left()}, {self.facts()}")

    def facts(self) -> dict[str, int]:
        """What both sides have counted."""
        counts: dict[str, int] = dict(self.connector.counts())
        return counts | {f"worker {name}": n for name, n in self.worker.counts().items()}
