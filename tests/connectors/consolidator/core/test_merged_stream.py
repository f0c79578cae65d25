"""The consolidated stream: holders over tiers, modes, gaps, what routers are told; a property."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvbm_common.identity import Namespace, SequenceHash, hash_from_hex
from kvbm_common.tier.announcer import Announcer
from kvbm_common.tier.slots import Block
from kvbm_common.wire.engine_events import (
    AllBlocksCleared,
    BlockStored,
    EngineEvent,
    decode_batch,
)
from kvbm_common.wire.events import Cleared, Event, Removed, Stored, Tier
from kvbm_common.wire.raw_events import RawRemoved, RawStored
from kvbm_common.wire.verbs import SnapshotReply
from kvbm_connectors.consolidator.core import router_stream
from kvbm_connectors.consolidator.core.messages import (
    AnswerRouter,
    AskSnapshot,
    Broadcast,
    ConsolidatorLimits,
    Describe,
    EngineDetached,
    EpochGranted,
    RouterAsked,
    RouterJoined,
    StreamAttached,
    Tick,
    TierEvents,
    TierJoined,
    TierLeft,
    TierSnapshot,
    TierSnapshotFailed,
    TierStreamLost,
)
from kvbm_connectors.consolidator.core.router_stream import (
    Frame,
    RouterStreams,
    StreamId,
    short_hash,
)
from kvbm_connectors.consolidator.core.token_names import NamedBlocks, TokenNames

from tests.connectors.consolidator.model import (
    INCARNATION,
    NAMESPACE,
    Device,
    Harness,
    Router,
    attach,
    batch_received,
    chain,
    engine_hash,
    key,
    removed,
    stored,
    whole_of,
)

PROMPT = (1, 2, 3, 4, 5, 6)
BLOCKS = chain(PROMPT)


class TierModel:
    """A tier: what it holds, and its events, which a test may lose."""

    def __init__(
        self, harness: Harness, tier: Tier, epoch: int = 1, *, instance: str = "0"
    ) -> None:
        self.harness, self.tier = harness, tier
        self.source = f"{tier}-tier-{instance}"
        self.held: dict[SequenceHash, Block] = {}
        self.begin(epoch)

    def begin(self, epoch: int) -> None:
        """A new life, which holds nothing."""
        self.announcer = Announcer(host="h", source=self.source, tier=self.tier, epoch=epoch)
        self.held.clear()
        self.harness.send(TierJoined(self.source, self.tier, epoch))
        self.send(self.announcer.cleared("start"))

    def send(self, *events: Event, lose: bool = False) -> None:
        """Events arrive, or are lost."""
        if not lose:
            self.harness.send(TierEvents(events))
        self.answer()

    def answer(self) -> None:
        """Answer for a snapshot, if one is asked for."""
        self.harness.send(Tick())
        asked = [effect for effect in self.harness.other if isinstance(effect, AskSnapshot)]
        for effect in asked:
            if effect.source == self.source:
                self.harness.other.remove(effect)
                self.harness.send(TierSnapshot(self.snapshot()))

    def snapshot(self) -> SnapshotReply:
        """All that is held."""
        return self.announcer.snapshot(list(self.held.values()))

    def store(self, *blocks: SequenceHash, parent: SequenceHash | None = None,
              lose: bool = False, namespace: Namespace = NAMESPACE) -> None:  # fmt: skip
        """Hold some blocks of a chain."""
        parents = [NAMESPACE.root if parent is None else parent, *blocks[:-1]]
        new = [
            Block(hash=block, parent=behind, namespace=namespace.digest, checksum=0, bytes=1)
            for block, behind in zip(blocks, parents, strict=True)
        ]
        self.held |= {block.hash: block for block in new}
        self.send(*self.announcer.stored(new), lose=lose)

    def remove(self, *blocks: SequenceHash, lose: bool = False) -> None:
        """Drop some."""
        gone = [self.held.pop(block) for block in blocks]
        self.send(*self.announcer.removed(gone, "evicted"), lose=lose)


@pytest.fixture
def harness() -> Harness:
    """One attached engine of one rank, with an epoch."""
    harness = Harness()
    harness.attach()
    return harness


@pytest.fixture
def host(harness: Harness) -> TierModel:
    return TierModel(harness, "host")


@pytest.fixture
def disk(harness: Harness) -> TierModel:
    return TierModel(harness, "disk")


def kinds(harness: Harness, since: int = 0) -> list[tuple[str, str]]:
    """Kinds and tiers of the consolidated events."""
    events = harness.merged.events[since:]
    return [(str(event.__struct_config__.tag), event.tier) for event in events]


# ---- holders ---------------------------------------------------------------------------------


def test_the_first_store_and_the_last_removal_are_said(
    harness: Harness, host: TierModel, disk: TierModel
) -> None:
    """1. Device, host, disk store. 2. Device and host evict while the disk holds: nothing is said.
    3. The disk evicts: removed, naming the tier that was said."""
    harness.batch(0, stored(PROMPT))
    since = len(harness.merged.events)
    host.store(*BLOCKS)
    disk.store(*BLOCKS)
    harness.batch(1, removed(*(engine_hash(PROMPT[:end]) for end in (6, 4, 2))))
    host.remove(*BLOCKS)
    assert kinds(harness, since) == []
    assert harness.merged.blocks() == set(BLOCKS)
    disk.remove(BLOCKS[2])
    assert kinds(harness, since) == [("removed", "device")]
    assert harness.merged.blocks() == set(BLOCKS[:2])
    assert {block for _, block in harness.routers[0].held} == set(map(short_hash, BLOCKS[:2]))


def test_two_host_tiers_of_a_host_are_two_holders(harness: Harness, host: TierModel) -> None:
    """1. Both have the blocks. 2. One evicts, then dies: nothing is said, for the other has them.
    3. The other evicts: they are gone."""
    second = TierModel(harness, "host", instance="1")
    host.store(*BLOCKS)
    second.store(*BLOCKS)
    since = len(harness.merged.events)
    second.remove(BLOCKS[2])
    harness.send(TierLeft(second.source, 1))
    assert kinds(harness, since) == []
    assert harness.merged.blocks() == set(BLOCKS)
    host.remove(*reversed(BLOCKS))
    assert kinds(harness, since) == [("removed", "host")]
    assert harness.merged.blocks() == set()


def test_passthrough_says_every_tier() -> None:
    harness = Harness(dedup=False)
    harness.attach()
    host = TierModel(harness, "host")
    harness.batch(0, stored(PROMPT[:2]))
    host.store(BLOCKS[0])
    harness.batch(1, removed(engine_hash(PROMPT[:2])))
    host.remove(BLOCKS[0])
    assert kinds(harness, 1) == [
        ("stored", "device"), ("stored", "host"), ("removed", "device"), ("removed", "host"),
    ]  # fmt: skip
    assert harness.routers[0].held == set()


def test_a_block_that_a_tier_has_first_is_said_of_that_tier(
    harness: Harness, host: TierModel
) -> None:
    """A tier has it, an engine computes it: one store, of the host; the last removal names it."""
    since = len(harness.merged.events)
    host.store(BLOCKS[0])
    harness.batch(0, stored(PROMPT[:2]))
    host.remove(BLOCKS[0])
    assert kinds(harness, since) == [("stored", "host")]
    harness.batch(1, removed(engine_hash(PROMPT[:2])))
    assert kinds(harness, since) == [("stored", "host"), ("removed", "host")]


def test_a_block_that_comes_back_to_the_device_was_said_all_the_time(
    harness: Harness, host: TierModel
) -> None:
    """1. The device evicts what the host has, and has it again. 2. Both lose it: one removal."""
    harness.batch(0, stored(PROMPT[:2]))
    host.store(BLOCKS[0])
    since = len(harness.merged.events)
    harness.batch(1, removed(engine_hash(PROMPT[:2])))
    harness.batch(2, stored(PROMPT[:2]))
    host.remove(BLOCKS[0])
    assert kinds(harness, since) == []
    harness.batch(3, removed(engine_hash(PROMPT[:2])))
    assert kinds(harness, since) == [("removed", "device")]


def test_device_blocks_count_for_their_rank_and_tiers_for_all(harness: Harness) -> None:
    harness.send(StreamAttached(attach(rank=1), b"peer1"))
    host = TierModel(harness, "host")
    harness.batch(0, stored(PROMPT[:2]))
    assert harness.merged.blocks(1) == set()
    host.store(BLOCKS[0])
    assert harness.merged.blocks(1) == {BLOCKS[0]}
    harness.batch(1, removed(engine_hash(PROMPT[:2])))
    assert harness.merged.blocks(0) == harness.merged.blocks(1) == {BLOCKS[0]}
    host.remove(BLOCKS[0])
    assert harness.merged.blocks(0) == harness.merged.blocks(1) == set()


def test_another_namespace_is_nobody_s_business(harness: Harness, host: TierModel) -> None:
    since = len(harness.merged.events)
    other = Block(hash=BLOCKS[0], parent=BLOCKS[1], namespace=b"n" * 32, checksum=0, bytes=1)
    host.send(*host.announcer.stored([other]))
    assert kinds(harness, since) == []


# ---- lives -----------------------------------------------------------------------------------


def test_an_engine_that_comes_hears_what_the_tiers_have() -> None:
    """1. The tier is full before. 2. The engine attaches: cleared, then stored at once.
    3. It ends: cleared, and nothing after. 4. Its next life hears it again."""
    harness = Harness()
    host = TierModel(harness, "host")
    host.store(*BLOCKS)
    harness.attach()
    assert kinds(harness) == [("cleared", "device"), ("stored", "host")]
    harness.send(EngineDetached("sim-0", INCARNATION))
    assert kinds(harness, 2) == [("cleared", "device")]
    host.remove(BLOCKS[2])
    harness.attach()
    assert harness.merged.blocks() == set(BLOCKS[:2])
    snapshot = whole_of(harness.whole.merged.snapshot_pages("sim-0"))
    assert snapshot is not None
    assert snapshot.parts[0].runs[0].hashes == [block.hex() for block in BLOCKS[:2]]
    assert whole_of(harness.whole.merged.snapshot_pages("nobody")) is None


@pytest.mark.parametrize("then", ["it stays away", "it comes back", "the device stores them"])
def test_a_snapshot_while_a_tier_s_blocks_are_taken_back_has_what_is_published(
    then: str,
) -> None:
    """1. A tier with thirty blocks leaves, and its blocks are removed in parts of four. 2. Between
    two parts a reader asks for a snapshot. 3. The tier comes back before the other parts, or the
    engine stores the blocks: no event says so of those that are still published."""
    harness = Harness(ConsolidatorLimits(tier_blocks_max=4))
    harness.attach()
    host, disk = TierModel(harness, "host"), TierModel(harness, "disk")
    tokens = tuple(range(62))
    names = chain(tokens)
    host.store(*names[:30])
    disk.store(*names[:3])
    harness.is_patient = True
    harness.send(TierLeft(host.source, 1))
    assert len(harness.merged.blocks()) > 20, "most removals are still to come"
    snapshot = whole_of(harness.whole.merged.snapshot_pages("sim-0"))
    assert snapshot is not None
    runs = [run for part in snapshot.parts for run in part.runs]
    late = {hash_from_hex(text) for run in runs for text in run.hashes}
    since = len(harness.merged.events)
    if then == "it comes back":
        host.begin(2)
        host.store(*names[:30])
    elif then == "the device stores them":
        harness.batch(0, stored(tokens[:60]))
    harness.go_on()
    for event in harness.merged.events[since:]:
        if isinstance(event, Stored):
            late |= {hash_from_hex(text) for run in event.runs for text in run.hashes}
        elif isinstance(event, Removed):
            late -= {hash_from_hex(text) for text in event.hashes}
    assert late == harness.merged.blocks()


@pytest.mark.parametrize("way", ["into the device", "out of it"])
def test_a_block_that_moves_before_its_page_is_made_is_in_the_snapshot(way: str) -> None:
    """No event says that a published block is in the device, too, or only in a tier now."""
    harness = Harness()
    harness.attach()
    host = TierModel(harness, "host")
    names = chain(PROMPT)
    host.store(*names)
    if way == "out of it":
        harness.batch(0, stored(PROMPT))
    pages = harness.whole.merged.snapshot_pages("sim-0")
    since = len(harness.merged.events)
    if way == "out of it":
        harness.batch(1, removed(*(engine_hash(PROMPT[:end]) for end in (2, 4, 6))))
    else:
        harness.batch(0, stored(PROMPT))
    assert len(harness.merged.events) == since, "nothing is published"
    snapshot = whole_of(pages)
    assert snapshot is not None
    said = [text for part in snapshot.parts for run in part.runs for text in run.hashes]
    assert said == [name.hex() for name in names]


def test_no_step_says_more_than_some_blocks_of_tiers() -> None:
    """Goal: a million blocks hold up no engine. A step reads four, or says four.

    1. A tier with thirty blocks answers. 2. An engine clears its stream, and hears all again. 3.
    The tier leaves.
    """
    harness = Harness(ConsolidatorLimits(tier_blocks_max=4))
    harness.attach()
    host = TierModel(harness, "host")
    names = [NAMESPACE.root, *(SequenceHash(number.to_bytes(16, "big")) for number in range(1, 31))]
    host.store(*names[1:], lose=True)
    harness.send(TierStreamLost(host.source))
    host.answer()
    assert harness.merged.blocks() == set(names[1:])
    harness.batch(0, stored(PROMPT))
    harness.batch(1, AllBlocksCleared())
    assert harness.merged.blocks() == set(names[1:])
    harness.send(TierLeft(host.source, 1))
    assert harness.merged.blocks() == set()
    said = [one for one in harness.merged.events if isinstance(one, (Stored, Removed))]
    counts = [
        len(one.hashes) if isinstance(one, Removed) else sum(len(run.hashes) for run in one.runs)
        for one in said
    ]
    assert (sum(counts), max(counts)) == (3 + 90, 4)


def test_events_of_a_tier_do_not_outrun_its_snapshot() -> None:
    """They wait until it is read: with parts in turns alone more came than may wait, and the
    snapshot was asked for again without end.

    1. A snapshot of 400 blocks is read in parts of four, a turn each. 2. Three events of the tier
    come between two turns.
    """
    harness = Harness(ConsolidatorLimits(tier_blocks_max=4))
    harness.attach()
    host = TierModel(harness, "host")
    names = chain(tuple(range(800)))
    host.store(*names, lose=True)
    harness.is_patient = True
    harness.send(TierStreamLost(host.source))
    host.answer()
    turns = 0
    while harness.whole.merged.tiers.behind_count:
        turns += 1
        for number in range(3):
            block = Block(
                hash=SequenceHash((3 * turns + number).to_bytes(16, "big")),
                parent=NAMESPACE.root,
                namespace=NAMESPACE.digest,
                checksum=0,
                bytes=1,
            )
            harness.send(TierEvents(tuple(host.announcer.stored([block]))))
        harness.go_on(1)
    assert turns <= 400 / 4 / 3 + 1


def test_an_input_between_two_parts_waits_for_none() -> None:
    """An engine that was cleared again and again lost its consolidator: each beat paid for a part.

    1. An engine clears its stream, and a tier's thirty blocks are said in parts of four. 2. Inputs
    come meanwhile: none says a part.
    """
    harness = Harness(ConsolidatorLimits(tier_blocks_max=4))
    harness.attach()
    host = TierModel(harness, "host")
    names = chain(tuple(range(62)))
    harness.batch(0, stored((70, 70)))
    host.store(*names[:30])
    harness.is_patient = True
    harness.batch(1, AllBlocksCleared())
    assert len(harness.merged.blocks()) == 4, "the first part is said at once"
    for number in range(2, 7):
        harness.send(Tick(offers_open=True))
        harness.batch(number, stored((70 + number, 70)))
    assert len(harness.merged.blocks() & set(names)) == 4
    harness.go_on()
    assert harness.merged.blocks() >= set(names[:30])


@pytest.mark.parametrize("dedup", [True, False])
@pytest.mark.parametrize("way", ["snapshot", "reset"])
def test_a_child_that_comes_between_the_parts_is_said_behind_its_ancestors(
    way: str, dedup: bool
) -> None:
    """1. A tier's thirty blocks are said in parts of four. 2. Meanwhile another tier stores a child
    of the last one. 3. All ancestors are published before it, no more than some in a step."""
    harness = Harness(ConsolidatorLimits(tier_blocks_max=4), dedup=dedup)
    harness.attach()
    host, disk = TierModel(harness, "host"), TierModel(harness, "disk")
    names = chain(tuple(range(62)))
    harness.batch(0, stored((70, 70)))
    host.store(*names[:30], lose=way == "snapshot")
    harness.is_patient = True
    if way == "snapshot":
        harness.batch(1, removed(engine_hash((70, 70))))
        harness.send(TierStreamLost(host.source))
        host.answer()
        while not host.held.keys() & harness.merged.blocks():
            harness.go_on(1)
    else:
        harness.batch(1, AllBlocksCleared())
    assert len(harness.merged.blocks()) < 9
    counts = [len(harness.merged.blocks())]
    disk.store(names[30], parent=names[29])
    counts.append(len(harness.merged.blocks()))
    while harness.whole.merged.is_going_on:
        harness.go_on(1)
        counts.append(len(harness.merged.blocks()))
    assert harness.merged.blocks() == set(names)
    assert max(after - before for before, after in pairwise(counts)) <= 2 * 4


@pytest.mark.parametrize("dedup", [True, False])
@pytest.mark.parametrize("way", ["stored", "removed"])
def test_an_engine_s_block_comes_behind_what_a_tier_has_of_its_ancestors(
    way: str, dedup: bool
) -> None:
    """1. An engine has most of a chain, and a tier all of it, which is published in parts of four.
    2. Meanwhile the engine stores the last block, or removes it: for the tier it comes after its
    ancestors."""
    harness = Harness(ConsolidatorLimits(tier_blocks_max=4), dedup=dedup)
    harness.attach()
    host = TierModel(harness, "host")
    names = chain(tuple(range(64)))
    host.store(*names[:32], lose=True)
    harness.batch(0, stored(tuple(range(62 if way == "stored" else 64))))
    harness.is_patient = True
    harness.send(TierStreamLost(host.source))
    host.answer()
    while not harness.whole.merged.tiers.block_count:
        harness.go_on(1)
    last = stored(tuple(range(64)), start=31)
    harness.batch(1, last if way == "stored" else removed(*last.block_hashes))
    harness.go_on()
    in_device = names if dedup or way == "stored" else names[:31]
    expected = {("device", name) for name in in_device}
    assert harness.merged.live[0] == expected | {("host", one) for one in names if not dedup}


def test_a_block_behind_a_gap_comes_behind_what_a_tier_has_of_its_ancestors() -> None:
    """1. A gap hides that an engine still has thirty-one blocks; a tier has them, too. 2. After it
    the engine stores their child, while the tier's blocks are published again in parts of four."""
    harness = Harness(ConsolidatorLimits(tier_blocks_max=4))
    harness.attach(replay=False)
    host = TierModel(harness, "host")
    names = chain(tuple(range(64)))
    harness.batch(0, stored(tuple(range(62))))
    host.store(*names[:31])
    harness.is_patient = True
    harness.batch(2, stored(tuple(range(64)), start=31))
    assert harness.merged.blocks() == set(names)
    harness.go_on()
    assert harness.merged.live[0] == {
        *(("host", name) for name in names[:31]), ("device", names[31])
    }  # fmt: skip


