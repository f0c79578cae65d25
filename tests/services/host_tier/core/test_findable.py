"""The names that a lookup may find: the filter has each before anything else is done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from itertools import count
from typing import Any

from kvbm_common.memory.miss_filter import FilterState, MissFilter, MissFilterReader, size_of
from kvbm_common.tier.block_lookup import BlockLookup
from kvbm_common.wire.local import Found, Welcome
from kvbm_host_tier.core.filter_messages import (
    FilterEffect,
    FilterFailed,
    MakeFilter,
    NamesChanged,
    SwitchFilter,
    UseFilter,
)
from kvbm_host_tier.core.findable import RETRY_MOST_MS, Findable
from kvbm_host_tier.core.limits import HostTierLimits
from kvbm_host_tier.core.lower_snapshot import LowerSnapshot
from kvbm_host_tier.core.messages import (
    AskFill,
    Effect,
    FromEngine,
    Input,
    LowerTierJoined,
    LowerTierLeft,
    LowerTierSnapshot,
    Publish,
)
from kvbm_host_tier.core.peer_messages import AskHolders, HoldersTold, PeerJoined, PeerLeft

from tests.services.host_tier.helpers import (
    EPOCH,
    LOOKUP_MS,
    Host,
    connection,
    hello,
    name,
    of,
    on_disk,
)
from tests.services.host_tier.peer_helpers import ANN

NUMBERS = range(1, 60)
ROOMY = 1_000
"""A filter for so many names denies every other of so few."""


class FilteredHost(Host):
    """A host tier whose filter is written as its effects say, and read after each step."""

    def __init__(self, *, refuses: bool = False, **limits: Any) -> None:
        self.reader: MissFilterReader | None = None
        self.made: list[MakeFilter] = []
        self.used = 0
        self.filter: MissFilter | None = None
        self.new: MissFilter | None = None
        self.refuses = refuses
        """No file can be made: the shell says so after the step."""
        self.tries = 0
        super().__init__(**({"miss_filter": True} | limits))

    def step(self, event: Input) -> list[Effect]:
        effects = super().step(event)
        kinds = [isinstance(one, FilterEffect) for one in effects]
        assert kinds == sorted(kinds, reverse=True), "something is done before the filter is right"
        failed: list[FilterFailed] = []
        for effect in effects:
            if isinstance(effect, MakeFilter):
                self.tries += 1
                if self.refuses:
                    self.new = None
                    failed.append(FilterFailed(effect.generation))
                    continue
            self._write(effect)
        for one in failed:
            effects = [*effects, *self.step(one)]
        self.compare()
        return effects

    def _write(self, effect: Effect) -> None:
        match effect:
            case MakeFilter():
                self.made.append(effect)
                self.memory = bytearray(size_of(effect.capacity))
                self.new = MissFilter(memoryview(self.memory), owner=1, epoch=EPOCH)
            case NamesChanged(came, left, is_new):
                one = self.new if is_new else self.filter
                assert one is not None or self.refuses
                if one is not None:
                    one.change(came, left)
            case UseFilter():
                if self.new is None:
                    return
                self.used += 1
                self.filter = self.new
                self.reader = MissFilterReader(self.memory, owner=1, epoch=EPOCH)
            case SwitchFilter(is_complete):
                assert self.filter is not None or self.refuses
                if self.filter is None:
                    return
                self.filter.switch(FilterState.COMPLETE if is_complete else FilterState.PARTIAL)
            case _:
                pass

    def compare(self) -> None:
        """Require of the filter what the core would find, block by block."""
        may_find = {n for n in NUMBERS if self.core.view.may_find(name(n))}
        denied = {n for n in NUMBERS if self.denies(n)}
        assert not denied & may_find
        if self.reader is not None and self.made[-1].capacity >= ROOMY:
            assert denied | may_find == set(NUMBERS)

    def denies(self, number: int) -> bool:
        """Return whether the filter says that a block cannot be found."""
        return self.reader is not None and self.reader.denies_any([name(number)])


def test_offloaded_blocks_come_and_evicted_ones_leave() -> None:
    host = FilteredHost(slots=2)
    assert host.denies(1)
    host.store(1, 2)
    assert [host.denies(n) for n in (1, 2, 3)] == [False, False, True]
    host.store(3)
    assert [host.denies(n) for n in (1, 2, 3)].count(False) == 2


def test_a_block_below_is_there_as_long_as_some_tier_has_it() -> None:
    host = FilteredHost(slots=1)
    host.disk_stored(1, 2)
    host.object_stored(2)
    host.store(1)
    host.store(5)  # Evicts block 1, which the disk has.
    assert [host.denies(n) for n in (1, 2, 5)] == [False] * 3
    host.disk_removed(1, 2)
    assert [host.denies(n) for n in (1, 2, 5)] == [True, False, False]


def test_a_snapshot_and_the_end_of_a_tier_are_followed() -> None:
    host = FilteredHost()
    host.step(LowerTierJoined("0"))
    held = host.disk.snapshot([on_disk(1), on_disk(2)])
    host.step(LowerTierSnapshot("0", LowerSnapshot.of(held)))
    assert [host.denies(n) for n in (1, 2)] == [False, False]
    host.disk_removed(1)
    assert [host.denies(n) for n in (1, 2)] == [True, False]
    host.disk_restarts()
    host.disk_stored(3)
    assert [host.denies(n) for n in (2, 3)] == [True, False]
    host.step(LowerTierLeft("0"))
    assert host.denies(3)


def test_a_block_on_its_way_is_there_though_its_tier_has_lost_it() -> None:
    """A second lookup joins the first, and gets the block."""
    host = FilteredHost()
    host.disk_stored(1)
    [fill] = of(host.look_up(1), AskFill)
    host.disk_removed(1)
    assert not host.denies(1)
    host.look_up(1)
    answers = of(host.told(host.filled(fill)), Found)
    assert [len(one.slots) for one in answers] == [1, 1]


def test_a_fill_that_fails_leaves_no_name() -> None:
    host = FilteredHost()
    host.disk_stored(1)
    [fill] = of(host.look_up(1), AskFill)
    host.filled(fill, 1)
    assert host.denies(1)


def test_with_peers_the_filter_says_nothing_until_all_of_it_is_over() -> None:
    host = FilteredHost(peer_pulls_max=1)
    assert host.denies(1)
    host.step(PeerJoined(ANN))
    assert not host.denies(1)
    [ask] = of(host.look_up(1), AskHolders)
    host.step(PeerLeft(ANN))
    assert not host.denies(1)
    host.step(HoldersTold(ask.question, ()))
    assert host.denies(1)


def test_peers_that_no_block_is_read_from_do_not_matter() -> None:
    host = FilteredHost(peer_pulls_max=0)
    host.step(PeerJoined(ANN))
    assert host.denies(1)


def test_a_filter_that_is_too_small_is_made_again() -> None:
    """By the next tick, with all names; engines that come later are welcomed with it."""
    host = FilteredHost(slots=2, filter_names_least=1)
    host.disk_stored(*range(10, 20))
    assert [(one.generation, one.capacity) for one in host.made] == [(1, 2)]
    host.wait(50)
    assert [(one.generation, one.capacity) for one in host.made] == [(1, 2), (2, 20)]
    assert [host.denies(n) for n in (10, 50)] == [False, True]
    host.wait(50)
    assert len(host.made) == 2
    greeting = hello(role="scheduler")
    effects = host.step(FromEngine(connection(greeting), greeting))
    assert [one.filter for one in of(host.told(effects), Welcome)] == [2]


def test_a_large_filter_is_made_a_slice_at_a_tick() -> None:
    """Goal: no step grows with the number of names, and nothing is forgotten meanwhile.

    1. Ten names, four a tick: the filter before stays in use. 2. What comes and leaves meanwhile is
    written last.
    """
    host = FilteredHost(slots=2, filter_names_least=1, filter_slice=4)
    host.disk_stored(*range(10, 20))
    assert host.used == 1, "the first one, without names"
    host.wait(50)
    assert (len(host.made), host.used) == (2, 1)
    assert not host.core.view.is_quiet, "ticks come often"
    host.disk_removed(10, 11)
    host.disk_stored(30)
    ticks = 0
    while host.used == 1:
        assert [host.denies(n) for n in (12, 30)] == [False, False]
        host.wait(50)
        ticks += 1
    assert ticks == 3, "4 names, then 3 and the 2 that have left, and the end"
    assert [host.denies(n) for n in (10, 11, 12, 19, 30)] == [True, True, False, False, False]
    assert host.core.view.is_quiet


class CountedTable(BlockLookup[int]):
    """A lower tier's table that counts which of its blocks were listed."""

    listed = 0

    def part(self, number: int) -> Set[bytes]:
        found = super().part(number)
        self.listed += len(found)
        return found


