"""The object medium: a bucket as the store of the core.

Every block is an object of its own and moves by itself, so that one that is missing or late costs
no other; batches of the core are only a way to lease. A transfer that fails is tried again with
growing pauses while its deadline lets it. NIXL says *that* something failed; the bucket is then
asked *what*.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from kvbm_common.errors import DeadlineExceeded
from kvbm_common.nixl.transfers import TransferTimeout
from kvbm_common.runtime.logs import OncePerKind
from kvbm_common.runtime.loop import monotonic_ms
from kvbm_common.runtime.metrics import Metrics
from kvbm_common.tier.layout import Layout
from kvbm_common.tier.slots import Block
from kvbm_common.wire.verbs import ArenaReply

from kvbm_disk_tier.core.effects import (
    AppendJournal,
    ProbeStore,
    ReadSlots,
    RewriteJournal,
    WriteSlots,
)
from kvbm_disk_tier.core.journal import Operation, Replay
from kvbm_disk_tier.core.messages import (
    STALE_ARENA,
    Journaled,
    ReadDone,
    StoreFailed,
    StoreOpened,
    StoreProbed,
    WriteFailed,
    Written,
)
from kvbm_disk_tier.objects.core.answers import Listed
from kvbm_disk_tier.objects.core.messages import ListedBlock
from kvbm_disk_tier.objects.core.names import KeyIds, Names
from kvbm_disk_tier.objects.shell.bucket_watch import BucketWatch
from kvbm_disk_tier.objects.shell.counters import listed_counter, requests_counter
from kvbm_disk_tier.objects.shell.deletes import Deletes
from kvbm_disk_tier.objects.shell.lister import Lister, ListerDoors, Loop
from kvbm_disk_tier.objects.shell.object_store import (
    CHANGED,
    CORRUPT,
    GONE,
    OK,
    TOO_LATE,
    BucketError,
    BucketRefused,
    Carrier,
    ObjectStore,
    Sums,
    backoff,
)

PUT_DEADLINE_S = 30.0
"""A store that takes longer for one block is as good as away."""
TRIES = 3
NO_KEY = "no_key"
"""The block's namespace has none, and what is stored here is sealed."""
UNSEEN = "unseen"
"""Other bytes have come, and whether they are the object's cannot be told."""
NOT_ASKED = (STALE_ARENA, CHANGED, DeadlineExceeded.code, NO_KEY)
"""Reasons why a block was not put although the store refused nothing."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectOptions:
    """The use of the bucket, from the configuration."""

    prefix: str
    slot_count: int
    list_s: float
    label: str
    """Names this instance among those that share the bucket."""
    keys: KeyIds | None = None
    """The keys that its objects are sealed with; the mover's packing says how."""