def test_a_parent_that_leaves_the_device_in_the_same_step_is_published_once() -> None:
    """1. A tier's blocks are read again, one in a step. 2. Meanwhile an engine stores a child of
    one, and removes the parent: the table is ahead of what is published, which is still right."""
    harness = Harness(ConsolidatorLimits(tier_blocks_max=1))
    harness.attach()
    host = TierModel(harness, "host")
    harness.batch(0, stored(PROMPT[:2]))
    host.store(*chain(tuple(range(1, 17))))
    harness.is_patient = True
    harness.send(TierStreamLost(host.source))
    host.answer()
    parent, other = engine_hash(PROMPT[:2]), stored((70, 70))
    child = stored(PROMPT[:4], start=1)
    harness.batch(1, child, other, removed(*other.block_hashes), removed(parent))
    harness.go_on()
    live = harness.merged.live[0]
    assert [tier for tier, block in live if block == BLOCKS[0]] == ["device"]


def test_a_child_of_a_block_that_was_put_off_is_published_behind_it() -> None:
    """1. A tier's blocks are published in parts of four: a chain, and the grandchild of its last
    block before the end of it. 2. Another tier stores the block between, which is put off. 3. The
    grandchild has its turn before it, and comes after all of its ancestors."""
    harness = Harness(ConsolidatorLimits(tier_blocks_max=4))
    harness.attach()
    host, disk = TierModel(harness, "host"), TierModel(harness, "disk")
    names = chain(tuple(range(64)))
    host.store(*names[:8])
    host.store(names[31], parent=names[30])
    host.store(*names[8:30], parent=names[7])
    harness.is_patient = True
    harness.batch(0, stored((70, 70)))
    harness.batch(1, AllBlocksCleared())
    disk.store(names[30], parent=names[29])
    harness.go_on()
    assert harness.merged.blocks() == set(names)


