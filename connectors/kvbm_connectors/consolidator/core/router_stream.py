"""The router stream: merged events as batches of vLLM's wire, numbered, kept for replay.

One stream per engine and rank: the topic is the engine's name, the port is the rank's, as with
vLLM's own publishers. Blocks are named by the low 64 bits of our hash, which is the same for every
engine, tier and life. Each life begins its numbers above all of the lives before: a reader of an
earlier one sees a gap, asks for a replay and gets everything.

A block whose tokens no engine has published yet is not announced until they are known. A replay
that reaches back further than the buffer is answered with `AllBlocksCleared` and all blocks that
are held, under the last numbers given: this is exact for every reader, however late.

Most hosts have no router. Until the first reader of a rank's port comes, batches are numbered and
not encoded, which would be a third of the work for a block. The first reader asks for a replay,
and gets everything.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import repeat, starmap

from kvbm_common.identity import (
    HASH_BYTES,
    TOKEN_BYTES,
    SequenceHash,
)
from kvbm_common.wire.engine_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EngineBatch,
    EngineEvent,
    OtherEvent,
    encode_batch,
)
from kvbm_common.wire.events import Cleared, Tier
from kvbm_common.wire.raw_events import RawEvent, RawRemoved, RawStored

from kvbm_connectors.consolidator.core.ended_engines import EndedEngines
from kvbm_connectors.consolidator.core.events import parents_first
from kvbm_connectors.consolidator.core.router_book import (
    Frame,
    HeldBlock,
    RouterStream,
    StreamId,
    parent_in,
)
from kvbm_connectors.consolidator.core.token_names import NamedBlocks, TokenNames

__all__ = ["Frame", "RouterStreams", "StreamId", "short_hash", "short_hashes"]

BATCHES_MAX = 10_000
"""Batches kept for replay, per stream; vLLM keeps as many."""
BUFFER_BYTES_MAX = 64 * 1024 * 1024
"""Bytes kept for replay, per stream."""
BATCH_BLOCKS_MAX = 4_096
"""Blocks in one batch of a rebuild: about a megabyte."""
MEDIA: dict[Tier, str] = {"device": "GPU", "host": "CPU", "disk": "STORAGE", "object": "STORAGE"}
"""vLLM's names; routers that know tiers know these."""
ONE_MEDIUM: dict[Tier, str] = dict.fromkeys(MEDIA, "GPU")
"""The names with `dedup`, as KVBM's. A block has one event, from whichever tier was first. A router
with a tree per tier (Dynamo's) must find a block's parent in the same tree."""


UNWRITTEN: EngineEvent = OtherEvent(type="", reason="no reader")
"""Stands for the events of a batch that is not encoded, since it has no reader."""


