"""Queries: the state of the index and the questions about it. Only core.py changes the state."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence

from kvbm_common.identity import HASH_BYTES, SequenceHash, unpack_hashes
from kvbm_common.tier.follow import FollowLimits, FollowState
from kvbm_common.wire.events import TIER_SOURCES, Removed, Stored, Tier
from kvbm_common.wire.index_verbs import DUMP_BLOCKS_MAX, DumpReply, DumpRequest, HolderMatch
from kvbm_common.wire.routes import RankedEngine
from kvbm_common.wire.scores import PlaceScore

from kvbm_index.core.candidates import Candidate
from kvbm_index.core.dump_pages import HeldBy, page_of
from kvbm_index.core.event_decoder import DecodedRemoved, DecodedStored, removed_of, runs_of
from kvbm_index.core.holdings import Holdings
from kvbm_index.core.image import Image, SourceImage
from kvbm_index.core.messages import (
    Holder,
    IndexView,
    Limits,
    Received,
    SourceKey,
    Statistics,
)
from kvbm_index.core.packed_batch import PackedRemoved, PackedStored
from kvbm_index.core.requests import ReplyTooLarge
from kvbm_index.core.routes import Prices, peer_ranges, ranked
from kvbm_index.core.scores import Range, scores
from kvbm_index.core.sources import Sources

EVERYTHING = DumpRequest()
LOOKS_MAX = 65_536
"""Looks for a block at a holder before other work has a turn: about 20 ms."""
STORY_EVENTS_MAX = 512
"""Applied events that are remembered for stories. More of them would push each other, and the
holdings, out of the processor's caches."""