class ObjectMedium:
    """One bucket, for one event loop."""

    def __init__(
        self, options: ObjectOptions, store: ObjectStore, mover: Carrier, counters: Metrics
    ) -> None:
        self.where = store.where
        self._options = options
        self._store = store
        self._mover = mover
        self._names = Names(options.prefix, options.keys)
        self._watch = BucketWatch(store, self._probe_prefix)
        deleted = counters.counter(
            "kvbm_object_deletes_total", "Deletes by what became of them.", labels=("outcome",)
        )
        self._deletes = Deletes(
            store, lambda outcome, count: deleted.labels(outcome=outcome).inc(count)
        )
        self._log = OncePerKind(log)
        self._opened = asyncio.Event()
        self._requests = requests_counter(counters)
        """Shared with the bucket, which counts its own."""
        self._moved = counters.counter(
            "kvbm_object_bytes_total", "Bytes moved to and from the bucket.", labels=("direction",)
        )
        self._listed = listed_counter(counters)
        self._failures = {
            "put": counters.counter(
                "kvbm_object_write_failures", "Blocks that could not be written to the bucket."
            ),
            "get": counters.counter(
                "kvbm_object_read_failures", "Blocks that could not be read from the bucket."
            ),
        }

    def close(self) -> None:
        """End; requests that hang end by themselves."""
        self._mover.close()

    # --- the store --------------------------------------------------------------------------

    @property
    def buffer_bytes(self) -> int:
        """Memory through which blocks pass."""
        return self._mover.buffer_bytes

    async def recover(self) -> StoreOpened | StoreFailed | None:
        """Return None: nothing is known before the first listing."""
        return None

    async def open(self, _slot_bytes: int) -> StoreOpened | StoreFailed:
        """See whether the bucket is there and lets us read, and write."""
        found = await self.probe()
        if failure := found.read_failure or found.write_failure:
            self._log.warning("open", failure)
        if found.read_failure:
            return StoreFailed(failure)
        self._opened.set()
        layout = Layout.unsized(self._options.slot_count)
        return StoreOpened(layout, Replay({}, 1, 0, 0), write_failure=failure)

    async def probe(self, _effect: ProbeStore | None = None) -> StoreProbed:
        """Ask for a name, then put an object: one may work without the other."""
        try:
            await self._store.probe(self._probe_prefix, write=False)
        except BucketError as error:
            return StoreProbed(str(error))
        try:
            await self._store.probe(self._probe_prefix, write=True)
        except BucketError as error:
            return StoreProbed(write_failure=str(error))
        return StoreProbed()

    @property
    def _probe_prefix(self) -> str:
        return f"{self._options.prefix}/probe/{self._options.label}/"

    def use_arena(self, arena: ArenaReply) -> None:
        """Map it; raises KvbmError or OSError."""
        self._mover.use_arena(arena)

    def drop_arena(self, instance: str) -> None:
        """Unmap it; a copy under way ends in its own mapping."""
        self._mover.drop_arena(instance)

    async def append(self, effect: AppendJournal) -> Journaled | None:
        """Queue the removed objects for deletion; an object that is written is its own record."""
        removed = [r for r in effect.records if r.operation is Operation.REMOVED]
        if removed:
            names = [self._names.name_of(record.block) for record in removed]
            self._deletes.add(names, order=removed[-1].order)
        return None if effect.write is None else Journaled((effect.write,))

    async def rewrite(self, _effect: RewriteJournal) -> None:
        """Ignore the request: a bucket has no journal."""

    async def run(self, loop: Loop) -> None:
        """List, delete and probe, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keep_listing(loop), name="listing")
            tasks.create_task(self._deletes.run(loop.complete), name="deletes")
            tasks.create_task(self._watch.run(loop.complete, self._opened), name="watch")

    # --- blocks -----------------------------------------------------------------------------

    async def write(self, effect: WriteSlots) -> Written | WriteFailed:
        """Copy blocks from the arena to objects, each by itself."""
        outcomes = await asyncio.gather(
            *(
                self._put(block, effect.epoch, source * effect.unit_bytes)
                for block, source in zip(effect.blocks, effect.sources, strict=True)
            )
        )
        if all(outcome == STALE_ARENA for outcome in outcomes):
            return WriteFailed(effect.write, STALE_ARENA)
        lost = tuple(index for index, outcome in enumerate(outcomes) if outcome != OK)
        return Written(effect.write, lost, self._write_failure(outcomes))

    def _write_failure(self, outcomes: Sequence[str]) -> str:
        """Return why the store has taken no block; empty: it has, or was given none."""
        failed = [outcome for outcome in outcomes if outcome not in (OK, *NOT_ASKED)]
        if not failed or OK in outcomes:
            return ""
        failure = f"{self.where}: objects cannot be written ({failed[0]})"
        self._log.warning("write", failure)
        return failure

    async def _put(self, block: Block, epoch: int, offset: int) -> str:
        if not self._names.may_name(block):
            return NO_KEY
        name = self._names.name_of(block)
        await self._deletes.wait_writable(name)
        until_ms = monotonic_ms() + round(1000 * PUT_DEADLINE_S)
        pauses = backoff()
        outcome = OK
        for tried in range(TRIES):
            if tried and not await self._may_retry(next(pauses), until_ms):
                break
            left_s = (until_ms - monotonic_ms()) / 1000
            outcome = await self._mover.put(
                name, block, epoch=epoch, offset=offset, deadline_s=left_s
            )
            if outcome in NOT_ASKED:
                return outcome
            self._request_ended("put", block, outcome)
            if outcome == OK:
                return OK
        self._failures["put"].inc()
        return outcome

    async def read(self, effect: ReadSlots) -> ReadDone:
        """Copy objects to the arena, each by itself, in the order in which they were asked for."""
        got = await asyncio.gather(
            *(
                self._get(block, effect, target * effect.unit_bytes)
                for block, target in zip(effect.blocks, effect.targets, strict=True)
            )
        )
        outcomes, sums = zip(*got, strict=True)
        intact = tuple(outcome == OK for outcome in outcomes)
        return ReadDone(effect.read, intact, outcomes, sums)

    async def _get(self, block: Block, effect: ReadSlots, offset: int) -> tuple[str, Sums]:
        """Return how a read has ended, and the checksums of the parts of what was read."""
        epoch, until_ms = effect.epoch, effect.until_ms
        name = self._names.name_of(block)
        pauses = backoff()
        outcome, sums = OK, Sums()
        for tried in range(TRIES):
            if tried and not await self._may_retry(next(pauses), until_ms):
                break
            got = await self._mover.get(name, block, epoch=epoch, offset=offset, until_ms=until_ms)
            outcome, sums = (got, b"") if isinstance(got, str) else (OK, got)
            if outcome in (STALE_ARENA, TOO_LATE, DeadlineExceeded.code):
                break
            is_answer = outcome in (OK, CORRUPT)
            # What is corrupt may have been so on its way only: it is read once more.
            if outcome != OK and (outcome != CORRUPT or tried):
                outcome, is_answer = await self._why(name, block, outcome, until_ms)
            self._request_ended("get", block, outcome)
            if outcome in (OK, GONE, CORRUPT):
                self._watch.answered(read=True)
            else:
                reason = f"{self.where}: objects cannot be read ({outcome})"
                self._watch.trouble(reason, alone=block.hash if is_answer else b"")
            if outcome in (OK, GONE) or (outcome == CORRUPT and tried):
                break
        if outcome not in (OK, GONE):
            self._failures["get"].inc()
        return outcome, sums

    async def _why(self, name: str, block: Block, outcome: str, until_ms: int) -> tuple[str, bool]:
        """Find out why a read has failed: object gone, of another size, or store in trouble.

        Returns the outcome, and whether the store answers: then no other object is concerned.
        It asks with a list, because a head of an object cannot tell a missing object from a missing
        bucket. Wrong bytes are only believed of a store that answers lists: a maintenance page is
        no reason to delete an object.
        """
        left_s = max((until_ms - monotonic_ms()) / 1000, 0.01)
        try:
            async with asyncio.timeout(left_s):
                size = await self._store.size(name)
        except (BucketError, TimeoutError):
            return UNSEEN if outcome == CORRUPT else outcome, False
        if size is None:
            return GONE, True
        if size != self._object_bytes(block):
            return CORRUPT, True
        return outcome, outcome != TransferTimeout.code  # A late one tells of the store.

    def _object_bytes(self, block: Block) -> int:
        return block.bytes + self._mover.packing.extra_bytes

    async def _may_retry(self, pause_s: float, until_ms: int) -> bool:
        """Wait for the next try; False: there is no time for one, or no point."""
        if self._watch.reason or monotonic_ms() + 1000 * pause_s >= until_ms:
            return False
        await asyncio.sleep(pause_s)
        return not self._watch.reason

    def _request_ended(self, kind: str, block: Block, outcome: str) -> None:
        answered = outcome in (OK, GONE, CORRUPT)
        self._requests.labels(request=kind, outcome="ok" if answered else "failed").inc()
        if outcome == OK:
            self._moved.labels(direction="written" if kind == "put" else "read").inc(block.bytes)
        self._watch.answers += answered

    # --- listings ---------------------------------------------------------------------------

    async def _keep_listing(self, loop: Loop) -> None:
        await self._opened.wait()
        doors = ListerDoors(
            take=self._take,
            begun=self._deletes.forget,
            worked=self._watch.answered,
            failed=lambda error: self._watch.trouble(
                str(error), refused=isinstance(error, BucketRefused)
            ),
            wait_deletes=self._deletes.wait_room,
        )
        lister = Lister(self._store, self._names, self._options.slot_count, doors)
        while True:
            await lister.list_all(loop)
            await asyncio.sleep(self._options.list_s)

    def _take(self, entry: Listed) -> ListedBlock | None:
        block = self._names.block_of(entry.name)
        if block is None:
            self._listed.labels(kind="foreign").inc()  # Its owner may want it.
            return None
        if self._object_bytes(block) != entry.bytes:
            self._listed.labels(kind="wrong_size").inc()
            self._deletes.add([entry.name])
            return None
        self._listed.labels(kind="ours").inc()
        if self._deletes.concerns(entry.name):
            return None
        return ListedBlock(block, entry.age_ms)
