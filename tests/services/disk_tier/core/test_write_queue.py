"""The queue of writes: each tenant in its order, tenants in turn by what they have had."""

from __future__ import annotations

from typing import ClassVar

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kvbm_common.identity import Namespace, of_tenant
from kvbm_common.tier.tenants import TENANTS_MAX, Tenants, shares_of
from kvbm_disk_tier.core.effects import Effect
from kvbm_disk_tier.core.limits import DiskTierLimits
from kvbm_disk_tier.core.messages import HostEvent
from kvbm_disk_tier.core.write_queue import Origin, WriteQueue

from tests.services.disk_tier.helpers import SLOT_BYTES, Disk, block, name

PLAIN = Namespace(model="test", block_tokens=4)
SPACES = {who: of_tenant(PLAIN, who).digest for who in ("", "gold", "silver")}
HOUR_MS = 3_600_000


def queue_of(shares: str = "") -> WriteQueue:
    return WriteQueue(Tenants(shares_of(shares)))


def origin_of(who: str) -> Origin:
    return Origin("0", 64, SPACES[who])


def taken(queue: WriteQueue, count: int, per_batch: int = 1) -> list[int]:
    """Take batches from whichever queue is next."""
    found: list[int] = []
    for _ in range(count):
        names = list(queue.turns()[0])[:per_batch]
        queue.take(names, 64 * len(names))
        found += [int.from_bytes(one, "big") for one in names]
        queue.check()
    return found


def test_a_tenant_that_waits_is_not_behind_the_queue_of_another() -> None:
    queue = queue_of()
    for number in range(1, 9):
        queue.add(name(number), origin_of("gold"))
    queue.add(name(101), origin_of("silver"))
    queue.add(name(102), origin_of("silver"))
    assert taken(queue, 6) == [1, 101, 2, 102, 3, 4]


def test_weights_say_who_has_how_much_of_the_disk() -> None:
    queue = queue_of("gold=3,silver=1")
    for number in range(1, 41):
        queue.add(name(number), origin_of("gold"))
        queue.add(name(100 + number), origin_of("silver"))
    first = taken(queue, 20)
    assert len([number for number in first if number < 100]) == 15


def test_what_could_not_go_waits_first_and_is_not_charged() -> None:
    """1. Gold's turn is in vain, and so it is gold's again. 2. Then both go in turn."""
    queue = queue_of()
    for number in range(1, 5):
        queue.add(name(number), origin_of("gold"))
        queue.add(name(100 + number), origin_of("silver"))
    assert taken(queue, 2) == [1, 101]
    assert taken(queue, 1, per_batch=2) == [2, 3]
    queue.put_back(name(3), origin_of("gold"), 64)
    queue.put_back(name(2), origin_of("gold"), 64)
    queue.check()
    assert taken(queue, 3) == [2, 102, 3]


def test_a_tenant_that_comes_back_does_not_catch_up() -> None:
    queue = queue_of()
    for number in range(1, 60):
        queue.add(name(number), origin_of("gold"))
    taken(queue, 30)
    for number in range(101, 120):
        queue.add(name(number), origin_of("silver"))
    assert len([number for number in taken(queue, 10) if number > 100]) == 5


def test_a_newcomer_to_an_empty_queue_does_not_catch_up() -> None:
    """Gold has written a hundred blocks as they came; then both always have a block that waits."""
    queue = queue_of("gold=3,silver=1")
    for number in range(1, 101):
        queue.add(name(number), origin_of("gold"))
        taken(queue, 1)
    for number in range(201, 261):
        queue.add(name(number), origin_of("silver"))
    for number in range(101, 161):
        queue.add(name(number), origin_of("gold"))
    assert len([number for number in taken(queue, 40) if number < 200]) == 30


def test_one_that_comes_back_when_another_has_just_left_begins_at_the_clock() -> None:
    """Gold's last block has left unwritten, so nobody waits whose position silver could take."""
    queue = queue_of()
    for number in range(1, 33):
        queue.add(name(number), origin_of("gold"))
    taken(queue, 31)
    queue.remove(name(32))
    for number in range(1, 21):
        queue.add(name(200 + number), origin_of("silver"))
        queue.add(name(100 + number), origin_of("gold"))
    assert len([number for number in taken(queue, 10) if number > 200]) in (5, 6)