def test_a_child_behind_a_few_ancestors_is_published_at_once() -> None:
    """1. Eight blocks of a tier are published in parts of four, the first four at once. 2. Another
    tier stores a child of the eighth: the four before it and itself are published in that step."""
    harness = Harness(ConsolidatorLimits(tier_blocks_max=4))
    harness.attach()
    host, disk = TierModel(harness, "host"), TierModel(harness, "disk")
    names = chain(tuple(range(18)))
    host.store(*names[:8])
    harness.is_patient = True
    harness.batch(0, stored((70, 70)))
    harness.batch(1, AllBlocksCleared())
    assert harness.merged.blocks() == set(names[:4])
    disk.store(names[8], parent=names[7])
    assert harness.merged.blocks() == set(names)


def test_an_engine_that_clears_again_and_again_has_one_pass_over_the_tiers() -> None:
    """1. An engine clears before it has heard of all sixty blocks again, ten times. 2. One pass is
    left: 16 parts. 3. It clears, and ends in the midst of it: nothing is left."""
    harness = Harness(ConsolidatorLimits(tier_blocks_max=4))
    harness.attach()
    host = TierModel(harness, "host")
    host.store(*chain(tuple(range(120))))
    harness.is_patient = True
    for number in range(0, 20, 2):
        harness.batch(number, stored(PROMPT))
        harness.batch(number + 1, AllBlocksCleared())
    harness.go_on(18)
    assert not harness.whole.merged.is_going_on
    assert harness.merged.blocks() == set(host.held)
    harness.batch(20, stored(PROMPT))
    harness.batch(21, AllBlocksCleared())
    assert len(harness.merged.blocks()) < 10
    harness.send(EngineDetached("sim-0", INCARNATION))
    assert not harness.whole.merged.is_going_on
    assert harness.merged.blocks() == set()


