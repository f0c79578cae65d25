"""The object tier's core under random orders of listings, writes, fills, deletes and outages.

What is left when everything has settled and the bucket was listed once more: the table is the
bucket, as far as it fits, and nothing is staged or pinned.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from kvbm_common.wire.verbs import LeaseReply
from kvbm_disk_tier.core.effects import (
    AppendJournal,
    Effect,
    LeaseHost,
    ReadSlots,
    ReleaseHost,
    WriteSlots,
)
from kvbm_disk_tier.core.messages import (
    ArenaKnown,
    Journaled,
    Leased,
    ReadDone,
    Released,
    StoreDown,
    StoreUp,
    Tick,
    Written,
)
from kvbm_disk_tier.objects.core.messages import (
    GoneLost,
    ListedBlock,
    ListingBegun,
    ListingEnded,
    ListingStalled,
    ObjectsListed,
    RangeListed,
    SlotsCompared,
)

from tests.services.disk_tier.helpers import arena, asked, block, leased_slot
from tests.services.disk_tier.objects.core.test_listing import Bucket, fill, other, seen

BLOCKS = range(1, 13)
STEPS = 250


class Chaos:
    """One bucket, one host, and outcomes that come in any order."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.bucket = Bucket(slots=4, ttl_ms=50_000, listed=False)
        self.pages: list[ListedBlock] | None = None
        self.ends: list[object] = []
        """What follows the pages of a listing."""
        self.outcomes: list[Callable[[], list[Effect]]] = []
        self.take(self.bucket.step(ArenaKnown(arena())))

    def take(self, effects: list[Effect]) -> None:
        """Every effect will have an outcome, some time."""
        for effect in effects:
            match effect:
                case LeaseHost():
                    self.outcomes.append(lambda e=effect: self.leased(e))  # type: ignore[misc]
                case WriteSlots():
                    self.outcomes.append(lambda e=effect: self.written(e))  # type: ignore[misc]
                case ReleaseHost(write):
                    valid = self.random.random() < 0.8
                    self.outcomes.append(
                        lambda w=write, v=valid: self.bucket.step(Released(w, v))  # type: ignore[misc]
                    )
                case AppendJournal(write=int(write)):
                    self.outcomes.append(lambda w=write: self.bucket.step(Journaled((w,))))  # type: ignore[misc]
                case ReadSlots():
                    self.outcomes.append(lambda e=effect: self.read(e))  # type: ignore[misc]
                case _:
                    pass

    def leased(self, lease: LeaseHost) -> list[Effect]:
        """The host tier has most of it."""
        slots = [leased_slot(n) for n in asked(lease) if self.random.random() < 0.9]
        return self.bucket.step(Leased(lease.write, LeaseReply(lease=1, slots=slots)))

    def written(self, write: WriteSlots) -> list[Effect]:
        """Most of it is in the bucket now."""
        lost = [i for i in range(len(write.blocks)) if self.random.random() < 0.2]
        kept = [b for i, b in enumerate(write.blocks) if i not in lost]
        self.bucket.objects |= dict.fromkeys(kept, 0)
        return self.bucket.step(Written(write.write, tuple(lost)))

    def read(self, read: ReadSlots) -> list[Effect]:
        """What is there is intact, unless it is not."""
        reasons = []
        for wanted in read.blocks:
            there = wanted in self.bucket.objects
            why = self.random.choice(["", "", "", "corrupt", "transfer_failed"])
            reasons.append(why if there else "gone")
        intact = tuple(not reason for reason in reasons)
        return self.bucket.step(ReadDone(read.read, intact, tuple(reasons)))

    def step(self) -> None:
        """Something happens."""
        draw = self.random
        some = draw.sample(BLOCKS, draw.randint(1, 4))
        match draw.randint(0, 9):
            case 0 | 1:
                self.take(seen(self.bucket, *some))
            case 2:
                self.take(fill(self.bucket, *some))
            case 3:
                others = draw.choice([block, other])
                age = draw.randint(0, 60_000)
                self.bucket.objects |= {others(number): age for number in some}
            case 4:
                for number in some:
                    self.bucket.objects.pop(draw.choice([block, other])(number), None)
            case 5:
                down = draw.random() < 0.5
                self.take(self.bucket.step(StoreDown("away") if down else StoreUp()))
            case 6:
                self.bucket.now_ms += draw.randint(0, 2_000)
                self.take(self.bucket.step(Tick()))
            case 7 | 8:
                self.list_some()
            case _:
                self.settle_one()

    def list_some(self) -> None:
        """A listing begins, goes on, or ends; what it tells may be old by then."""
        if self.pages is None:
            self.take(self.bucket.step(ListingBegun()))
            self.ends = [RangeListed(), *(SlotsCompared(first, 2) for first in (0, 2)),
                         ListingEnded(), *(GoneLost(first, 2) for first in (0, 2))]  # fmt: skip
            self.pages = [
                ListedBlock(found, age)
                for found, age in sorted(
                    self.bucket.objects.items(), key=lambda e: (e[0].hash, e[0].checksum)
                )
            ]
        elif self.pages and self.random.random() < 0.9:
            page, self.pages = self.pages[:3], self.pages[3:]
            self.take(self.bucket.step(ObjectsListed(tuple(page))))
        elif self.pages:
            self.take(self.bucket.step(ListingStalled()))
            self.pages = None if self.random.random() < 0.5 else self.pages
        else:
            self.take(self.bucket.step(self.ends.pop(0)))
            self.pages = [] if self.ends else None

    def settle_one(self) -> None:
        """An effect has its outcome."""
        if self.outcomes:
            self.take(self.outcomes.pop(self.random.randrange(len(self.outcomes)))())

    def settle(self) -> None:
        """Everything ends."""
        self.take(self.bucket.step(StoreUp()))
        self.bucket.now_ms += 120_000
        while self.outcomes:
            self.settle_one()
        self.take(self.bucket.step(Tick()))
        while self.outcomes:
            self.settle_one()


@pytest.mark.parametrize("seed", range(40))
def test_in_any_order(seed: int) -> None:
    """`Bucket.step` checks every invariant after every input."""
    chaos = Chaos(seed)
    for _ in range(STEPS):
        chaos.step()
    chaos.settle()
    bucket = chaos.bucket
    for _ in range(3):  # A block is missing if it was here at the end of the listing before.
        bucket.list()
    assert bucket.here() == bucket.stored()
    assert len(bucket.here()) <= 4
    counts = bucket.core.inventory.table.counts()
    assert (counts["staged"], counts["active"]) == (0, 0)
    assert set(bucket.core.inventory.table.blocks()) == set(bucket.objects)
