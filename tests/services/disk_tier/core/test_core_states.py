"""Every order of events: five slots, eight blocks, a host tier that comes, goes and forgets.

`Disk` checks the core after every step, that what is announced is what is committed, and the
numbering. Here the outside world keeps the bytes themselves: which block's bytes lie in which slot
of the file, of which writing. So it can tell what the core must not do: use a slot that a transfer
still reads or writes, believe bytes that are not there, bring a wrong block back from the journal.
"""

from __future__ import annotations

from typing import TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from kvbm_common.eviction import POLICIES
from kvbm_common.wire.admin import PolicyRequest, ResizeRequest
from kvbm_disk_tier.core.effects import (
    AnnounceLater,
    Answer,
    AppendJournal,
    AskArena,
    Effect,
    LeaseHost,
    OpenStore,
    ReadSlots,
    ReleaseHost,
    RewriteJournal,
    WriteSlots,
)
from kvbm_disk_tier.core.journal import Operation, Record, Replay
from kvbm_disk_tier.core.limits import DiskTierLimits
from kvbm_disk_tier.core.messages import (
    AdminAsked,
    AnnounceMore,
    ArenaFailed,
    ArenaKnown,
    HostJoined,
    HostLeft,
    ReadFailed,
    ReadLanded,
    StoreFailed,
    StoreOpened,
)
from kvbm_disk_tier.core.store_status import STORE_RETRY_MS

from tests.services.disk_tier.helpers import (
    HOST_EPOCH,
    Disk,
    arena,
    asked,
    block,
    filled,
    layout,
    numbers,
    of,
    opened,
)

T = TypeVar("T")
BLOCKS = st.lists(st.integers(1, 8), min_size=1, max_size=4, unique=True)
SLOTS = 5


