"""The announcer: contiguous numbers, and runs that say the same as the blocks they came from."""

from __future__ import annotations

import random
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvbm_common.eviction import make_policy
from kvbm_common.identity import SequenceHash, hash_from_hex
from kvbm_common.tier.announcer import EVENT_BLOCKS_MAX, Announcer, runs_of
from kvbm_common.tier.slot_blocks import STRETCH_BITS
from kvbm_common.tier.slots import Block
from kvbm_common.wire.events import Event, Removed, Run, Stored, event_codec

from tests.libs.helpers import block, name, plain_table

OTHER = b"o" * 32


def announcer() -> Announcer:
    """Of a host tier in its seventh life."""
    return Announcer(host="h", source="host-tier-0", tier="host", epoch=7)


def pairs_of(runs: list[Run]) -> list[tuple[SequenceHash, SequenceHash]]:
    """(block, parent) as a consumer reads them from runs."""
    pairs: list[tuple[SequenceHash, SequenceHash]] = []
    for run in runs:
        parent = hash_from_hex(run.parent)
        for text in run.hashes:
            pairs.append((hash_from_hex(text), parent))
            parent = hash_from_hex(text)
    return pairs


def test_numbers_are_contiguous_over_all_kinds() -> None:
    """Cleared, stored, removed: 1, 2, 3, all of epoch 7. Nothing to say costs no number."""
    source = announcer()
    events: list[Event] = [source.cleared("start"), *source.stored([block(1)])]
    assert source.stored([]) == []
    assert source.removed([], "evicted") == []
    events += source.removed([block(1)], "evicted")
    assert [(event.epoch, event.seq) for event in events] == [(7, 1), (7, 2), (7, 3)]


def test_a_chain_is_one_run() -> None:
    """1 ← 2 ← 3 travel under one parent."""
    [event] = announcer().stored([block(1), block(2), block(3)])
    assert event.runs == [
        Run(parent=name(0).hex(), hashes=[name(n).hex() for n in (1, 2, 3)]),
    ]


def test_a_fork_is_two_runs() -> None:
    """2 and 3 are both children of 1: only one of them can continue its run."""
    runs = runs_of([(name(1), name(0)), (name(2), name(1)), (name(3), name(1))])
    assert [run.hashes for run in runs] == [[name(1).hex(), name(2).hex()], [name(3).hex()]]
    assert runs[1].parent == name(1).hex()


def test_namespaces_do_not_mix() -> None:
    """One event per namespace, each with its own blocks."""
    events = announcer().stored([block(1), block(2, namespace=OTHER)])
    assert [(event.namespace, event.runs[0].hashes) for event in events] == [
        (block(1).namespace.hex(), [name(1).hex()]),
        (OTHER.hex(), [name(2).hex()]),
    ]
    assert [event.seq for event in events] == [1, 2]


def test_events_are_bounded_and_a_snapshot_is_whole() -> None:
    """One block more than an event takes: two events, but one part of a snapshot, as of seq 2."""
    source = announcer()
    blocks = [block(number) for number in range(1, EVENT_BLOCKS_MAX + 2)]
    events = source.stored(blocks)
    assert [sum(len(run.hashes) for run in event.runs) for event in events] == [EVENT_BLOCKS_MAX, 1]
    assert len(source.removed(blocks, "evicted")) == 2
    snapshot = source.snapshot(blocks)
    assert (snapshot.epoch, snapshot.seq) == (7, 4)
    [part] = snapshot.parts
    assert len(pairs_of(part.runs)) == len(blocks)


@pytest.mark.parametrize("seed", range(40))
def test_pages_and_the_events_behind_their_moment_are_the_tier(seed: int) -> None:
    """Between two pages blocks come, leave, and come again in other slots, read or unread.

    A reader that follows the moment's number has the blocks of the tier with each event.
    """
    rng, source = random.Random(seed), announcer()
    count = 6 << STRETCH_BITS
    table = plain_table(count, partial(make_policy, "lru"))
    events: list[Event] = [source.cleared("start")]

    def change() -> None:
        """Have some blocks leave, pinned or not, and others, or the same ones, come."""
        here = [one.hash for one in table.blocks()]
        slots = [table.find(one) for one in rng.sample(here, min(len(here), 9))]
        pinned = [slot for slot in slots if slot is not None]
        for slot in pinned:
            table.pin(slot)
        gone = [table.discard(one) for one in rng.sample(here, len(here) // rng.randint(1, 5))]
        events.extend(source.removed([one for one in gone if one is not None], "evicted"))
        for part in range(3):
            drawn = rng.sample(range(1, count), count // 5)
            new = [number for number in drawn if table.find(name(number)) is None]
            room = table.room_for(len(new), 64)
            taken = table.stage_all([name(n) for n in new[:room]], 64)
            entries = [(slot, block(n)) for slot, n in zip(taken, new, strict=False)]
            table.register_all(entries)
            events.extend(source.stored([one for _, one in entries]))
            if part == 1:
                table.unpin(pinned)
        table.check()

    change()
    makers = source.moment(
        [partial(table.unfolded_in, part) for part in table.cut(rng.randint(1, 2_000))]
    )
    moment = source.seq
    found: set[str] = set()
    for maker in makers:
        page = maker()
        assert (page.seq, page.pages) == (moment, len(makers))
        found |= {text for part in page.parts for run in part.runs for text in run.hashes}
        change()
    for event in events:
        match event:
            case Stored() if event.seq > moment:
                found |= {text for run in event.runs for text in run.hashes}
            case Removed() if event.seq > moment:
                found -= {*event.hashes}
    assert found == {one.hash.hex() for one in table.blocks()}
    assert moment < source.seq


def test_what_is_announced_can_be_decoded() -> None:
    """The strict decoder of the other side takes every kind."""
    source = announcer()
    events: list[Event] = [
        source.cleared("start"), *source.stored([block(1)]), *source.removed([block(1)], "corrupt"),
    ]  # fmt: skip
    for event in events:
        assert event_codec.decode(event_codec.encode(event)) == event


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30)), unique_by=lambda p: p[0]))
@settings(max_examples=80, deadline=None)
def test_runs_say_what_the_blocks_say(forest: list[tuple[int, int]]) -> None:
    """Any set of (block, parent): a reader of the runs finds exactly those pairs."""
    blocks: list[Block] = [block(number, parent=parent) for number, parent in forest]
    pairs = [(entry.hash, entry.parent) for entry in blocks]
    assert sorted(pairs_of(runs_of(pairs))) == sorted(pairs)
