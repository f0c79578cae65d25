"""The object tier of the simulation: the real core over a bucket that hosts share.

Its medium is repeated in short: lanes, whose content is compared before it goes anywhere, tries,
deletes in the background, and listings. What the bucket says of itself is judged by the product's
own `BucketHealth`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.layout import Layout
from kvbm_common.tier.slots import Block
from kvbm_disk_tier.core import effects as wanted
from kvbm_disk_tier.core import messages as disk
from kvbm_disk_tier.core.frequency_filter import FrequencyFilter
from kvbm_disk_tier.core.journal import Operation, Replay
from kvbm_disk_tier.core.limits import DiskTierLimits
from kvbm_disk_tier.objects.core import messages as objects
from kvbm_disk_tier.objects.core.bucket_health import BucketHealth
from kvbm_disk_tier.objects.core.core import ObjectTierCore
from kvbm_disk_tier.objects.core.ranges import Place, Progress, Ranges

from tests.sim import invariants
from tests.sim.bucket import NAMES, block_of, name_of, range_of
from tests.sim.bus import Bus
from tests.sim.cluster import Cluster, Host
from tests.sim.lower_tier import LowerTier
from tests.sim.memory import Memory, checksum_of, right_cells, sums_of, units_of
from tests.sim.world import World

LIST_MS = 1_500.0
SLOTS_AT_ONCE = 5
PAGE_MAX = 6
Ended = Callable[[str], None]
DELETE_MS = 30.0
PROBE_MS = 700.0
OK, GONE, CORRUPT, FAILED = "", "gone", "corrupt", "failed"
CHANGED, TOO_LATE = "source_changed", "too_late"


def _pauses(pause_s: float, max_s: float) -> Iterator[float]:
    """Make pauses that this world does not draw."""
    return itertools.repeat(min(pause_s, max_s))


class ObjectTier(LowerTier):
    """G4. Objects outlive it; its table is what listings say."""

    tier = "object"
    core: ObjectTierCore
    compares = True
    """What was read is compared with its checksum; a plant turns that off."""
    compares_sources = True
    """… and what is to be put."""

    def __init__(self, world: World, bus: Bus, cluster: Cluster, host: Host) -> None:
        super().__init__(world, bus, cluster, host, "object-tier-0")
        self.bucket = cluster.bucket

    def make_core(self) -> ObjectTierCore:
        self._health = BucketHealth(_pauses)
        self.deleting: set[str] = set()
        """Names that wait to be deleted."""
        self._lately: set[str] = set()
        """Names deleted, or to be, since the listing began."""
        plan = self.world.plan
        return ObjectTierCore(
            host=self.host.name,
            instance="0",
            epoch=self.epoch,
            frequency_filter=FrequencyFilter(enabled=plan.filtered),
            limits=DiskTierLimits(
                batch_blocks_max=4,
                writes_max=2,
                reads_max=3,
                lease_ms=plan.lease_ms,
                pending_max=plan.pending_max,
            ),
            ttl_ms=plan.object_ttl_ms,
        )

    def take(self, event: objects.ObjectInput) -> None:
        """Take an input that only this core knows."""
        self.heard(event)
        self.carry_out(self.core.step(event, self.world.now_ms))
        self.stepped()

    def contents(self) -> Mapping[SequenceHash, tuple[bytes, ...]]:
        """Return what objects hold; of one that has vanished only a read can tell."""
        found: dict[SequenceHash, tuple[bytes, ...]] = {}
        for block in self.core.inventory.table.blocks():
            stored = self.bucket.objects.get(name_of(block))
            cells = right_cells(block.hash, self.world.plan.part_count)
            found[block.hash] = cells if stored is None else stored.content
        return found

    def open_store(self, slot_bytes: int) -> None:
        self.later(self.world.delay(20), self._open)

    def _open(self) -> None:
        if not self.bucket.is_up:
            self.step(disk.StoreFailed("the bucket does not answer"))
            return
        layout = Layout.unsized(self.world.plan.disk_slots)
        self.step(disk.StoreOpened(layout, Replay({}, 1, 0, 0)))
        self._list()

    # --- blocks -----------------------------------------------------------------------------

    def write(self, effect: wanted.WriteSlots, arena: Memory) -> None:
        """Put each block, from a lane whose content is compared first."""
        outcomes = [OK] * len(effect.blocks)
        left = len(effect.blocks)

        def ended(index: int, outcome: str) -> None:
            nonlocal left
            left -= 1
            if outcome != OK:
                self.world.marks[f"object not put: {outcome}"] += 1
                outcomes[index] = outcome
            if not left:
                lost = tuple(index for index, outcome in enumerate(outcomes) if outcome != OK)
                is_failure = FAILED in outcomes and OK not in outcomes
                self.step(disk.Written(effect.write, lost, "away" if is_failure else ""))

        for index, (slot, block) in enumerate(zip(effect.sources, effect.blocks, strict=True)):
            put = partial(self._copy_in, arena, slot, block, partial(ended, index))
            self.later(self.world.transfer_ms("write"), put)  # It waits for a lane.

    def _copy_in(self, arena: Memory, slot: int, block: Block, ended: Ended) -> None:
        lane = arena.content(slot, units_of(block.bytes))
        if self.compares_sources and checksum_of(lane) != block.checksum:
            ended(CHANGED)
            return
        name = name_of(block)
        self.deleting.discard(name)

        def put() -> None:
            is_refused = not self.bucket.is_up or self._is_lossy()
            if is_refused:
                ended(FAILED)
                return
            self._lately.discard(name)
            self.bucket.put(name, lane)
            ended(OK)

        self.later(self.world.transfer_ms("write"), put)

    def _is_lossy(self) -> bool:
        return not self.world.calm and self.world.rng.random() < self.world.plan.loss

    def read(self, effect: wanted.ReadSlots, arena: Memory) -> None:
        """Get each block into a lane, compare it, and copy it out before the deadline."""
        outcomes = [""] * len(effect.blocks)
        # What is intact has the sums of what its name says.
        sums = tuple(sums_of(right_cells(b.hash, arena.parts)) for b in effect.blocks)
        left = len(effect.blocks)

        def ended(index: int, outcome: str) -> None:
            nonlocal left
            left -= 1
            outcomes[index] = outcome
            self.world.marks[f"object read: {outcome or 'ok'}"] += 1
            if not left:
                intact = tuple(outcome == OK for outcome in outcomes)
                self.step(disk.ReadDone(effect.read, intact, tuple(outcomes), sums))

        for index, (slot, block) in enumerate(zip(effect.targets, effect.blocks, strict=True)):
            duration_ms = self.world.transfer_ms("read")
            limit_ms = effect.until_ms - self.world.now_ms
            out = partial(ended, index)
            if duration_ms > limit_ms:
                # The request ends by its own deadline; what comes later lands in the lane.
                self.world.marks["object read late"] += 1
                self.later(max(limit_ms, 0), partial(out, "transfer_timeout"))
                continue
            copy_out = partial(self._copy_out, arena, slot, block, effect.until_ms, out)
            self.later(duration_ms, copy_out)

    def _copy_out(
        self, arena: Memory, slot: int, block: Block, until_ms: int, ended: Ended
    ) -> None:
        if not self.bucket.is_up or self._is_lossy():
            self._trouble()
            ended(FAILED)
            return
        self._health.good()
        found = self.bucket.objects.get(name_of(block))
        if found is None:
            ended(GONE)
        elif self.compares and checksum_of(found.content) != block.checksum:
            invariants.check_corrupt_block(block.hash, found.content)
            ended(CORRUPT)
        elif self.world.now_ms >= until_ms:
            ended(TOO_LATE)
        else:
            arena.put(slot, found.content, units_of(block.bytes))
            ended(OK)

    def append(self, effect: wanted.AppendJournal) -> None:
        removed = [r.block for r in effect.records if r.operation is Operation.REMOVED]
        names = {name_of(block) for block in removed}
        self.deleting |= names
        self._lately |= names
        if names:
            self.later(self.world.delay(DELETE_MS), self._delete)
        if effect.write is not None:
            self.later(0, partial(self.step, disk.Journaled((effect.write,))))

    def _delete(self) -> None:
        if self.bucket.is_up:
            names, self.deleting = sorted(self.deleting), set()
            self.world.marks["object deleted"] += len(names)
            self.bucket.delete(names)
        else:
            self.later(DELETE_MS, self._delete)

    def rewrite(self, _effect: wanted.RewriteJournal) -> None:
        """There is no journal."""

    # --- listings ---------------------------------------------------------------------------

    def _list(self) -> None:
        """Begin a listing, in one range or in sixteen; how they go on is the product's own."""
        self._lately = set(self.deleting)
        ranges = Ranges(self.world.rng.choice([0, 1]))
        self.take(objects.ListingBegun(ranges))
        progress = Progress(ranges, list(NAMES.roots))
        self.later(self.world.delay(10), partial(self._next_range, progress))

    def _next_range(self, progress: Progress) -> None:
        place = progress.begin()
        if place is not None:
            self._page(progress, place)
            return
        self._health.good()
        self.world.marks["listing complete"] += 1
        slots = range(0, self.core.inventory.table.slot_count, SLOTS_AT_ONCE)
        for first in slots:
            self.take(objects.SlotsCompared(first, SLOTS_AT_ONCE))
        self.take(objects.ListingEnded())
        for first in slots:
            self.take(objects.GoneLost(first, SLOTS_AT_ONCE))
        self.later(self.world.rng.uniform(0.5, 1.5) * LIST_MS, self._list)

    def _page(self, progress: Progress, place: Place) -> None:
        """Take the names behind the last one of the page before, as the bucket has them now."""
        if not self.bucket.is_up or self._is_lossy():
            progress.failed(place)
            self.take(objects.ListingStalled())
            self.world.marks["listing failed"] += 1
            self._trouble()
            self.later(LIST_MS / 3, partial(self._page, progress, place))
            return

        def in_range(name: str) -> bool:
            return range_of(name, progress.ranges.digits) == place.number

        entries = self.bucket.listed(place.after, PAGE_MAX, in_range)
        found = [(block_of(name), age_ms) for name, age_ms in entries if name not in self._lately]
        page = tuple(objects.ListedBlock(b, age_ms) for b, age_ms in found if b is not None)
        if page:
            self.take(objects.ObjectsListed(page, place.number))
        more = len(entries) == PAGE_MAX
        last_name = entries[-1][0] if entries else place.after
        if progress.page(place, last_name, more=more, objects=len(entries)):
            self.take(objects.RangeListed(place.number))
            self.later(self.world.delay(10), partial(self._next_range, progress))
            return
        self.later(self.world.delay(10), partial(self._page, progress, place))

    # --- health -----------------------------------------------------------------------------

    def probe(self) -> disk.StoreProbed:
        return disk.StoreProbed("" if self.bucket.is_up else "the bucket does not answer")

    def _trouble(self) -> None:
        if self._health.trouble("the bucket does not answer"):
            self.world.marks["bucket down"] += 1
            self.step(disk.StoreDown("the bucket does not answer"))
            self.later(PROBE_MS, self._probe)

    def _probe(self) -> None:
        if not self.bucket.is_up:
            self.later(PROBE_MS, self._probe)
            return
        self._health.up()
        self.step(disk.StoreUp())