def test_a_filter_lists_what_is_below_part_by_part() -> None:
    """Goal: no step lists a million names; those that come or leave meanwhile are counted once."""
    limits = HostTierLimits(miss_filter=True, filter_slice=500)
    findable, table = Findable(limits), CountedTable(0)
    findable.tables = (table,)
    names = [name(number) for number in range(10_000)]
    table.set(names, 1)
    findable.add(names, in_tables=True)
    findable.lay_out(1)
    findable.settle(is_complete=True)
    assert table.listed == 0
    written = Counter[bytes]()
    for number in count():
        findable.tick(number)
        table.drop(names[number : number + 1])
        findable.remove(names[number : number + 1], in_tables=True)
        before = table.listed
        effects = findable.settle(is_complete=True)
        assert table.listed - before <= 2 * limits.filter_slice
        for effect in effects:
            if isinstance(effect, NamesChanged) and effect.is_new:
                written.update(effect.came)
                written.subtract(effect.left)
        if any(isinstance(one, UseFilter) for one in effects):
            break
    assert +written == Counter(table)
    assert min(written.values()) == 0, "some have left after they were listed"


def test_without_the_setting_there_is_no_filter() -> None:
    host = FilteredHost(miss_filter=False)
    host.store(1)
    host.wait(LOOKUP_MS)
    assert host.made == []
    assert not host.denies(1)
    greeting = hello(role="scheduler")
    effects = host.step(FromEngine(connection(greeting), greeting))
    assert [one.filter for one in of(host.told(effects), Welcome)] == [0]