class RouterStreams:
    """The streams of all engines and ranks."""

    def __init__(
        self,
        names: TokenNames,
        *,
        dedup: bool = True,
        batches_max: int = BATCHES_MAX,
        first_seq: int = 0,
        awaits_readers: bool = False,
    ) -> None:
        """Begin without streams. `awaits_readers`: encode batches for ranks with a reader only."""
        assert batches_max > 0, batches_max
        assert first_seq >= 0, first_seq
        self._first_seq = first_seq
        """The number of each stream's first batch: when this life began, in microseconds since
        1970, which no stream's count of batches overtakes."""
        self._names = names
        self._media = ONE_MEDIUM if dedup else MEDIA
        self._batches_max = batches_max
        self._awaits_readers = awaits_readers
        self._read: set[int] = set()
        """Ranks whose port has had a reader."""
        self._streams: dict[StreamId, RouterStream] = {}
        self._ended = EndedEngines()
        self._out: list[Frame] = []
        self._named: list[SequenceHash] = []
        """Blocks whose tokens were learned in this step."""
        self.batch_count = 0

    # ---- inputs ------------------------------------------------------------------------------

    def engine_known(self, engine: str, ranks: Iterable[int]) -> None:
        """Ensure that each of these ranks of an engine has a stream."""
        assert engine, "an engine has a name"
        self._ended.returned(engine)
        for rank in ranks:
            self._stream(StreamId(rank, engine))

    def engine_left(self, engine: str, now_ms: int) -> None:
        """Drop the batches of an engine's streams; for a while readers learn that it is gone."""
        self._ended.left(engine, now_ms)
        for stream_id, stream in self._streams.items():
            if stream_id.engine == engine:
                stream.buffer.clear()
                stream.buffer_bytes = 0

    def forget_ended(self, now_ms: int) -> None:
        """Forget the streams of engines that left long ago.

        An engine that comes back numbers its batches above all of them: no number is used twice.
        """
        if gone := self._ended.due(now_ms):
            for stream_id in [one for one in self._streams if one.engine in gone]:
                stream = self._streams.pop(stream_id)
                assert not stream.places(), f"{stream_id} has ended, and holds blocks"
                self._first_seq = max(self._first_seq, stream.next_seq)

    def take_event(self, event: RawEvent) -> None:
        """Take one merged event."""
        match event:
            case RawStored():
                stream_id = StreamId(event.rank, event.source)
                self._publish(stream_id, self._store(stream_id, event), event.ts_ms)
            case RawRemoved():
                stream_id = StreamId(event.rank, event.source)
                self._publish(stream_id, self._remove(stream_id, event), event.ts_ms)
            case Cleared():
                for stream_id in list(self._streams):
                    if stream_id.engine == event.source and (
                        not event.rank_only or stream_id.rank == event.rank
                    ):
                        self._clear(stream_id, event.ts_ms)

    def learn(self, named: NamedBlocks) -> None:
        """Learn what an engine says is in some blocks. Those that have waited for it are published
        before a child of theirs, or at the end of the step: their parents may come in it."""
        self._named += self._names.learn(named)

    def publish_named(self) -> None:
        """Publish the blocks that have waited for what was learned in this step."""
        named, self._named = self._named, []
        for stream_id, stream in self._streams.items():
            if stream.unnamed and named:
                self._publish(stream_id, self._named_events(stream_id, named), 0)

    def greet(self, rank: int, topic: bytes) -> None:
        """Answer a new subscriber: an empty batch tells it by its number what it missed.

        ZMQ connects when it pleases: between a reader's replay and its subscription a batch may
        have gone by, and without this it would not know until the next one.
        """
        self._read.add(rank)
        for stream_id in self._streams:
            if stream_id.rank == rank and stream_id.engine.encode().startswith(topic):
                self._send(stream_id, [], 0)

    def take(self) -> list[Frame]:
        """Return the frames that are to be published, in order: the end of a step."""
        self._names.forget()
        out, self._out = self._out, []
        return out

    # ---- replay ------------------------------------------------------------------------------

    def replay(self, rank: int, from_seq: int) -> list[Frame]:
        """Return what a reader of a port has missed, per topic: batches, or all that is held."""
        frames: list[Frame] = []
        self._read.add(rank)
        for stream_id, stream in self._streams.items():
            if stream_id.rank != rank or from_seq >= stream.next_seq:
                continue
            if stream.buffer and stream.buffer[0].seq <= from_seq:
                assert stream.buffer[-1].seq == stream.next_seq - 1, (
                    f"{stream_id}: a hole at the end"
                )
                skipped = from_seq - stream.buffer[0].seq
                frames += [frame for index, frame in enumerate(stream.buffer) if index >= skipped]
            else:
                frames += self._everything(stream_id, stream, from_seq)
        return frames

    def _everything(self, stream_id: StreamId, stream: RouterStream, from_seq: int) -> list[Frame]:
        """Return all that a stream holds, as batches that end with the last number given.

        A reader passes over numbers before `from_seq`: it has read batches of these numbers.
        """
        places = stream.places()
        held = [
            HeldBlock(*key, places[key], stream.groups.get(key[0], 0))
            for key in parents_first(places, partial(parent_in, places))
        ]
        # Each batch needs a number that the reader waits for; the last is as large as it must be.
        count = min(stream.next_seq - from_seq, 1 + len(held) // BATCH_BLOCKS_MAX)
        starts = [index * BATCH_BLOCKS_MAX for index in range(count)]
        batches = [
            self._encode(held[start:end])
            for start, end in zip(starts, [*starts[1:], len(held)], strict=True)
        ]
        batches[0] = [AllBlocksCleared(), *batches[0]]
        first = stream.next_seq - len(batches)
        assert first >= from_seq, f"{stream_id}: {len(batches)} batches, {first} < {from_seq}"
        return [
            Frame(stream_id, first + index, self._payload(stream_id, events, 0))
            for index, events in enumerate(batches)
        ]

    # ---- questions ---------------------------------------------------------------------------

    def held(self, engine: str, rank: int = 0) -> set[SequenceHash]:
        """Return the blocks that a reader of a stream holds."""
        stream = self._streams.get(StreamId(rank, engine), RouterStream())
        return {block for held in stream.blocks.values() for block in held}

    @property
    def unnamed_count(self) -> int:
        """Blocks that are not sent, because their tokens are not known."""
        return sum(len(stream.unnamed) for stream in self._streams.values())

    def check(self) -> None:
        """Assert every invariant, in O(n)."""
        self._names.check()
        for stream in self._streams.values():
            assert len(stream.buffer) <= self._batches_max
            assert stream.buffer_bytes == sum(len(frame.payload) for frame in stream.buffer)
            held = {block for held in stream.blocks.values() for block in held}
            assert all(block in self._names for block in held), "a block without tokens was sent"
            assert stream.groups.keys() <= held, "a block that is not held has no group"
            assert not any(block in self._names for block in stream.unnamed)

    # ---- inside ------------------------------------------------------------------------------

    def _stream(self, stream_id: StreamId) -> RouterStream:
        """Return a stream, which is made where it is new."""
        if stream_id not in self._streams:
            self._streams[stream_id] = RouterStream(next_seq=self._first_seq)
        return self._streams[stream_id]

    def _store(self, stream_id: StreamId, event: RawStored) -> list[EngineEvent]:
        stream = self._stream(stream_id)
        root = bytes.fromhex(event.namespace[: 2 * HASH_BYTES])
        events: list[EngineEvent] = []
        for before, blocks in event.runs:
            assert blocks, f"{stream_id}: a run without blocks after {before.hex()}"
            parent = None if before == root else before
            parents = [parent, *blocks[:-1]]
            if stream.unnamed and self._named and parent is not None:
                events += self._named_events(stream_id, [parent])
            if self._names.are_plain(blocks):
                # As below, a run at a time: this is every event of a busy engine.
                self._names.keep(blocks)
                stream.hold(event.tier, zip(blocks, parents, strict=True), event.group)
                first = HeldBlock(blocks[0], event.tier, parent, event.group)
                is_read = self._is_read(stream_id.rank)
                events.append(self._stored(blocks, first) if is_read else UNWRITTEN)
            else:
                held = zip(blocks, repeat(event.tier), parents, repeat(event.group), strict=False)
                events += self._events_of(stream_id, starmap(HeldBlock, held))
        return events

    def _named_events(self, stream_id: StreamId, blocks: list[SequenceHash]) -> list[EngineEvent]:
        """Return events of those of these blocks that have waited for their names, each after its
        ancestors that have waited, too."""
        waiting = self._streams[stream_id].take_waiting(blocks, self._names.__contains__)
        return self._events_of(stream_id, waiting)

    def _events_of(self, stream_id: StreamId, blocks: Iterable[HeldBlock]) -> list[EngineEvent]:
        """Note that readers hold these blocks; return the events of those with known tokens."""
        stream = self._streams[stream_id]
        known: list[HeldBlock] = []
        for one in blocks:
            if one.block not in self._names:
                stream.unnamed.setdefault(one.block, []).append(one)
            else:
                stream.hold(one.tier, [(one.block, one.parent)], one.group)
                known.append(one)
        self._names.keep([one.block for one in known])
        if known and not self._is_read(stream_id.rank):
            return [UNWRITTEN]
        return self._encode(known)

    def _encode(self, blocks: Sequence[HeldBlock]) -> list[EngineEvent]:
        """Return blocks as events, one per run of the same kind."""
        runs: list[list[HeldBlock]] = []
        last: tuple[object, ...] | None = None
        for one in blocks:
            kind = self._names.kind(one.block)
            like = (one.tier, one.group, kind.lora_name, kind.cache_salt)
            if (one.parent, *like) == last:
                runs[-1].append(one)
            else:
                runs.append([one])
            last = (one.block, *like)
        assert sum(map(len, runs)) == len(blocks), f"{len(blocks)} blocks in {len(runs)} runs"
        return [self._stored([one.block for one in run], run[0]) for run in runs]

    def _stored(self, run: list[SequenceHash], first: HeldBlock) -> BlockStored:
        assert run, f"a run without blocks, the first would be {first}"
        packed = self._names.tokens(run)
        tokens = struct.unpack(f"<{len(packed) // TOKEN_BYTES}I", packed)
        assert not len(tokens) % len(run), f"{len(tokens)} tokens in {len(run)} blocks"
        kind = self._names.kind(first.block)
        return BlockStored(
            block_hashes=short_hashes(run),
            parent=None if first.parent is None else short_hash(first.parent),
            token_ids=tokens,
            block_size=len(tokens) // len(run),
            medium=self._media[first.tier],
            lora_name=kind.lora_name,
            extra_keys=self._names.extra_keys(run),
            group_idx=first.group or None,
            cache_salt=kind.cache_salt,
        )

    def _remove(self, stream_id: StreamId, event: RawRemoved) -> list[EngineEvent]:
        stream = self._stream(stream_id)
        gone: list[SequenceHash] = []
        for block in event.hashes:
            if stream.let_go(event.tier, block):
                gone.append(block)
                self._retire(block)
                continue
            waiting = [one for one in stream.unnamed.pop(block, ()) if one.tier != event.tier]
            if waiting:
                stream.unnamed[block] = waiting
        if not gone:
            return []
        hashes = short_hashes(gone)
        group = event.group or None
        return [BlockRemoved(block_hashes=hashes, medium=self._media[event.tier], group_idx=group)]

    def _retire(self, block: SequenceHash) -> None:
        if not any(stream.holds(block) for stream in self._streams.values()):
            self._names.retire(block)

    def _clear(self, stream_id: StreamId, ts_ms: int) -> None:
        stream = self._streams[stream_id]
        gone, stream.blocks = stream.blocks, {}
        stream.groups.clear()
        stream.unnamed.clear()
        for block in (block for held in gone.values() for block in held):
            self._retire(block)
        self._publish(stream_id, [AllBlocksCleared()], ts_ms)

    def _publish(self, stream_id: StreamId, events: list[EngineEvent], ts_ms: int) -> None:
        if events:
            self._send(stream_id, events, ts_ms)

    def _send(self, stream_id: StreamId, events: list[EngineEvent], ts_ms: int) -> None:
        stream = self._streams[stream_id]
        if not self._is_read(stream_id.rank):
            assert not stream.buffer, f"{stream_id}: a batch was written without a reader"
            stream.next_seq += 1
            self.batch_count += 1
            return
        frame = Frame(stream_id, stream.next_seq, self._payload(stream_id, events, ts_ms))
        assert not stream.buffer or stream.buffer[-1].seq == frame.seq - 1, f"{stream_id}: a hole"
        stream.next_seq += 1
        self.batch_count += 1
        self._out.append(frame)
        stream.buffer.append(frame)
        stream.buffer_bytes += len(frame.payload)
        while len(stream.buffer) > self._batches_max or stream.buffer_bytes > BUFFER_BYTES_MAX:
            stream.buffer_bytes -= len(stream.buffer.popleft().payload)
        assert stream.buffer_bytes >= 0, f"{stream_id}: {stream.buffer_bytes} bytes are kept"

    def _is_read(self, rank: int) -> bool:
        return not self._awaits_readers or rank in self._read

    def _payload(self, stream_id: StreamId, events: list[EngineEvent], ts_ms: int) -> bytes:
        return encode_batch(EngineBatch(ts_ms / 1000, tuple(events), stream_id.rank))


def short_hash(block: SequenceHash) -> int:
    """Return what routers call a block: the low 64 bits of its hash."""
    assert len(block) == HASH_BYTES, block.hex()
    return int.from_bytes(block[-8:], "big")


def short_hashes(blocks: Sequence[SequenceHash]) -> tuple[int, ...]:
    """Return what routers call each of these blocks: the low 64 bits of its hash."""
    return struct.unpack(">" + f"{HASH_BYTES - 8}xQ" * len(blocks), b"".join(blocks))