def test_more_tenants_than_have_shares_wait_and_leave_and_are_forgotten() -> None:
    """Those beyond the limit wait together, and leave whoever they have become meanwhile."""
    queue = queue_of()
    spaces = [of_tenant(PLAIN, f"t{number}").digest for number in range(5 * TENANTS_MAX)]
    for number, space in enumerate(spaces, 1):
        queue.add(name(number), Origin("0", 64, space))
        queue.check()
    assert len(queue.turns()) <= TENANTS_MAX
    for number in range(1, TENANTS_MAX // 2):  # Now others have a share of their own.
        queue.remove(name(number))
    for number, space in enumerate(spaces, 1001):
        queue.add(name(number), Origin("0", 64, space))
        queue.check()
    while queue:
        queue.take(list(queue.turns()[0])[:3], 192)
        queue.check()


class FairQueue(RuleBasedStateMachine):
    """Blocks come, leave, are moved and written; a model of lists says what is next."""

    WEIGHTS: ClassVar[dict[str, float]] = {"": 1.0, "gold": 3.0, "silver": 2.0}

    @initialize()
    def begin(self) -> None:
        self.queue = queue_of("gold=3,silver=2")
        self.waiting: dict[str, list[int]] = {who: [] for who in self.WEIGHTS}
        self.had = dict.fromkeys(self.WEIGHTS, 0.0)
        self.clock = 0.0
        self.last = 0

    def lasting(self) -> list[int]:
        return [number for waiting in self.waiting.values() for number in waiting]

    @rule(who=st.sampled_from(sorted(WEIGHTS)), count=st.integers(1, 5))
    def adds(self, who: str, count: int) -> None:
        if not self.waiting[who]:
            self.had[who] = max(self.had[who], self.clock)
        for _ in range(count):
            self.last += 1
            self.queue.add(name(self.last), origin_of(who))
            self.waiting[who].append(self.last)

    @precondition(lambda self: self.lasting())
    @rule(data=st.data())
    def removes(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self.lasting()))
        self.queue.remove(name(number))
        for waiting in self.waiting.values():
            if number in waiting:
                waiting.remove(number)

    @precondition(lambda self: self.lasting())
    @rule(count=st.integers(1, 4))
    def writes(self, count: int) -> None:
        queue = self.queue.turns()[0]
        names = list(queue)[:count]
        first = queue[names[0]]
        who = next(one for one, digest in SPACES.items() if digest == first.namespace)
        least = min(self.had[one] for one, numbers in self.waiting.items() if numbers)
        assert self.had[who] == least, f"{who!r} is next, and others had less: {self.had}"
        assert [int.from_bytes(one, "big") for one in names] == self.waiting[who][:count]
        self.queue.take(names, 64 * len(names))
        del self.waiting[who][:count]
        self.clock = least
        self.had[who] += 64 * len(names) / self.WEIGHTS[who]
        if not self.lasting():
            self.begin_again()

    def begin_again(self) -> None:
        self.clock, self.had = 0.0, dict.fromkeys(self.WEIGHTS, 0.0)

    @invariant()
    def agrees(self) -> None:
        self.queue.check()
        assert sorted(int.from_bytes(one, "big") for one in self.queue) == sorted(self.lasting())


TestFairQueue = FairQueue.TestCase
TestFairQueue.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


# --- in the core ----------------------------------------------------------------------------------


def host_stored(disk: Disk, who: str, *wanted: int) -> list[Effect]:
    """The host tier announces blocks of a tenant."""
    blocks = [msgspec.structs.replace(block(n), namespace=SPACES[who]) for n in wanted]
    return [one for event in disk.host.stored(blocks) for one in disk.step(HostEvent("0", event))]


def test_the_write_budget_is_shared_by_tenants_and_not_taken_by_the_first() -> None:
    """The unnamed tenant has used up the budget of this hour, and 39 blocks wait: gold's two come
    second and fourth of those that follow."""
    limits = DiskTierLimits(writes_max=1, batch_blocks_max=1, ahead_batches=0)
    disk = Disk(slots=64, limits=limits, write_budget=24 * 4 * SLOT_BYTES)
    disk.wait(1)
    disk.finish(disk.wait(HOUR_MS))
    disk.finish(host_stored(disk, "", *range(1, 41)))
    begun = len(disk.on_disk())
    assert begun < 6
    disk.finish(host_stored(disk, "gold", 91, 92))
    later: list[int] = []
    for _ in range(100):
        disk.finish(disk.wait(HOUR_MS // 8))
        later += sorted(disk.on_disk().keys() - later)
        if 92 in later:
            break
    assert len(later) <= begun + 5, (begun, later, disk.counts)
    disk.core.check()


def test_a_full_queue_drops_the_newest_of_whoever_has_most_of_it() -> None:
    """Five of six wait and are unnamed: a second block of gold comes in for the newest of them."""
    limits = DiskTierLimits(writes_max=1, batch_blocks_max=1, ahead_batches=0, pending_max=6)
    disk = Disk(slots=64, limits=limits)
    host_stored(disk, "", *range(1, 20))
    assert len(disk.core.pending.waiting) == 5
    host_stored(disk, "gold", 101, 102)
    waiting = [int.from_bytes(one, "big") for one in disk.core.pending.waiting]
    assert waiting[-2:] == [101, 102]
    assert waiting[:-2] == sorted(waiting[:-2])
    assert len(waiting) == 6
    host_stored(disk, "gold", *range(103, 120))
    waiting = [int.from_bytes(one, "big") for one in disk.core.pending.waiting]
    assert len([one for one in waiting if one > 100]) == 3
    disk.core.check()
