"""vLLM's scheduler and KV cache manager around our connector, on memory of ours. No model runs."""

from __future__ import annotations

import os
import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvbm_common.identity import Hasher, SequenceHash
from kvbm_connectors.core.messages import Load, LoadResult
from kvbm_connectors.vllm.connector import KvbmConnector
from kvbm_connectors.vllm.metadata import KvbmWorkerMetadata
from kvbm_connectors.vllm.plan import NEWS, StepReport
from kvbm_connectors.vllm.scheduler_side import SchedulerSide

from tests.vllm.device.kinds import Kind, config_of
from tests.vllm.device.memory import Blocks, Cell, Cells, Group, Memory, Part, prefixes_of
from tests.vllm.device.tiers import Tiers
from tests.vllm.fuzz.patches import replace

VOCABULARY = 50
MODEL_TOKENS = 256
STEP_TOKENS = 40


class DeviceConnector(KvbmConnector):
    """The connector, with tiers of ours in the place of its scheduler half."""

    tiers: Any = None
    drafts = False
    """Whether a draft model writes KV. None runs: vLLM's configuration has drafts by n-grams."""

    def _start_scheduler(self) -> None:
        self._scheduler = SchedulerSide(
            DeviceConnector.tiers, Hasher(self._namespace),
            rewritten=0 if DeviceConnector.drafts else None, groups=self._groups, holds=self._holds,
            hybrid=self._hybrid,
        )  # fmt: skip

    def _count(self) -> dict[str, int]:
        return dict(self._scheduler.counts) if self._scheduler is not None else {}

    counts = _count


@dataclass
class Runner:
    """A request, as a model runner follows it."""

    tokens: list[int]
    """All that are known, and the ones that were sampled."""
    prefixes: list[int] = field(default_factory=list)


@dataclass
class Step:
    """A step that was planned, and the tables at that moment."""

    output: Any
    tables: dict[str, tuple[list[int], ...]]
    starts: dict[str, int]
    fresh: set[str]
    """Requests that begin, or begin again."""


