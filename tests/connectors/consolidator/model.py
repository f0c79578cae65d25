"""A model of an engine's device cache, and a harness that joins it to the consolidator's core.

The engine's block k of a chain is named by Python's own `hash` of its tokens and its parent, so the
model and the core compute names on different paths.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import cast

from kvbm_common.identity import (
    Hasher,
    Namespace,
    SequenceHash,
    hash_from_hex,
    hashes_from_hex,
    request_extras,
)
from kvbm_common.nats.snapshots import joined
from kvbm_common.tier.announcer import Pages
from kvbm_common.wire.consolidator import Attach, Attached
from kvbm_common.wire.engine_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EngineBatch,
    EngineEvent,
    EngineHash,
    decode_batch,
)
from kvbm_common.wire.events import Cleared, Event, Removed, Stored, Tier
from kvbm_common.wire.local import Refused
from kvbm_common.wire.raw_events import as_json
from kvbm_common.wire.verbs import SnapshotReply
from kvbm_connectors.consolidator.core.core import ConsolidatorCore
from kvbm_connectors.consolidator.core.engines import EnginesCore
from kvbm_connectors.consolidator.core.messages import (
    AskEpoch,
    Broadcast,
    ConsolidatorLimits,
    Effect,
    EngineBatchesReceived,
    EpochGranted,
    GoOn,
    GoOnLater,
    Input,
    Publish,
    PublishMerged,
    ReplayDone,
    ReplayFailed,
    Reply,
    RequestReplay,
    StreamAttached,
    StreamKey,
    Tick,
)
from kvbm_connectors.consolidator.core.router_stream import (
    MEDIA,
    ONE_MEDIUM,
    Frame,
    short_hash,
)

NAMESPACE = Namespace(model="model", block_tokens=2)
INCARNATION = "00000000000000aa"
HASHER = Hasher(NAMESPACE)


def attach(
    *, rank: int = 0, incarnation: str = INCARNATION, replay: bool = True, engine: str = "sim-0"
) -> Attach:
    """An engine's introduction."""
    return Attach(
        engine=engine,
        incarnation=incarnation,
        endpoint=f"ipc://pub{rank}",
        replay_endpoint=f"ipc://replay{rank}" if replay else "",
        rank=rank,
        namespace=NAMESPACE,
    )


def key(rank: int = 0, incarnation: str = INCARNATION) -> StreamKey:
    """The stream of that introduction."""
    return StreamKey("sim-0", incarnation, rank)


def batch_received(
    stream: StreamKey, seq: int, batch: EngineBatch, replay: int = 0
) -> EngineBatchesReceived:
    """One batch of a stream."""
    return EngineBatchesReceived(stream, ((seq, batch),), replay)


def whole_of(pages: Pages | None) -> SnapshotReply | None:
    """The pages of a snapshot, made now, as one."""
    return None if pages is None else joined([page() for page in pages])


def held(core: EnginesCore, engine: str = "sim-0") -> set[SequenceHash]:
    """Every block of an engine with an epoch, by its snapshot."""
    snapshot = whole_of(core.snapshot_pages(engine))
    assert snapshot is not None, engine
    runs = [run for part in snapshot.parts for run in part.runs]
    return {hash_from_hex(text) for run in runs for text in run.hashes}


def chain(tokens: tuple[int, ...], salt: str | None = None) -> list[SequenceHash]:
    """Our names of a prompt's blocks."""
    return HASHER.chain(tokens, extras=request_extras(salt=salt))


def stored(
    tokens: tuple[int, ...], *, start: int = 0, salt: str | None = None, size: int = 2
) -> BlockStored:
    """The event of a prompt's blocks from block `start` on; engine hashes follow from prefixes."""
    ends = range((start + 1) * size, len(tokens) + 1, size)
    return BlockStored(
        block_hashes=tuple(engine_hash(tokens[:end], salt) for end in ends),
        parent=engine_hash(tokens[: start * size], salt) if start else None,
        token_ids=tokens[start * size : ends[-1] if ends else 0],
        block_size=size,
        medium="GPU",
        extra_keys=tuple((salt,) if salt and not start and not i else None
                         for i in range(len(ends))),
    )  # fmt: skip


def engine_hash(prefix: tuple[int, ...], salt: str | None = None) -> int:
    """What the model calls a block."""
    return hash((prefix, salt and len(salt))) & (2**64 - 1)


def removed(*engine_hashes: int | bytes) -> BlockRemoved:
    """The event of evictions."""
    return BlockRemoved(block_hashes=engine_hashes, medium="GPU")


PROMPT = (1, 2, 3, 4, 5, 6)
BLOCKS = chain(PROMPT)
"""Its names."""


