"""What the router streams keep of engines that have come and gone."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from kvbm_common.identity import SequenceHash
from kvbm_common.wire.engine_events import AllBlocksCleared, BlockStored, decode_batch
from kvbm_common.wire.events import Cleared, Tier
from kvbm_common.wire.raw_events import RawEvent, RawRemoved, RawStored
from kvbm_connectors.consolidator.core.ended_engines import ENDED_MAX, ENDED_MS
from kvbm_connectors.consolidator.core.router_book import TIERS
from kvbm_connectors.consolidator.core.router_stream import RouterStreams
from kvbm_connectors.consolidator.core.token_names import NamedBlocks, TokenNames

from tests.connectors.consolidator.model import NAMESPACE, Router, chain


def come_and_go(streams: RouterStreams, name: str, now_ms: int) -> int:
    """Have an engine of one rank come and go; returns the number of its last batch."""
    streams.engine_known(name, [0])
    cleared = Cleared(host="h", source=name, tier="device", epoch=1, seq=1, ts_ms=0, reason="x")
    streams.take_event(cleared)
    streams.engine_left(name, now_ms)
    streams.take_event(cleared)
    streams.forget_ended(now_ms)
    streams.check()
    return streams.take()[-1].seq


def test_engines_that_left_are_bounded() -> None:
    streams = RouterStreams(TokenNames())
    for number in range(ENDED_MAX + 10):
        come_and_go(streams, f"engine-{number}", number)
    engines = {frame.stream.engine for frame in streams.replay(0, 0)}
    assert engines == {f"engine-{number}" for number in range(10, ENDED_MAX + 10)}


def test_engines_that_left_are_forgotten_after_a_while() -> None:
    streams = RouterStreams(TokenNames())
    come_and_go(streams, "engine", 0)
    streams.forget_ended(ENDED_MS - 1)
    [frame] = streams.replay(0, 0)
    assert decode_batch(frame.payload).events == (AllBlocksCleared(),)
    streams.forget_ended(ENDED_MS)
    assert streams.replay(0, 0) == []


def test_numbers_of_a_forgotten_engine_are_not_used_again() -> None:
    streams = RouterStreams(TokenNames())
    last = come_and_go(streams, "engine", 0)
    streams.forget_ended(ENDED_MS)
    assert come_and_go(streams, "engine", ENDED_MS) > last + 1


def test_an_engine_that_is_back_keeps_its_stream() -> None:
    streams = RouterStreams(TokenNames())
    come_and_go(streams, "engine", 0)
    streams.engine_known("engine", [0])
    streams.forget_ended(2 * ENDED_MS)
    assert [frame.stream.engine for frame in streams.replay(0, 0)] == ["engine"]


# ---- a port that nobody reads ----------------------------------------------------------------

SOME = st.lists(st.integers(0, 7), min_size=1, max_size=4, unique=True)
MEDIA = TIERS[:3]  # Of which routers have different words.
CHANGES = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["stored"] * 3 + ["removed"]), st.sampled_from(MEDIA), SOME),
        st.tuples(st.sampled_from(["cleared", "joined"]), st.just(TIERS[0]), st.just([0])),
    ),
    max_size=25,
)


def event_of(seq: int, kind: str, tier: Tier, blocks: list[SequenceHash]) -> RawEvent:
    """A consolidated event of an engine's second KV group."""
    head: dict[str, Any] = {
        "host": "h", "source": "sim-0", "tier": tier, "epoch": 1, "seq": seq, "ts_ms": 1,
    }  # fmt: skip
    if kind == "cleared":
        return Cleared(**head, reason="reset")
    head |= {"namespace": NAMESPACE.digest.hex(), "group": 1}
    if kind == "removed":
        return RawRemoved(**head, hashes=blocks)
    parent = SequenceHash(b"\xee" * 16)
    return RawStored(**head, runs=[(parent, [block]) for block in blocks])


@settings(max_examples=300, deadline=None)
@given(CHANGES, st.integers(0, 7))
def test_a_first_reader_holds_what_one_from_the_beginning_holds(
    changes: list[tuple[str, Tier, list[int]]], named: int
) -> None:
    """Goal: batches that were not written are missed by no reader, however late the first comes.

    Method: the same events to streams that write from the start and to streams that wait for a
    reader. It reads as vLLM's example does: at a gap it asks for a replay. Some blocks have no
    tokens yet.
    """
    eager = RouterStreams(TokenNames(), dedup=False)
    waiting = RouterStreams(TokenNames(), dedup=False, awaits_readers=True)
    names = [chain((n, n))[0] for n in range(8)]
    reader, reads = Router(), False
    for streams in (eager, waiting):
        streams.engine_known("sim-0", [0])
        streams.learn(NamedBlocks(names[:named], [bytes(8)] * named))
        streams.take()
    held = set[tuple[Tier, int]]()
    for seq, (kind, tier, numbers) in enumerate([*changes, ("joined", TIERS[0], [0])], start=1):
        if kind == "joined":
            reads = True
            waiting.greet(0, b"")
        else:
            there = {(tier, n) for n in numbers}
            wanted = there - held if kind == "stored" else there & held
            held = held - there if kind == "removed" else held | there
            held = set() if kind == "cleared" else held
            if wanted or kind == "cleared":
                blocks = [names[n] for _, n in sorted(wanted)]
                for streams in (eager, waiting):
                    streams.take_event(event_of(seq, kind, tier, blocks))
        frames = waiting.take()
        assert reads or not frames
        for frame in frames:
            if frame.seq > reader.next_seq:
                for missed in waiting.replay(0, reader.next_seq):
                    reader.read(missed)
            elif frame.seq == reader.next_seq:
                reader.read(frame)
        eager.take()
        eager.check()
        waiting.check()
    fresh = Router()
    for frame in eager.replay(0, 0):
        fresh.read(frame)
    assert reader.held == fresh.held
    assert waiting.held("sim-0") == eager.held("sim-0")


def test_batches_without_a_reader_are_numbered_and_not_written() -> None:
    """Goal: nothing is kept for nobody. 1. No frame. 2. The first reader hears of the gap."""
    streams = RouterStreams(TokenNames(), awaits_readers=True)
    (block,) = chain((1, 1))
    streams.engine_known("sim-0", [0])
    streams.learn(NamedBlocks([block], [bytes(8)]))
    streams.take_event(event_of(1, "stored", "device", [block]))
    assert (streams.take(), streams.batch_count) == ([], 1)
    streams.greet(0, b"sim")
    (frame,) = streams.take()
    assert (frame.seq, decode_batch(frame.payload).events) == (1, ())
    (everything, *_) = streams.replay(0, 0)
    assert isinstance(decode_batch(everything.payload).events[0], AllBlocksCleared)


def test_a_block_keeps_its_group_while_one_of_several_tiers_has_it() -> None:
    """Goal: a replay of everything says the KV group. 1. Two tiers have a block, one lets go."""
    streams = RouterStreams(TokenNames(), dedup=False, batches_max=1)
    (block,) = chain((1, 1))
    streams.learn(NamedBlocks([block], [bytes(8)]))
    said = (("stored", "device"), ("stored", "host"), ("removed", "host"))
    for seq, (kind, tier) in enumerate(said, start=1):
        streams.take_event(event_of(seq, kind, tier, [block]))  # type: ignore[arg-type]
    events = [one for frame in streams.replay(0, 0) for one in decode_batch(frame.payload).events]
    assert [one.group_idx for one in events if isinstance(one, BlockStored)] == [1]
    streams.take_event(event_of(4, "removed", "device", [block]))
    streams.check()