def test_tiers_are_heard_for_every_kv_group_before_the_device_has_a_block_of_it(
    harness: Harness,
) -> None:
    """A host tier has blocks of a window group from before the engine or the consolidator."""
    window = msgspec.structs.replace(NAMESPACE, group=1)
    first, second = BLOCKS[:2]
    host = TierModel(harness, "host")
    host.store(first)
    host.store(second, namespace=window)
    new = Harness()
    new.send(StreamAttached(msgspec.structs.replace(attach(), group_namespaces=[window]), b"peer"))
    new.grant()
    new.send(TierJoined("host-tier-0", "host", 1))
    new.send(TierSnapshot(host.snapshot()))
    assert new.merged.blocks() == {first, second}
    said = [event for event in new.merged.events if isinstance(event, Stored)]
    assert {event.group for event in said} == {0, 1}


def test_a_reset_of_the_engine_s_cache_clears_and_says_the_tiers_again(
    harness: Harness, host: TierModel
) -> None:
    harness.batch(0, stored(PROMPT))
    host.store(BLOCKS[0])
    since = len(harness.merged.events)
    harness.batch(1, AllBlocksCleared())
    assert kinds(harness, since) == [("cleared", "device"), ("stored", "host")]
    assert harness.merged.blocks() == {BLOCKS[0]}