@dataclass
class Device:
    """One rank: what it truly holds, and all batches it has ever published."""

    batches: list[EngineBatch] = field(default_factory=list)
    copies: Counter[tuple[int, ...]] = field(default_factory=Counter)
    """Device blocks per prefix."""
    clock: float = 100.0

    def publish(self, *events: EngineEvent) -> int:
        """Number a batch; its sequence number."""
        self.clock += 0.5
        self.batches.append(EngineBatch(self.clock, events, 0))
        return len(self.batches) - 1

    def store(self, tokens: tuple[int, ...], start: int) -> BlockStored:
        """Hold the blocks of a prompt from block `start` on, once more."""
        for end in range((start + 1) * 2, len(tokens) + 1, 2):
            self.copies[tokens[:end]] += 1
        return stored(tokens, start=start)

    def evict(self, index: int) -> BlockRemoved:
        """Drop one copy of a block that no other block follows, as engines do."""
        leaves = [p for p in sorted(+self.copies) if not any(q[:-2] == p for q in +self.copies)]
        prefix = leaves[index % len(leaves)]
        self.copies[prefix] -= 1
        return removed(engine_hash(prefix))

    def clear(self) -> AllBlocksCleared:
        """Drop everything."""
        self.copies.clear()
        return AllBlocksCleared()

    def truth(self) -> set[SequenceHash]:
        """Our names of what is held."""
        return {chain(prefix)[-1] for prefix in +self.copies}


class Reader:
    """A reader of events, strict about their order: positions grow, stored and removed alternate.

    It reads one stream: of the engine's own events, or of the consolidated ones.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.live: dict[int, set[tuple[str, SequenceHash]]] = {}
        """What it believes, per rank: tiers and blocks."""
        self._position = (0, 0)

    def blocks(self, rank: int = 0) -> set[SequenceHash]:
        """What it believes, wherever it lies."""
        return {block for _, block in self.live.get(rank, ())}

    def read(self, event: Event) -> None:
        """One event."""
        epoch, seq = self._position
        assert (event.epoch, event.seq) == ((epoch, seq + 1) if event.epoch == epoch
                                            else (max(event.epoch, epoch + 1), 1))  # fmt: skip
        assert event.seq > 1 or isinstance(event, Cleared), "an epoch begins with cleared"
        self._position = (event.epoch, event.seq)
        self.events.append(event)
        live = self.live.setdefault(event.rank, set())
        match event:
            case Stored():
                for run in event.runs:
                    blocks = {
                        (event.tier, SequenceHash(bytes.fromhex(text))) for text in run.hashes
                    }
                    assert len(blocks) == len(run.hashes)
                    assert live.isdisjoint(blocks), "stored twice"
                    live |= blocks
            case Removed():
                blocks = {(event.tier, hash_from_hex(text)) for text in event.hashes}
                assert blocks <= live, "removed what is not there"
                live -= blocks
            case Cleared():
                live.clear()
                if not event.rank_only:
                    self.live.clear()


class Router:
    """A reader of vLLM's wire: blocks by medium, from numbered batches."""

    def __init__(self) -> None:
        self.held: set[tuple[str | None, EngineHash]] = set()
        self.next_seq = 0

    def read(self, frame: Frame, said: Collection[tuple[str, EngineHash]] = ()) -> None:
        """One batch; a hole in the numbers must begin with `AllBlocksCleared`. A block whose parent
        is in `said`, by medium, comes after it."""
        events = decode_batch(frame.payload).events
        cleared = bool(events) and isinstance(events[0], AllBlocksCleared)
        assert cleared or frame.seq == self.next_seq, (frame.seq, self.next_seq)
        self.next_seq = frame.seq + 1
        for event in events:
            match event:
                case BlockStored():
                    blocks = {(event.medium, block) for block in event.block_hashes}
                    assert self.held.isdisjoint(blocks), "stored twice"
                    parent = event.medium, event.parent
                    assert parent in self.held or parent not in said, "it comes before its parent"
                    assert len(event.token_ids) == len(blocks) * event.block_size
                    self.held |= blocks
                case BlockRemoved():
                    blocks = {(event.medium, block) for block in event.block_hashes}
                    assert blocks <= self.held, "removed what is not there"
                    self.held -= blocks
                case AllBlocksCleared():
                    self.held.clear()


