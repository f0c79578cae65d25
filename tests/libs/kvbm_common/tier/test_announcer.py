"""The announcer: contiguous numbers, and runs that say the same as the blocks they came from."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from kvbm_common.identity import SequenceHash, hash_from_hex
from kvbm_common.tier.announcer import EVENT_BLOCKS_MAX, Announcer, runs_of
from kvbm_common.tier.slots import Block
from kvbm_common.wire.events import Event, Run, event_codec

from tests.libs.helpers import block, name

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