def test_a_gap_that_cannot_be_replayed_is_cleared_and_built_anew() -> None:
    """The engine's buffer begins at 2, we have seen 0: what we knew counts no more, and readers of
    both streams are told why."""
    harness = Harness()
    harness.attach()
    device = Device()
    device.publish(device.store((1, 2), 0))
    device.publish(device.store((3, 4), 0))
    device.publish(device.store((5, 6), 0))
    device.publish(device.store((7, 8), 0))
    harness.batch(0, *device.batches[0].events, ts=device.batches[0].ts)
    harness.batch(3, *device.batches[3].events, ts=device.batches[3].ts)
    harness.answer(device, first=2)
    for reader in (harness.truth, harness.merged):
        reasons = [event.reason for event in reader.events if isinstance(event, Cleared)]
        assert reasons == ["attached", "gap"]
        assert reader.blocks() == {chain((5, 6))[0], chain((7, 8))[0]}


def test_a_restarted_publisher_begins_both_streams_anew(harness: Harness, host: TierModel) -> None:
    harness.batch(0, stored(PROMPT))
    host.store(BLOCKS[0])
    harness.batch(0, stored((9, 9)), ts=500.0)
    harness.grant()
    harness.answer(Device())
    assert harness.merged.blocks() == {BLOCKS[0], chain((9, 9))[0]}
    assert harness.merged.events[-1].epoch == 2


# ---- tiers -----------------------------------------------------------------------------------


def test_a_gap_in_a_tier_s_events_is_closed_by_its_snapshot(
    harness: Harness, host: TierModel
) -> None:
    """1. Two events are lost. 2. The next shows the gap: nothing is applied before the snapshot."""
    host.store(*BLOCKS)
    host.remove(BLOCKS[2], lose=True)
    host.remove(BLOCKS[1], lose=True)
    assert harness.merged.blocks() == set(BLOCKS)
    host.store(*chain((9, 9)))
    assert harness.merged.blocks() == {BLOCKS[0], *chain((9, 9))}


def test_a_lost_stream_asks_again_and_a_lost_tier_holds_nothing(
    harness: Harness, host: TierModel
) -> None:
    host.store(*BLOCKS)
    host.remove(BLOCKS[2], lose=True)
    harness.send(TierStreamLost(host.source))
    host.answer()
    assert harness.merged.blocks() == set(BLOCKS[:2])
    harness.send(TierLeft(host.source, 1))
    assert harness.merged.blocks() == set()
    host.begin(2)
    host.store(BLOCKS[0])
    assert harness.merged.blocks() == {BLOCKS[0]}


def test_a_tier_that_does_not_answer_is_asked_less_and_less_often(harness: Harness) -> None:
    harness.send(TierJoined("disk-tier-0", "disk", 1))
    asked_at: list[int] = []
    for _ in range(200):
        if AskSnapshot("disk-tier-0") in harness.other:
            harness.other.remove(AskSnapshot("disk-tier-0"))
            asked_at.append(harness.now_ms)
            harness.send(TierSnapshotFailed("disk-tier-0"))
        harness.tick(100)
    assert asked_at == [0, 500, 1500, 3500, 7500, 15500]


def test_a_malformed_event_of_a_tier_is_counted_and_asked_about(
    harness: Harness, host: TierModel
) -> None:
    host.store(*BLOCKS)
    (event,) = host.announcer.removed([host.held[BLOCKS[0]]], "evicted")
    harness.send(TierEvents((msgspec.structs.replace(event, hashes=["no hash"]),)))
    host.answer()
    assert harness.whole.statistics().drops["tier_malformed"] == 1
    assert harness.merged.blocks() == set(BLOCKS)


@pytest.mark.parametrize("before", [0, 1])
def test_a_rank_that_comes_while_the_epoch_is_asked_for_is_made_known(before: int) -> None:
    """1. The host has blocks. 2. Rank 1 attaches before the epoch of rank 0 is granted, or after.
    3. What the host has counts for both, and the registry hears of both."""
    harness = Harness()
    TierModel(harness, "host").store(*BLOCKS)
    harness.attach(epoch=False)
    if before:
        harness.attach(rank=1, epoch=False)
    harness.grant()
    if not before:
        harness.attach(rank=1, epoch=False)
    described = [effect.ranks for effect in harness.other if isinstance(effect, Describe)]
    assert described == [(0, 1)]
    assert harness.merged.blocks(0) == harness.merged.blocks(1) == set(BLOCKS)


# ---- routers ---------------------------------------------------------------------------------