class Engine:
    """One engine of a kind."""

    def __init__(self, kind: Kind, vllm_config: Any, seed: int) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import (
            generate_scheduler_kv_cache_config,
            get_request_block_hasher,
            init_none_hash,
            resolve_cache_hit_alignment_tokens,
            resolve_kv_cache_block_sizes,
        )
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.structured_output import StructuredOutputManager

        self.rng = random.Random(seed)
        self.counts: Counter[str] = Counter()
        # The connector asks vLLM whether names are unique.
        os.environ["VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"] = str(int(kind.repeats_names))
        if kind.gathers:  # Until plants are arranged anew.
            replace("kvbm_connectors.vllm.calendar", "", "GATHER_REQUESTS", 0)
            replace("kvbm_connectors.vllm.looks", "", "DECODED_BLOCKS", 3)  # A window has more.
        config = self._config(kind, vllm_config)
        vllm_config.cache_config.num_gpu_blocks = config.num_blocks
        vllm_config.cache_config.prefix_match_unit = kind.hash_tokens
        scheduler_tokens, hash_tokens = resolve_kv_cache_block_sizes(config, vllm_config)
        config.hash_block_size = vllm_config.cache_config.hash_block_size = hash_tokens
        alignment = resolve_cache_hit_alignment_tokens(
            config, vllm_config, scheduler_tokens, hash_tokens
        )
        config.cache_hit_alignment_tokens = alignment
        vllm_config.cache_config.cache_hit_alignment_tokens = alignment
        self._hash_tokens, self._alignment = hash_tokens, alignment
        config = generate_scheduler_kv_cache_config([config])
        self.groups = [
            Group(number, group.kv_cache_spec)
            for number, group in enumerate(config.kv_cache_groups)
        ]
        self.right: dict[SequenceHash, Cell] = {}
        """What each name stands for."""
        self.memory = Memory(self._blocks(config.num_blocks), self.groups, kind.draft_groups)
        self._lag = random.Random(seed)
        """Of the device after its steps."""
        DeviceConnector.drafts = bool(kind.draft_groups)
        init_none_hash(sha256)
        self._block_hasher = get_request_block_hasher(hash_tokens, sha256)
        overlaps = vllm_config.scheduler_config.async_scheduling
        self._depth = 2 if overlaps else 1
        self.scheduler = (AsyncScheduler if overlaps else Scheduler)(
            vllm_config=vllm_config, kv_cache_config=config,
            structured_output_manager=StructuredOutputManager(vllm_config),
            block_size=scheduler_tokens,
            hash_block_size=hash_tokens, log_stats=False,
        )  # fmt: skip
        self.connector = self.scheduler.connector
        assert self.connector._scheduler is not None, "the connector passes through"
        self._drafts = kind.drafts
        self._running: dict[str, Runner] = {}
        self._in_flight: deque[Step] = deque()
        self._loads: list[tuple[int, Load]] = []
        """Loads, and how many steps they take yet."""
        self._names = 0
        self._repeats_names = kind.repeats_names
        self._aborted: set[str] = set()

    def _config(self, kind: Kind, vllm_config: Any) -> Any:
        """Return vLLM's KVCacheConfig."""
        return config_of(kind, MODEL_TOKENS, 2 * STEP_TOKENS)

    def _blocks(self, count: int) -> Blocks:
        """Return the memory, and have tiers that it is stored in."""
        cells = Cells(count)
        self.tiers = DeviceConnector.tiers = Tiers(self.rng, cells, self.right, self.counts)
        return cells

    # --- users --------------------------------------------------------------------------------

    def submit(self, tokens: Sequence[int], answer: int) -> str:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        name = self._next_name()
        parameters = SamplingParams(temperature=0, max_tokens=answer)
        parameters.update_from_generation_config({}, eos_token_id=None)
        self.scheduler.add_request(
            Request(
                request_id=name,
                prompt_token_ids=list(tokens),
                sampling_params=parameters,
                pooling_params=None,
                block_hasher=self._block_hasher,
            )
        )
        self._running[name] = Runner(list(tokens))
        self.counts["requests"] += 1
        return name

    def _next_name(self) -> str:
        self._names += 1
        if not self._repeats_names:
            return f"r{self._names}"
        known = self.scheduler.requests
        running = {name for name, one in known.items() if not one.is_finished()}
        # vLLM itself keeps an aborted request while steps or a load of it are under way.
        names = (f"r{number}" for number in range(self._names))
        return next(name for name in names if name not in running | self._aborted)

    def abort(self, name: str) -> None:
        from vllm.v1.request import RequestStatus

        self._aborted.add(name)
        self.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)
        self.counts["aborts"] += 1

    def reset(self, *, running: bool) -> bool:
        """vLLM refuses, or raises, where blocks are held for a load or an offer."""
        try:
            done = bool(self.scheduler.reset_prefix_cache(reset_running_requests=running))
        except RuntimeError as error:
            if "Failed to reset KV cache" not in str(error):
                raise
            done = False
        self.counts["resets"] += done
        return done

    @property
    def names(self) -> list[str]:
        return [name for name in self._running if name in self.scheduler.requests]

    def spoken(self, name: str) -> list[int]:
        return self._running[name].tokens

    # --- steps --------------------------------------------------------------------------------

    def step(self) -> None:
        """Plan steps as far as vLLM would, and run the oldest one."""
        while len(self._in_flight) < self._depth:
            self._before_plan()
            output = self.scheduler.schedule()
            self._in_flight.append(self._planned(output))
            if not output.num_scheduled_tokens:
                break
        self._pull()
        self._run(self._in_flight.popleft())
        self._pull()

    def _before_plan(self) -> None:
        NEWS.set()  # A step without work does not sleep.

    def _pull(self) -> None:
        self.tiers.pull()

    def _planned(self, output: Any) -> Step:
        manager = self.scheduler.kv_cache_manager
        starts = {one.req_id: one.num_computed_tokens for one in output.scheduled_new_reqs}
        fresh = set(starts)
        cached = output.scheduled_cached_reqs
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        fresh |= set(cached.resumed_req_ids)
        tables = {
            name: tuple(list(table) for table in manager.get_block_ids(name))
            for name in output.num_scheduled_tokens
        }
        self.counts["preemptions"] += len(output.preempted_req_ids or ())
        return Step(output, tables, starts, fresh)

    def _run(self, step: Step) -> None:
        output = step.output
        self._catch_up(step)
        self.memory.zero(output.new_block_ids_to_zero or ())
        for copy in output.kv_cache_block_copies or ():
            self.memory.copy(copy.src_block_id, copy.dst_block_id)
        self._begin_loads(output)
        parts = [self._part(name, step) for name in output.num_scheduled_tokens]
        for group in self.groups:
            for name in [*step.fresh, *output.finished_req_ids, *(output.preempted_req_ids or ())]:
                group.state_at.pop(name, None)
        self.memory.compute(parts, self._checkpoints)
        self._learn(parts)
        sampled = self._sampled(step)
        self._learn(parts)  # Guesses that were right are computed already.
        self._update(step, sampled)

    def _catch_up(self, step: Step) -> None:
        """Have the device do what was begun, if this step has something for it to do."""
        output = step.output
        if mark := output.kv_connector_metadata.plan.mark:
            self.memory.lay(mark)
        begins = output.new_block_ids_to_zero or output.kv_cache_block_copies
        if output.num_scheduled_tokens or begins:
            self.memory.catch_up()
        else:
            self.memory.catch_up(self._lag.randrange(2))

    def _begin_loads(self, output: Any) -> None:
        for load in output.kv_connector_metadata.plan.loads:
            self._loads.append((self.rng.choice((0, 0, 1, 4)), load))

    def _part(self, name: str, step: Step) -> Part:
        runner, start = self._running[name], step.starts[name]
        end = start + step.output.num_scheduled_tokens[name]
        drafts = step.output.scheduled_spec_decode_tokens.get(name, [])
        tokens = [*runner.tokens[: end - len(drafts)], *drafts]
        assert len(tokens) == end, f"{name}: {len(tokens)} tokens are known of {end}"
        known = min(end - len(drafts), len(runner.prefixes))
        prefixes = prefixes_of(tokens, runner.prefixes[:known])
        return Part(name, start, end, step.tables[name], prefixes)

    def _learn(self, parts: Sequence[Part]) -> None:
        """Note what names of full blocks stand for."""
        for part in parts:
            runner = self._running[part.name]
            prefixes_of(runner.tokens, runner.prefixes)
            for group in self.connector._groups:
                mine = self.groups[group.table]
                names = group.hasher.chain(runner.tokens[: len(runner.tokens) // group.block_tokens
                                                         * group.block_tokens])  # fmt: skip
                for at, name in enumerate(names):
                    if name not in self.right:
                        self.right[name] = mine.expected(at + 1, runner.prefixes)

    def _sampled(self, step: Step) -> dict[str, list[int]]:
        """What the model says: it follows from the prefix. Drafts are checked against it."""
        sampled: dict[str, list[int]] = {}
        for name, count in step.output.num_scheduled_tokens.items():
            runner = self._running[name]
            drafts = step.output.scheduled_spec_decode_tokens.get(name, [])
            end = step.starts[name] + count - len(drafts)
            sampled[name] = []
            if end < len(runner.tokens):
                continue
            for draft in [*drafts, None]:
                token = runner.prefixes[-1] % VOCABULARY
                sampled[name].append(token)
                runner.tokens.append(token)
                prefixes_of(runner.tokens, runner.prefixes)
                if token != draft:
                    break
        return sampled

    def _checkpoints(self, spec: Any, part: Part) -> list[tuple[int, int]]:
        """Where vLLM's worker leaves a state in the middle of a prompt: its place and its end."""
        if not spec.num_prefill_checkpoint_blocks:
            return []
        from vllm.model_executor.layers.mamba.checkpoint import compute_mamba_prefill_checkpoints

        offsets, columns = compute_mamba_prefill_checkpoints(
            [part.end], [part.end - part.start], hash_block_size=self._hash_tokens,
            mamba_block_size=spec.block_size,
            checkpoint_alignment=spec.prefill_checkpoint_alignment,
            drop_eagle_block=False, cache_hit_alignment_tokens=self._alignment,
        )  # fmt: skip
        places = [
            (column, part.start + offset)
            for offset, column in zip(offsets, columns, strict=True)
            if offset and part.tables and column >= 0
        ]
        table = part.tables[self.groups[0].number]
        return [(column, end) for column, end in places if table[column] != 0]

    def _update(self, step: Step, sampled: dict[str, list[int]]) -> None:
        from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

        names = list(step.output.num_scheduled_tokens)
        connector_output = self._end_step(step.output)
        output = ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=[sampled[name] for name in names],
            kv_connector_output=None if connector_output.is_empty() else connector_output,
        )  # fmt: skip
        self.scheduler.update_from_output(step.output, output)
        if self._drafts:
            going = [name for name in names if name in self.scheduler.requests and sampled[name]]
            drafts = [self._draft(name) for name in going]
            self.scheduler.update_draft_token_ids(DraftTokenIds(going, drafts))

    def _end_step(self, output: Any) -> Any:
        """Return what the connector's worker says at the end of a step."""
        from vllm.v1.outputs import KVConnectorOutput

        results = self._arrived()
        sent = output.kv_connector_metadata.plan.sent
        ends = tuple((mark, True) for mark in self.memory.passed)
        self.memory.passed.clear()
        report = StepReport(tuple(results), mark_ends=ends) if results or ends else None
        failed = {one.load.request for one in results if one.load.whole and not all(one.intact)}
        bad = {
            block
            for one in results
            if not one.load.whole
            for block in one.load.blocks[one.usable :]
        }
        return KVConnectorOutput(
            finished_sending=set(sent) or None,
            finished_recving={one.load.request for one in results} or None,
            kv_connector_worker_meta=KvbmWorkerMetadata(report) if report else None,
            invalid_block_ids=bad, failed_recving=failed,
        )  # fmt: skip

    def _draft(self, name: str) -> list[int]:
        """Guess what comes: right as often as not."""
        prefix = self._running[name].prefixes[-1]
        drafts: list[int] = []
        for _ in range(self._drafts):
            right = prefix % VOCABULARY
            drafts.append(right if self.rng.random() < 0.6 else (right + 1) % VOCABULARY)
            prefix = hash((prefix, drafts[-1]))
        return drafts

    def _arrived(self) -> list[LoadResult]:
        """The loads that are over with this step."""
        ended = [load for steps, load in self._loads if steps <= 0]
        self._loads = [(steps - 1, load) for steps, load in self._loads if steps > 0]
        if ended:  # A load begins after what the engine has begun to compute.
            self.memory.catch_up()
        return [self.tiers.write(load, fails=self.rng.random() < 0.1) for load in ended]

    # --- the end ------------------------------------------------------------------------------

    def _quiet(self) -> None:
        for _ in range(2_000):
            if not self.scheduler.has_requests() and self.connector._scheduler.idle:
                break
            self.step()
            self.tiers.pull(everything=True)

    def settle(self) -> None:
        """Step until nothing is left, and require that nothing is held."""
        self._quiet()
        side = self.connector._scheduler
        facts = f"{self.left()}, {len(self._loads)} loads, {self.connector.counts()}"
        assert not self.scheduler.requests, f"requests do not end: {facts}"
        assert side.idle, f"the scheduler side follows {sorted(side._requests)}"
        pool = self.scheduler.kv_cache_manager.block_pool
        held = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        assert not held, f"{held} device blocks are held"

    def left(self) -> str:
        """The requests that have not ended, those that vLLM looks at first, and the blocks."""
        states = {name: str(one.status) for name, one in self.scheduler.requests.items()}
        pool, first = self.scheduler.kv_cache_manager.block_pool, self.scheduler.kv_holding_waiting
        needs = {one.request_id: self.scheduler._request_remaining_blocks(one) for one in first}
        free = f"{pool.get_num_free_blocks()} of {pool.num_gpu_blocks} blocks are free"
        return f"{states}, {free}; looked at first, with the blocks they need: {needs}"