class Harness:
    """The core, and what it did: published events, checked for order as they come."""

    def __init__(self, limits: ConsolidatorLimits | None = None, *, dedup: bool = True) -> None:
        self.whole = ConsolidatorCore(
            "h", replace(limits or ConsolidatorLimits(), naming=True), dedup=dedup
        )
        self.core = self.whole.engines
        self.is_dedup = dedup
        self.now_ms = 0
        self.truth, self.merged = Reader(), Reader()
        self.routers: dict[int, Router] = {}
        self.replies: list[tuple[bytes, Attached | Refused]] = []
        self.replays: list[RequestReplay] = []
        self.other: list[Effect] = []
        self.epoch = 0
        self.is_patient = False
        """`GoOn` comes when the test says so, and other inputs before it."""
        self._owes_go_on = False
        self.parents_first = False
        """The engine stores no block before its parent, so that routers hear of none."""

    @property
    def events(self) -> list[Event]:
        """What was published of the engine itself."""
        return self.truth.events

    @property
    def live(self) -> dict[int, set[SequenceHash]]:
        """What a reader of the engine's own events believes, per rank."""
        return {rank: self.truth.blocks(rank) for rank in self.truth.live}

    def send(self, event: Input) -> list[Effect]:
        """One step, checked; returns what was done about the engine."""
        effects = self.whole.step(event, self.now_ms)
        self.whole.check()
        if isinstance(event, GoOn):
            self._owes_go_on = False
        about_engine: list[Effect] = []
        for effect in effects:
            match effect:
                case GoOnLater():
                    assert not self._owes_go_on, "one GoOn is under way already"
                    self._owes_go_on = True
                    continue
                case PublishMerged(published):
                    self._refuse_orphans(as_json(published))
                    self.merged.read(as_json(published))
                    continue
                case Broadcast(frame):
                    router = self.routers.setdefault(frame.stream.rank, Router())
                    router.read(frame, self._said_to(frame.stream.rank))
                    continue
                case Publish(published):
                    self.truth.read(as_json(published))
                case Reply(peer, message):
                    self.replies.append((peer, message))
                case RequestReplay():
                    self.replays.append(effect)
                case _:
                    self.other.append(effect)
            about_engine.append(effect)
        if not self.is_patient:
            self.go_on(1)
        self._compare()
        return about_engine

    def go_on(self, count: int = 1_000_000) -> None:
        """Say some parts of the tiers' blocks, if any are still to be said: all of them."""
        while self._owes_go_on and count:
            count -= 1
            self.send(GoOn())

    def _said_to(self, rank: int) -> set[tuple[str, EngineHash]]:
        """What the consolidated stream says of a rank, as routers call it; nothing of an engine
        that stores children first."""
        if not self.parents_first:
            return set()
        media = ONE_MEDIUM if self.is_dedup else MEDIA
        live = self.merged.live.get(rank, ())
        return {(media[cast(Tier, tier)], short_hash(block)) for tier, block in live}

    def _refuse_orphans(self, event: Event) -> None:
        """Refuse, as Dynamo's router, a block before a parent that some tier has; where each tier
        is said for itself, a parent in the same tier."""
        if not isinstance(event, Stored):
            return
        live = self.merged.live.get(event.rank, ())
        said = {block for tier, block in live if self.is_dedup or tier == event.tier}
        for run in event.runs:
            parent = hash_from_hex(run.parent)
            tiers = set(self.whole.merged.tiers.holding(parent, event.namespace))
            is_held = bool(tiers) if self.is_dedup else event.tier in tiers
            assert parent in said or not is_held, f"{run.hashes[0]} comes before {run.parent}"
            said |= set(hashes_from_hex(run.hashes))

    def _compare(self) -> None:
        """Both outputs say the same; without tiers it is what the engine says."""
        for rank, router in self.routers.items():
            said = {short_hash(block) for block in self.merged.blocks(rank)}
            assert {block for _, block in router.held} <= said
        if not self.whole.merged.tiers.block_count and not self._owes_go_on:
            for rank, live in self.live.items():
                assert self.merged.blocks(rank) == live

    def attach(self, *, rank: int = 0, replay: bool = True, epoch: bool = True) -> None:
        """Attach a rank; grant the epoch and answer the first replay with nothing."""
        self.send(StreamAttached(attach(rank=rank, replay=replay), b"peer%d" % rank))
        if epoch:
            self.grant()
            self.answer(Device())

    def grant(self) -> None:
        """Grant the epoch that was asked for, if one was."""
        asked = [effect for effect in self.other if isinstance(effect, AskEpoch)]
        if asked:
            self.other.remove(asked[-1])
            self.epoch += 1
            self.send(EpochGranted("sim-0", asked[-1].ask, self.epoch))

    def batch(self, seq: int, *events: EngineEvent, rank: int = 0, ts: float | None = None) -> None:
        """A live batch."""
        batch = EngineBatch(100.0 + seq if ts is None else ts, events, 0)
        self.send(batch_received(key(rank), seq, batch))

    def answer(self, device: Device, *, first: int = 0, fail: bool = False) -> bool:
        """Answer the oldest replay request from the device's buffer, which begins at `first`."""
        if not self.replays:
            return False
        asked = self.replays.pop(0)
        if fail:
            self.send(ReplayFailed(asked.key, asked.replay))
            return True
        for seq in range(max(first, asked.from_seq), len(device.batches)):
            batch = device.batches[seq]
            self.send(batch_received(asked.key, seq, batch, asked.replay))
        self.send(ReplayDone(asked.key, asked.replay))
        return True

    def tick(self, after_ms: int = 100) -> None:
        """Let time pass."""
        self.now_ms += after_ms
        self.send(Tick())


def kinds(harness: Harness) -> list[str]:
    """The kinds of all published events."""
    return [str(event.__struct_config__.tag) for event in harness.events]