def test_routers_hear_of_a_block_when_its_tokens_are_known(
    harness: Harness, host: TierModel
) -> None:
    """1. The host's blocks have no tokens here. 2. An engine computes one: it is said, with the
    tokens. 3. The engine drops it: still there."""
    host.store(*BLOCKS)
    assert harness.whole.statistics().unnamed_blocks == 3
    assert harness.routers[0].held == set()
    harness.batch(0, stored(PROMPT[:2]))
    assert harness.routers[0].held == {("GPU", short_hash(BLOCKS[0]))}
    harness.batch(1, removed(engine_hash(PROMPT[:2])))
    assert harness.routers[0].held == {("GPU", short_hash(BLOCKS[0]))}
    assert harness.whole.statistics().unnamed_blocks == 2


@pytest.mark.parametrize("head", [1, 2])
def test_a_block_that_waits_for_its_tokens_comes_behind_its_parent(
    harness: Harness, host: TierModel, head: int
) -> None:
    """1. A tier has a part of a chain that no engine has computed. 2. One computes all of it: the
    part comes between what is before it and what is behind it."""
    host.store(BLOCKS[head], parent=BLOCKS[head - 1])
    harness.batch(0, stored(PROMPT))
    batches = [decode_batch(frame.payload) for frame in harness.whole.router.replay(0, 0)]
    told = [e.block_hashes for b in batches for e in b.events if isinstance(e, BlockStored)]
    assert [name for names in told for name in names] == [short_hash(one) for one in BLOCKS]


@pytest.mark.parametrize(
    ("dedup", "parent", "child"), [(True, "GPU", "GPU"), (False, "CPU", "GPU")]
)
def test_with_dedup_a_block_and_its_parent_are_in_one_medium(
    dedup: bool, parent: str, child: str
) -> None:
    """1. The host has the parent before the device: `dedup` says it once. 2. The device computes
    the child. A router that keeps a tree per medium, as Dynamo's, must find both in one."""
    harness = Harness(dedup=dedup)
    harness.attach()
    host = TierModel(harness, "host")
    harness.batch(0, stored(PROMPT[:2]))
    harness.batch(1, removed(engine_hash(PROMPT[:2])))
    host.store(BLOCKS[0])
    harness.batch(2, stored(PROMPT[:4]))
    held = harness.routers[0].held
    assert {(parent, short_hash(BLOCKS[0])), (child, short_hash(BLOCKS[1]))} <= held


def test_a_batch_for_routers_is_vllm_s(harness: Harness) -> None:
    """Tokens, parents, LoRA and extra keys as the engine said them; hashes are ours, shortened."""
    event = msgspec.structs.replace(
        stored(PROMPT[:4]), lora_name="poet", extra_keys=(("poet", "salt"), None)
    )
    harness.batch(0, event)
    frames = harness.whole.router.replay(0, 1)
    (batch,) = (decode_batch(frame.payload) for frame in frames)
    names = harness.whole.merged.live("sim-0")
    first, second = (short_hash(block) for block in names)
    assert frames[0].stream == StreamId(0, "sim-0")
    assert batch.events == (
        BlockStored(
            block_hashes=(first, second), parent=None, token_ids=PROMPT[:4], block_size=2,
            medium="GPU", lora_name="poet", extra_keys=(("poet", "salt"), None),
        ),
    )  # fmt: skip
    assert batch.dp_rank == 0


def test_a_router_s_replay_is_answered_from_the_buffer(harness: Harness) -> None:
    for number in range(3):
        harness.batch(number, stored((number, number)))
    effects = harness.whole.step(RouterAsked(0, 2, b"router"), 0)
    (answer,) = effects
    assert isinstance(answer, AnswerRouter)
    assert [frame.seq for frame in answer.frames] == [2, 3]
    (nothing,) = harness.whole.step(RouterAsked(0, 4, b"router"), 0)
    assert nothing == AnswerRouter(0, b"router", ())
    assert harness.whole.step(RouterAsked(7, 0, b"router"), 0) == [AnswerRouter(7, b"router", ())]


def test_a_router_that_begins_to_listen_hears_the_last_number(harness: Harness) -> None:
    """A batch may go by between its replay and its subscription: it must see that gap."""
    harness.batch(0, stored(PROMPT[:2]))
    (effect,) = harness.whole.step(RouterJoined(0, b"sim"), 0)
    assert isinstance(effect, Broadcast)
    assert effect.frame.seq == harness.routers[0].next_seq
    assert decode_batch(effect.frame.payload).events == ()
    for other in (RouterJoined(0, b"vllm"), RouterJoined(1, b"")):
        assert harness.whole.step(other, 0) == []
    harness.whole.check()


def test_a_router_that_comes_too_late_gets_everything() -> None:
    """The buffer holds 2 batches of 9: the answer is cleared and rebuilt, and ends with the last
    number, so that the stream goes on after it."""
    streams = RouterStreams(TokenNames(), batches_max=2)
    late = Router()
    for number in range(9):
        (block,) = chain((number, number))
        streams.learn(NamedBlocks([block], [bytes(8)]))
        streams.take_event(stored_event(number + 1, [block]))
    streams.take_event(removed_event(10, [chain((0, 0))[0]]))
    for frame in streams.replay(0, 0):
        late.read(frame)
    assert late.held == {("GPU", short_hash(chain((n, n))[0])) for n in range(1, 9)}
    assert late.next_seq == 10
    streams.check()


def test_a_reader_of_an_earlier_life_sees_a_gap_and_reads_everything() -> None:
    """As vLLM's example does: it asks when a number is larger than it expects, and passes over
    numbers that it has read. The second life has said less than the first one."""
    reader = Router()
    first, second = RouterStreams(TokenNames()), RouterStreams(TokenNames(), first_seq=1000)
    for streams, count in ((first, 3), (second, 2)):
        blocks = [chain((count, n))[0] for n in range(count)]
        streams.learn(NamedBlocks(blocks, [bytes(8)] * count))
        for number, block in enumerate(blocks):
            streams.take_event(stored_event(number + 1, [block]))
    for frame in first.take():
        reader.read(frame)
    frame = second.take()[0]
    assert frame.seq > reader.next_seq
    answer = second.replay(0, reader.next_seq)
    assert all(frame.seq >= reader.next_seq for frame in answer)
    for frame in answer:
        reader.read(frame)
    assert reader.held == {("GPU", short_hash(chain((2, n))[0])) for n in range(2)}
    assert reader.next_seq == 1002