class Queries:
    """Sources with their positions and blocks: the part of the core that answers."""

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._follow_limits = FollowLimits(
            waiting_max=self._limits.buffer_events_max,
            retry_ms=self._limits.retry_ms,
            retry_max_ms=self._limits.retry_max_ms,
        )
        self._sources = Sources(self._limits, self._follow_limits)
        self._holdings = Holdings()
        self._drops: Counter[str] = Counter()
        self._applied: deque[tuple[int, Received]] = deque(maxlen=STORY_EVENTS_MAX)
        self._snapshots_in_flight = 0
        self._position = 0
        self._stream = ""
        """The position in the event stream after the last events, and the stream's identity."""
        self._event_count = 0
        self._snapshot_count = 0
        self._lower_epoch_count = 0

    @property
    def view(self) -> IndexView:
        """Return what the shell may read."""
        return IndexView(self.statistics(), self.position, self.positions())

    def match(self, hashes: Sequence[SequenceHash]) -> list[HolderMatch]:
        """Return how many of `hashes` each holder has without a hole, from the first on.

        The longest comes first.
        """
        return [
            HolderMatch(host=host, source=source, tier=tier, rank=rank, group=group, blocks=blocks)
            for (host, source, tier, rank, group), blocks in self._holdings.match(hashes)
        ]

    def scores(
        self, hashes: Sequence[SequenceHash], weights: Mapping[Tier, float]
    ) -> list[PlaceScore]:
        """Return what `hashes` are worth on every rank of every engine; the best first."""
        return scores(self._holdings, hashes, weights)

    def engines(self) -> dict[SourceKey, FollowState]:
        """Return every registered engine, and whether the index knows all that it holds."""
        return {
            key: source.state
            for key, source in self._sources.items()
            if source.registered and not key.source.startswith(TIER_SOURCES)
        }

    def routes(
        self,
        hashes: Sequence[SequenceHash],
        candidates: Sequence[Candidate],
        prices: Prices,
        tie: bytes,
        peers: Sequence[Range] | None = None,
    ) -> list[RankedEngine]:
        """Return the candidates in the order in which they should be given a prompt."""
        return ranked(self._holdings, hashes, candidates, prices, tie, peers)

    def peers(self, hashes: Sequence[SequenceHash]) -> list[Range]:
        """Return the ranges of `hashes` that host tiers have."""
        return peer_ranges(self._holdings, hashes)

    def holders_of(self, hashes: Sequence[SequenceHash]) -> Iterator[list[Holder]]:
        """Yield the holders of each of some blocks, sorted; other work may have a turn between.

        The holders of a block are those of one moment, so that a block is found which moves from
        one to another. Those of the next block may be of a later moment.
        """
        end = 0
        while end < len(hashes):
            start, holders = end, max(1, self._holdings.holder_count)
            end = min(len(hashes), start + max(1, LOOKS_MAX // holders))
            assert start < end, f"{holders} holders leave no room for a block"
            for found in self._holdings.holders_of_each(hashes[start:end]):
                yield sorted(Holder(*holder) for holder in found)

    def dump(self, request: DumpRequest = EVERYTHING) -> DumpReply:
        """Return a page of what is held, or all of it where that is little.

        Raises BadRequest, ReplyTooLarge.
        """
        held = self.holders(request.source)
        limit = request.limit
        if not limit:
            blocks = sum(len(one.chains) for one in held)
            if blocks > DUMP_BLOCKS_MAX:
                raise ReplyTooLarge(
                    f"{blocks} blocks, more than {DUMP_BLOCKS_MAX}: ask in pages, with `limit` "
                    "and `after`, or for `holders`"
                )
            limit = max(1, blocks)
        page, after = page_of(held, request.after, limit)
        return DumpReply(holders=page, next=after)

    def holders(self, source: str | None = None) -> list[HeldBy]:
        """Return all holders (of one source, if given), sorted, with their positions and blocks."""
        return [
            HeldBy(holder, position.epoch, position.seq, chains)
            for key, position in sorted(self._sources.items())
            if source in (None, key.source)
            for holder, chains in sorted(self._holdings.of(key).items())
        ]

    def image(self) -> Image:
        """Return everything known now; copies of lists only, 20 ms for a million blocks."""
        sources = [
            SourceImage(host=key.host, source=key.source, epoch=source.epoch, seq=source.seq,
                        state=source.state.name, needs_snapshot=source.needs_snapshot)
            for key, source in self._sources.items()
        ]  # fmt: skip
        assert self._stream or not self._position, f"position {self._position} of no stream"
        return Image(stream=self._stream, position=self._position, sources=sources,
                     holders=self._holdings.images())  # fmt: skip

    @property
    def position(self) -> int:
        """The position in the stream after the last events; 0 when it is not known."""
        return self._position

    def positions(self) -> dict[SourceKey, tuple[int, int]]:
        """Map each source that is not gone to the (epoch, seq) applied."""
        return {
            key: (source.epoch, source.seq)
            for key, source in self._sources.items()
            if source.state is not FollowState.GONE
        }

    def behind(self) -> list[SourceKey]:
        """Return the sources whose snapshot is missing."""
        return [key for key, source in self._sources.items() if source.state is FollowState.BEHIND]

    def story(self, sequence_hash: SequenceHash) -> list[str]:
        """Return the last applied events about a block as lines, the newest last."""
        assert len(sequence_hash) == HASH_BYTES, sequence_hash
        return [
            f"{now_ms} ms {event.__struct_config__.tag} {event.host}/{event.source} "
            f"epoch {event.epoch} seq {event.seq}"
            for now_ms, event in self._applied
            if _mentions(event, sequence_hash)
        ]

    def statistics(self) -> Statistics:
        """Return the figures for metrics."""
        sources, in_flight = self._sources.values(), self._snapshots_in_flight
        assert 0 <= in_flight <= len(sources), f"{in_flight} snapshots, {len(sources)} sources"
        return Statistics(
            sources=sum(source.state is not FollowState.GONE for source in sources),
            sources_behind=len(self.behind()),
            holders=self._holdings.holder_count,
            blocks=self._holdings.block_count,
            buffered_events=sum(len(source.waiting) for source in sources),
            buffered_most=max((len(source.waiting) for source in sources), default=0),
            snapshots_in_flight=in_flight,
            events=self._event_count,
            snapshots=self._snapshot_count,
            lower_epochs=self._lower_epoch_count,
            drops=dict(self._drops),
        )

    def check(self) -> None:
        """Assert every invariant, in O(n)."""
        self._holdings.check()
        in_flight = 0
        for key, source in self._sources.items():
            assert key == source.key
            source.check()
            in_flight += source.requested_at_ms is not None
            if source.state is FollowState.GONE:
                assert not self._holdings.of(key), f"{key} is gone and holds something"
        assert in_flight == self._snapshots_in_flight <= self._limits.snapshots_max
        assert len(self._sources) <= self._limits.sources_max


def _mentions(event: Received, block: SequenceHash) -> bool:
    match event:
        case Stored() | DecodedStored():
            return any(block in unpack_hashes(blocks) for _, blocks, _ in runs_of(event))
        case Removed() | DecodedRemoved():
            return block in unpack_hashes(removed_of(event))
        case PackedStored():
            return any(block in unpack_hashes(blocks) for _, blocks, _ in event.runs())
        case PackedRemoved():
            return block in unpack_hashes(event.blocks())
        case _:
            return True