class Everything(RuleBasedStateMachine):
    """The outside world; what it does to the core is in `Disk`."""

    def __init__(self) -> None:
        super().__init__()
        self.disk = Disk(ready=False)
        self.epoch = HOST_EPOCH
        self.bytes_in: dict[int, int] = {}
        """File slot → whose bytes are in it, by the writes that have ended well."""
        self.leases: list[LeaseHost] = []
        self.writes: list[WriteSlots] = []
        self.releases: list[ReleaseHost] = []
        self.appends: list[AppendJournal] = []
        self.reads: list[ReadSlots] = []
        self.opens: list[OpenStore] = []
        self.questions: list[AskArena] = []
        self.written: dict[int, WriteSlots] = {}
        """Write → what it has written, until it ends."""
        self.held: set[int] = set()
        """Leases that the host tier has granted and not got back."""
        self.believed: set[int] = set()
        """Writes whose copy held, and whose records are still to come."""
        self.unanswered = 0
        self.parts: list[RewriteJournal] = []
        """The part of a rewrite in flight."""
        self.untold = False
        """Of a former life's blocks some are still to be announced."""

    @initialize(
        filtered=st.booleans(), staging=st.booleans(), writes_max=st.integers(1, 3),
        former=st.lists(st.integers(1, 8), max_size=SLOTS, unique=True),
        wait_ms=st.sampled_from([0, 1_000]),
    )  # fmt: skip
    def begin(
        self, filtered: bool, staging: bool, writes_max: int, former: list[int], wait_ms: int
    ) -> None:
        limits = DiskTierLimits(
            writes_max=writes_max, commits_max=2, reads_max=2, reads_waiting_max=3,
            batch_blocks_max=2, pending_max=6, journal_records_per_slot=1,
            announced_blocks_max=1, journal_wait_ms=wait_ms, rewritten_slots_max=1,
        )  # fmt: skip
        self.disk = Disk(
            slots=SLOTS, filtered=filtered, staging=staging, ready=False, limits=limits
        )
        self.take(self.disk.step(HostJoined("0")))
        if former:
            self.wake_up(former)
        self.host_lives("arena")

    def wake_up(self, former: list[int]) -> None:
        """A former life has left these blocks; only the first is announced at once."""
        self.bytes_in = dict(enumerate(former))
        found = {slot: block(number) for slot, number in enumerate(former)}
        records = [
            Record(Operation.COMMITTED, 1 + slot, slot, there) for slot, there in found.items()
        ]
        self.disk.journal += records
        replay = Replay(found, 1 + len(records), len(records), 0)
        self.take(self.disk.step(StoreOpened(layout(SLOTS), replay)))
        assert self.disk.on_disk() == {number: slot for slot, number in enumerate(former)}

    def take(self, effects: list[Effect]) -> None:
        """What the outside world makes of effects."""
        for effect in effects:
            match effect:
                case LeaseHost():
                    self.leases.append(effect)
                case WriteSlots():
                    self.check_write(effect)
                    self.writes.append(effect)
                case ReleaseHost():
                    self.releases.append(effect)
                case AppendJournal(write=int()):
                    self.check_append(effect)
                    self.appends.append(effect)
                case ReadSlots():
                    self.check_read(effect)
                    self.reads.append(effect)
                case OpenStore():
                    assert not self.writes
                    assert not self.reads
                    self.opens.append(effect)
                case AskArena():
                    self.questions.append(effect)
                case Answer():
                    self.unanswered -= 1
                case AnnounceLater():
                    self.untold = True
                case RewriteJournal():
                    assert not self.parts, "two parts of a rewrite are in flight"
                    self.parts.append(effect)
                case _:
                    pass

    def check_write(self, write: WriteSlots) -> None:
        """Nobody else reads or writes these slots, and nobody can find anything in them."""
        busy = {slot for other in self.writes for slot in other.targets}
        busy |= {slot for other in self.written.values() for slot in other.targets}
        busy |= {slot for read in self.reads for slot in read.sources}
        busy |= set(self.disk.on_disk().values())
        assert len(set(write.targets)) == len(write.targets)
        assert not busy & set(write.targets), "a slot is used twice"

    def check_append(self, append: AppendJournal) -> None:
        """Only bytes that are in the file, and held, are said to be."""
        assert append.write is not None
        self.believed.remove(append.write)
        for record in append.records:
            assert record.operation is Operation.COMMITTED
            assert self.bytes_in[record.place] == numbers([record.block])[0]

    def check_read(self, read: ReadSlots) -> None:
        """What is read is what was written, with the checksum of that block."""
        for slot, number in zip(read.sources, numbers(read.blocks), strict=True):
            assert self.bytes_in[slot] == number
        assert read.epoch == self.epoch

    @staticmethod
    def one_of(data: st.DataObject, entries: list[T]) -> T:
        return entries.pop(data.draw(st.integers(0, len(entries) - 1)))

    # --- the host tier ----------------------------------------------------------------------

    @rule(blocks=BLOCKS, what=st.sampled_from(["stored", "stored", "hit", "listed"]))
    def host_says(self, blocks: list[int], what: str) -> None:
        say = {"stored": self.disk.host_stored, "hit": self.disk.hit, "listed": self.disk.listed}
        self.take(say[what](*blocks))

    @rule(what=st.sampled_from(["arena", "arena", "arena", "lost", "restarted"]))
    def host_lives(self, what: str) -> None:
        match what:
            case "arena":
                self.questions.clear()
                reply = arena(epoch=self.epoch, staging=self.disk.staging)
                self.take(self.disk.step(ArenaKnown(reply)))
            case "lost":
                self.take(self.disk.step(HostLeft("0")))
            case _:
                self.epoch += 1
                self.held.clear()
                self.disk.host.epoch += 1
                self.take(self.disk.step(HostJoined("0")))
                reply = arena(epoch=self.epoch, staging=self.disk.staging)
                self.take(self.disk.step(ArenaKnown(reply)))

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), outcome=st.sampled_from(["all", "all", "some", "share", "failed"]))
    def end_lease(self, data: st.DataObject, outcome: str) -> None:
        lease = self.one_of(data, self.leases)
        if outcome == "failed" or lease.request.epoch != self.epoch:
            self.take(self.disk.lease_failed(lease))
            return
        missing = asked(lease)[1:] if outcome == "some" else []
        over_share = asked(lease)[len(asked(lease)) // 2 :] if outcome == "share" else []
        self.held.add(lease.write)
        self.take(self.disk.leased(lease, *missing, over_share=over_share))

    @precondition(lambda self: self.writes)
    @rule(data=st.data(), failed=st.sampled_from([False, False, True]))
    def end_write(self, data: st.DataObject, failed: bool) -> None:
        write = self.one_of(data, self.writes)
        for slot in write.targets:
            self.bytes_in[slot] = -1
        if failed:
            self.take(self.disk.write_failed(write))
            return
        # Block n is in arena slot n.
        self.bytes_in.update(zip(write.targets, write.sources, strict=True))
        self.written[write.write] = write
        self.take(self.disk.written(write))

    @precondition(lambda self: self.releases)
    @rule(data=st.data(), expired=st.sampled_from([False, False, False, True]))
    def end_release(self, data: st.DataObject, expired: bool) -> None:
        release = self.one_of(data, self.releases)
        valid = release.write in self.held and not expired
        self.held.discard(release.write)
        self.end(release, valid=valid)

    def end(self, release: ReleaseHost, *, valid: bool) -> None:
        if release.write in self.written and valid:
            self.believed.add(release.write)
        else:
            self.written.pop(release.write, None)
        self.take(self.disk.released(release, valid=valid))
        follows = self.writes or self.releases
        assert follows or not self.believed, "nothing would make it record what is there"

    @precondition(lambda self: self.appends)
    @rule(data=st.data(), outcome=st.sampled_from(["done", "done", "done", "failed", "torn"]))
    def end_append(self, data: st.DataObject, outcome: str) -> None:
        # In order: there is one thread and one file.
        append = self.appends.pop(0)
        assert append.write is not None
        del self.written[append.write]
        if outcome == "done":
            self.take(self.disk.journaled(append))
        else:
            self.take(self.disk.journal_failed(append, torn=outcome == "torn"))

    @precondition(lambda self: self.parts)
    @rule(failed=st.sampled_from([False, False, False, True]))
    def end_part(self, failed: bool) -> None:
        part = self.parts.pop()
        self.take(self.disk.rewrite_failed() if failed else self.disk.rewritten(part))

    @rule(blocks=BLOCKS, torn=st.sampled_from([False, False, True]))
    def store(self, blocks: list[int], torn: bool) -> None:
        """The usual case: these blocks, wanted twice, and none in flight fails. Or the journal
        has the records, and no answer says so."""
        while self.opens:
            self.end_open(full=False)
        for _ in range(2):
            self.take(self.disk.hit(*blocks))
        while self.leases or self.writes or self.releases or self.appends:
            self.go_on(torn=torn)

    def go_on(self, *, torn: bool) -> None:
        if self.appends:
            append = self.appends.pop(0)
            assert append.write is not None
            del self.written[append.write]
            failed = self.disk.journal_failed
            self.take(failed(append, torn=True) if torn else self.disk.journaled(append))
        elif self.releases:
            release = self.releases.pop(0)
            valid = release.write in self.held
            self.held.discard(release.write)
            self.end(release, valid=valid)
        elif self.writes:
            write = self.writes.pop(0)
            self.bytes_in.update(zip(write.targets, write.sources, strict=True))
            self.written[write.write] = write
            self.take(self.disk.written(write))
        else:
            lease = self.leases.pop(0)
            self.held.add(lease.write)
            self.take(self.disk.leased(lease))

    # --- reads ------------------------------------------------------------------------------

    @rule(blocks=BLOCKS, ms=st.sampled_from([1, 100, 1_000]))
    def fill(self, blocks: list[int], ms: int) -> None:
        self.unanswered += 1
        until_ms = self.disk.now_ms + ms
        self.take(self.disk.fill(*blocks, epoch=self.epoch, until_ms=until_ms))

    @precondition(lambda self: self.reads)
    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        """Its bytes are there; it has not ended."""
        self.take(self.disk.step(ReadLanded(data.draw(st.sampled_from(self.reads)).read)))

    @precondition(lambda self: self.reads)
    @rule(data=st.data(), outcome=st.sampled_from(["done", "done", "rotten", "failed"]))
    def end_read(self, data: st.DataObject, outcome: str) -> None:
        read = self.one_of(data, self.reads)
        if outcome == "failed":
            self.take(self.disk.step(ReadFailed(read.read, "transfer_timeout")))
            return
        rotten = numbers(read.blocks)[:1] if outcome == "rotten" else []
        effects = self.disk.read(read, *rotten)
        answer = filled(of(effects, Answer)[:1])
        good = {number for number, reason in answer.items() if not reason}
        assert good == set(numbers(read.blocks)) - set(rotten)
        self.take(effects)

    # --- the store --------------------------------------------------------------------------

    @precondition(lambda self: self.opens)
    @rule(full=st.sampled_from([False, False, True]))
    def end_open(self, *, full: bool) -> None:
        self.opens.pop()
        self.take(self.disk.step(StoreFailed("full") if full else opened(SLOTS)))

    @rule(slots=st.integers(1, SLOTS + 1))
    def resize(self, slots: int) -> None:
        """An operator makes the tier smaller or larger; its journal says what went."""
        self.unanswered += 1
        self.take(self.disk.step(AdminAsked(0, "resize", ResizeRequest(slots=slots))))

    @rule(policy=st.sampled_from(sorted(POLICIES)))
    def use_policy(self, policy: str) -> None:
        before = self.disk.on_disk()
        self.unanswered += 1
        self.take(self.disk.step(AdminAsked(0, "policy", PolicyRequest(policy=policy))))
        assert self.disk.on_disk() == before

    @precondition(lambda self: self.untold)
    @rule()
    def announce(self) -> None:
        self.untold = False
        self.take(self.disk.step(AnnounceMore()))

    @rule(ms=st.sampled_from([1, 100, STORE_RETRY_MS]))
    def wait(self, ms: int) -> None:
        self.take(self.disk.wait(ms))

    def teardown(self) -> None:
        """Everything ends: nothing is staged, pinned or leased, and a restart finds the truth."""
        while self.leases or self.writes or self.releases or self.appends or self.reads:
            self.end_one()
        while self.questions:  # A fill may wait for the arena.
            self.take(self.disk.step(ArenaFailed(self.questions.pop().instance)))
        while self.untold:
            self.announce()
        assert self.disk.announced == set(self.disk.on_disk())
        table = self.disk.core.inventory.table
        assert table.staged() == set()
        assert table.pins() == {}
        assert self.held == set()
        assert self.unanswered == 0
        assert not self.disk.core.writes.in_flight.by_id
        assert not self.disk.core.reads.in_flight
        assert self.disk.recovered() == self.disk.on_disk(), "a restart would find something else"
        while self.parts:
            self.take(self.disk.rewritten(self.parts.pop()))
        assert self.disk.recovered() == self.disk.on_disk(), "a rewrite has written something else"
        for number, slot in self.disk.on_disk().items():
            assert self.bytes_in[slot] == number, self.disk.core.story

    def end_one(self) -> None:
        """Something in flight ends badly."""
        if self.leases:
            effects = self.disk.lease_failed(self.leases.pop())
        elif self.writes:
            effects = self.disk.write_failed(self.writes.pop())
        elif self.releases:
            release = self.releases.pop()
            self.held.discard(release.write)
            effects = self.disk.released(release, valid=False)
        elif self.appends:
            effects = self.disk.journal_failed(self.appends.pop(0))
        else:
            effects = self.disk.step(ReadFailed(self.reads.pop().read, "closed"))
        self.take(effects)


Everything.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestEverything = Everything.TestCase