def test_a_reader_that_comes_back_hears_of_a_life_that_has_said_nothing() -> None:
    streams = RouterStreams(TokenNames(), first_seq=1000)
    streams.engine_known("sim-0", [0])
    streams.greet(0, b"")
    assert [frame.seq for frame in streams.take()] == [1000]


def test_all_that_is_held_comes_under_numbers_that_the_reader_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has read 8 of 9 batches: a rebuild of 5 batches would begin with numbers that it has."""
    monkeypatch.setattr(router_stream, "BATCH_BLOCKS_MAX", 2)
    streams = RouterStreams(TokenNames(), batches_max=1)
    blocks = [chain((n, n))[0] for n in range(9)]
    streams.learn(NamedBlocks(blocks, [bytes(8)] * 9))
    for number, block in enumerate(blocks):
        streams.take_event(stored_event(number + 1, [block]))
    assert [frame.seq for frame in streams.replay(0, 7)] == [7, 8]
    assert [frame.seq for frame in streams.replay(0, 8)] == [8]


def stored_event(seq: int, blocks: list[SequenceHash]) -> RawStored:
    """A consolidated event of an engine."""
    return RawStored(host="h", source="sim-0", tier="device", epoch=1, seq=seq, ts_ms=1,
                     namespace=NAMESPACE.digest.hex(), runs=[(NAMESPACE.root, blocks)])  # fmt: skip


def cleared_event(seq: int) -> Cleared:
    """A consolidated event of an engine."""
    return Cleared(host="h", source="sim-0", tier="device", epoch=1, seq=seq, ts_ms=1,
                   reason="reset")  # fmt: skip


def removed_event(seq: int, blocks: list[SequenceHash]) -> RawRemoved:
    """A consolidated event of an engine."""
    return RawRemoved(host="h", source="sim-0", tier="device", epoch=1, seq=seq, ts_ms=1,
                      namespace=NAMESPACE.digest.hex(), hashes=blocks)  # fmt: skip


def test_names_of_blocks_that_nobody_has_are_forgotten_in_time() -> None:
    names = TokenNames(retired_max=2)
    blocks = [chain((n, n))[0] for n in range(4)]
    names.learn(NamedBlocks(blocks, [bytes(8)] * 4))
    for block in blocks:
        names.retire(block)
    assert len(names) == 4, "the step may not be over"
    names.forget()
    assert [block for block in blocks if block in names] == blocks[2:]
    names.keep(blocks[2:3])
    names.retire(blocks[3])
    names.forget()
    assert len(names) == 2
    names.check()


def test_what_is_said_again_in_the_step_of_a_clear_keeps_its_name() -> None:
    """An engine's cache is reset: what the tiers have, more blocks than names are kept without a
    holder, is said again at once."""
    streams = RouterStreams(TokenNames(retired_max=1))
    blocks = [chain((n, n))[0] for n in range(4)]
    streams.learn(NamedBlocks(blocks, [bytes(8)] * 4))
    streams.take_event(stored_event(1, blocks))
    streams.take()
    streams.take_event(cleared_event(2))
    streams.take_event(stored_event(3, blocks))
    streams.take()
    assert (streams.held("sim-0"), streams.unnamed_count) == (set(blocks), 0)
    streams.check()


def order_of(frames: Iterable[Frame]) -> list[int | bytes]:
    """The blocks of all stores, in the order in which a router reads them."""
    events = [event for frame in frames for event in decode_batch(frame.payload).events]
    stores = [event for event in events if isinstance(event, BlockStored)]
    return [block for event in stores for block in event.block_hashes]


def test_a_replay_of_everything_says_parents_first() -> None:
    """The parent went and came back, after its child."""
    streams = RouterStreams(TokenNames(), batches_max=1)
    parent, child = BLOCKS[:2]
    streams.learn(NamedBlocks([parent, child], [bytes(8)] * 2))
    streams.take_event(stored_event(1, [parent, child]))
    streams.take_event(removed_event(2, [parent]))
    streams.take_event(stored_event(3, [parent]))
    assert order_of(streams.replay(0, 0)) == [short_hash(parent), short_hash(child)]


def test_what_several_tiers_have_is_said_again_parents_first(
    harness: Harness, host: TierModel, disk: TierModel
) -> None:
    """1. The child is in host memory, its parent on disk. 2. The engine's cache is reset."""
    harness.batch(0, stored(PROMPT[:4]))
    host.store(*BLOCKS[:2])
    disk.store(BLOCKS[0])
    host.remove(BLOCKS[0])
    before = harness.routers[0].next_seq
    harness.batch(1, AllBlocksCleared())
    frames = harness.whole.router.replay(0, before)
    assert order_of(frames) == [short_hash(block) for block in BLOCKS[:2]]


def test_a_snapshot_s_blocks_are_said_parents_first(harness: Harness, host: TierModel) -> None:
    """A snapshot may list a child before its parent."""
    harness.batch(0, stored(PROMPT[:4]))
    harness.batch(1, removed(*(engine_hash(PROMPT[:end]) for end in (4, 2))))
    host.store(BLOCKS[1], parent=BLOCKS[0], lose=True)
    before = harness.routers[0].next_seq
    host.store(BLOCKS[0])
    assert order_of(harness.whole.router.replay(0, before)) == [
        short_hash(block) for block in BLOCKS[:2]
    ]


# ---- a property ------------------------------------------------------------------------------

PROMPTS = st.lists(st.sampled_from([(0, 0), (1, 1)]), min_size=1, max_size=6).map(
    lambda pairs: tuple(token for pair in pairs for token in pair)
)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["compute", "churn", "host", "disk", "last host", "last disk"]),
                  PROMPTS),
        st.tuples(st.sampled_from(["evict", "drop host", "lose host", "drop disk", "lose disk"]),
                  st.integers(0, 30)),
        st.tuples(st.sampled_from(["reset", "detach", "host restarts", "disk lost", "stream lost",
                                   "go on"]),
                  st.none()),
    ),
    max_size=30,
)  # fmt: skip