def test_the_filter_is_written_before_a_block_is_announced() -> None:
    host = FilteredHost()
    host.store(1)
    effects = host.core.step(
        FromEngine(b"nobody", hello(role="scheduler", engine="eve")), host.now_ms
    )
    assert not of(effects, Publish)
    assert host.figure("filter_names") == 1
    assert host.figure("filter_complete") == 1


def failures(host: FilteredHost) -> int:
    return host.figure("filters_failed")


def test_a_filter_that_cannot_be_made_is_tried_again_after_a_pause() -> None:
    """1. The first cannot be made: each pause is twice the one before. 2. There is room: it is made
    with the names of then."""
    host = FilteredHost(refuses=True)
    assert (host.tries, failures(host), host.denies(1)) == (1, 1, False)
    host.store(1)
    waits = []
    for _ in range(3):
        started_ms, tries = host.now_ms, host.tries
        while host.tries == tries:
            host.wait(100)
        waits.append(host.now_ms - started_ms)
    assert waits == [1_000, 2_000, 4_000]
    assert failures(host) == 4
    host.refuses = False
    host.wait(RETRY_MOST_MS)
    assert (host.tries, failures(host), host.used) == (5, 4, 1)
    assert [host.denies(n) for n in (1, 2)] == [False, True]
    assert {one.generation for one in host.made} == {1}, "engines know it by this number"


def test_where_a_larger_one_cannot_be_made_the_one_before_stays_right() -> None:
    """It errs more often, and never denies what can be found: `compare` looks after each step."""
    host = FilteredHost(slots=2, filter_names_least=4)
    host.store(1)
    host.refuses = True
    host.disk_stored(*range(10, 30))
    host.wait(100)
    host.disk_removed(10, 11)
    host.step(PeerJoined(ANN))
    assert not host.denies(40), "a peer may have it"
    host.step(PeerLeft(ANN))
    host.refuses = False
    host.wait(RETRY_MOST_MS)
    assert (host.used, host.made[-1].generation) == (2, 2)
    assert [host.denies(n) for n in (1, 12)] == [False, False]