class World:
    """An engine, a host tier and a disk tier, and what they truly hold."""

    def __init__(self, *, dedup: bool, tier_blocks_max: int, is_patient: bool) -> None:
        limits = ConsolidatorLimits(lost_after_ms=10**9, tier_blocks_max=tier_blocks_max)
        self.harness = Harness(limits, dedup=dedup)
        self.harness.is_patient, self.harness.parents_first = is_patient, True
        self.harness.attach()
        self.device = Device()
        self.host = TierModel(self.harness, "host")
        self.disk = TierModel(self.harness, "disk")
        self.tiers = {"host": self.host, "disk": self.disk}

    def act(self, name: str, argument: tuple[int, ...] | int | None) -> None:
        """One of the actions above; one that makes no sense now does nothing."""
        match name.split(), argument:
            case ["compute"], tuple(prompt):
                self.publish(self.compute(prompt))
            case ["churn"], tuple(prompt):
                # One batch in which blocks come, go and come again: the core knows its end first.
                batch: list[EngineEvent] = [self.compute(prompt)]
                batch += [self.device.evict(0) for _ in prompt[3::2]]
                batch += [self.compute(prompt), self.device.evict(1), self.device.evict(0)]
                self.publish(*batch)
            case ["evict"], int(index) if +self.device.copies:
                self.publish(self.device.evict(index))
            case ["reset"], _:
                self.publish(self.device.clear())
            case ["detach"], _:
                self.harness.send(EngineDetached("sim-0", INCARNATION))
                self.device = Device()
                self.harness.attach()
            case [("host" | "disk") as tier], tuple(prompt):
                self.store(self.tiers[tier], prompt)
            case ["last", tier], tuple(prompt):
                # A child whose ancestors another tier has, perhaps.
                model, [parent, child] = self.tiers[tier], [NAMESPACE.root, *chain(prompt)][-2:]
                if child not in model.held:
                    model.store(child, parent=parent)
            case [("drop" | "lose") as verb, tier], int(index):
                model = self.tiers[tier]
                if blocks := sorted(model.held):
                    model.remove(blocks[index % len(blocks)], lose=verb == "lose")
            case ["host", "restarts"], _:
                self.host.begin(self.host.announcer.epoch + 1)
            case ["disk", "lost"], _:
                self.harness.send(TierLeft(self.disk.source, 1))
                self.harness.now_ms += 60_000
                self.harness.send(TierJoined(self.disk.source, "disk", 1))
                self.disk.answer()
            case ["stream", "lost"], _:
                self.lose_stream()
            case ["go", "on"], _:
                self.harness.go_on(1)

    def compute(self, prompt: tuple[int, ...]) -> BlockStored:
        """Hold what is not held of a prompt, and its last block anew."""
        ends = range(0, len(prompt), 2)
        start = max(end for end in ends if not end or self.device.copies[prompt[:end]])
        return self.device.store(prompt, start // 2)

    def publish(self, *events: EngineEvent) -> None:
        """A live batch of the engine."""
        seq = self.device.publish(*events)
        self.harness.send(batch_received(key(), seq, self.device.batches[seq]))

    def store(self, tier: TierModel, prompt: tuple[int, ...]) -> None:
        """A tier stores what it lacks of a prompt."""
        blocks = chain(prompt)
        start = next((i for i, block in enumerate(blocks) if block not in tier.held), len(blocks))
        new = [block for block in blocks[start:] if block not in tier.held]
        if new:
            tier.store(*new, parent=blocks[start - 1] if start else None)

    def lose_stream(self) -> None:
        """Everybody is asked for everything."""
        for tier in (self.host, self.disk):
            self.harness.send(TierStreamLost(tier.source))
            tier.answer()

    def settle(self) -> None:
        """Everybody is asked for everything, and all of it is said."""
        self.harness.go_on()
        self.lose_stream()
        self.harness.go_on()


@settings(max_examples=100, deadline=None)
@given(ACTIONS, st.booleans(), st.sampled_from([1, 3, 512]), st.booleans())
def test_the_stream_is_the_union_of_the_tiers(
    actions: list[tuple[str, tuple[int, ...] | int | None]],
    dedup: bool,
    tier_blocks_max: int,
    is_patient: bool,
) -> None:
    """Goal: after any history, with events of tiers lost and engines restarted, a reader of the
    consolidated stream believes exactly what device and tiers hold; routers, early and late,
    believe the named part of it. No block comes before a parent that a tier has. Method: the
    model acts, perhaps between the parts of what tiers have; then everybody is asked once more."""
    world = World(dedup=dedup, tier_blocks_max=tier_blocks_max, is_patient=is_patient)
    for name, argument in actions:
        world.act(name, argument)
    world.settle()
    harness, device = world.harness, world.device.truth()
    everything = device | set(world.host.held) | set(world.disk.held)
    assert harness.merged.blocks() == everything
    if not dedup:
        assert harness.merged.live.get(0, set()) == {
            *(("device", block) for block in device),
            *(("host", block) for block in world.host.held),
            *(("disk", block) for block in world.disk.held),
        }
    names = harness.whole.names
    router = harness.routers[0].held
    assert {block for _, block in router} == {short_hash(b) for b in everything if b in names}
    late = Router()
    for frame in harness.whole.router.replay(0, 0):
        late.read(frame)
    assert late.held == router


def test_a_stale_epoch_leaves_no_engine_behind(harness: Harness) -> None:
    """An epoch for an engine that is gone: nothing is said, nothing is kept."""
    since = len(harness.merged.events)
    harness.send(EpochGranted("sim-9", 9, 4))
    assert kinds(harness, since) == []
    assert whole_of(harness.whole.merged.snapshot_pages("sim-9")) is None
