"""The holdings: which holder has which blocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from operator import itemgetter

from kvbm_common.identity import HASH_BYTES, SequenceHash

from kvbm_index.core.chains import Chains
from kvbm_index.core.image import HolderImage, HolderTuple
from kvbm_index.core.messages import Holder, SourceKey

STARTS_MIN = 1_024
"""First blocks without a holder that may be listed before the list is sifted."""
BLOCKS_PER_START = 64
"""Blocks that are freed in the time in which one first block is looked at, 3 µs."""


class Holdings:
    """Blocks by holder. A holder exists exactly as long as it holds something."""

    def __init__(self) -> None:
        self._chains: dict[HolderTuple, Chains] = {}
        self._holders: dict[SourceKey, set[Holder]] = {}
        self._starts: dict[bytes, tuple[HolderTuple, ...]] = {}
        """First block of a namespace → the holders that had it once (`_sift_starts`)."""
        self._starts_room = STARTS_MIN
        """Entries that may be added to the list before it is sifted."""
        self._unsifted: Iterator[bytes] | None = None
        """First blocks that are still to be sifted; None: few of the listed ones lack a holder."""
        self._sifted = 0
        self._unfreed: deque[Chains] = deque()
        """Chains that no holder has any more; `tidy` forgets them piece by piece."""

    @property
    def holder_count(self) -> int:
        """Holders with at least one block."""
        return len(self._chains)

    @property
    def start_count(self) -> int:
        """First blocks that are listed, some of them without a holder; for tests."""
        return len(self._starts)

    @property
    def block_count(self) -> int:
        """Blocks over all holders."""
        return sum(map(len, self._chains.values()))

    def add(self, holder: HolderTuple, parent: bytes, run: bytes, *, rooted: bool) -> None:
        """Add a run of blocks, back to back after their parent, to what a holder has.

        With `rooted` the parent is the root of their namespace.
        """
        chains = self._chains.get(holder)
        if chains is None:
            if not run:
                return
            chains = self._new(holder)
        if rooted and run:
            self._note_start(run[:HASH_BYTES], holder)
        chains.add(parent, run, rooted=rooted)

    def load(self, image: HolderImage) -> None:
        """Load what a holder had when the image was made."""
        holder = (image.host, image.source, image.tier, image.rank, image.group)
        assert image.segments, f"the image of {holder} has no block"
        chains = self._new(holder)
        chains.load(image.segments)
        self._note_starts(holder, chains)

    def take(self, holder: HolderTuple, chains: Chains) -> None:
        """Take in all that a holder has; nothing was known of it before."""
        assert holder not in self._chains, f"{holder} holds blocks that no snapshot has said"
        if chains:
            self._new(holder, chains)
            self._note_starts(holder, chains)

    def tidy(self, room: int) -> bool:
        """List added blocks and free removed ones, `room` blocks in all; return whether it is done.

        Python takes 40 ms to free the names of a million blocks.
        """
        while self._unfreed and room > 0:
            shed = self._unfreed[0].shed()
            assert shed > 0, "nothing is left of what is shed"
            room -= shed
            if not self._unfreed[0]:
                self._unfreed.popleft()
        for chains in self._chains.values():
            if room <= 0:
                return False
            room = chains.index_some(room)
        return self._sift_starts(room) > 0

    def images(self) -> list[HolderImage]:
        """Return an image of what every holder has."""
        images = [
            HolderImage(host=host, source=source, tier=tier, rank=rank, group=group,
                        segments=chains.images())
            for (host, source, tier, rank, group), chains in self._chains.items()
        ]  # fmt: skip
        assert all(image.segments for image in images), "a holder without blocks is listed"
        return images

    def discard(self, holder: HolderTuple, blocks: bytes) -> None:
        """Discard these blocks, which a holder no longer has."""
        chains = self._chains.get(holder)
        if chains is not None:
            chains.discard(blocks)
            if not chains:
                self._forget(Holder(*holder))

    def drop(self, key: SourceKey, rank: int | None = None) -> None:
        """Drop everything that a source holds (on one rank, if that is given)."""
        for holder in list(self._holders.get(key, ())):
            if rank is None or holder.rank == rank:
                self._forget(holder)
        assert rank is not None or key not in self._holders, f"{key} holds blocks after its end"

    def of(self, key: SourceKey) -> dict[Holder, Chains]:
        """Return what a source holds, by holder."""
        return {holder: self._chains[holder] for holder in self._holders.get(key, ())}

    def holders_of(self, block: SequenceHash) -> list[Holder]:
        """Return the holders that have a block, sorted."""
        return sorted(Holder(*holder) for holder, has in self._chains.items() if block in has)

    def holders_of_each(self, blocks: Sequence[SequenceHash]) -> list[list[HolderTuple]]:
        """Return the holders of each of some blocks, in no order."""
        found: dict[bytes, list[HolderTuple]] = {block: [] for block in blocks}
        for holder, chains in self._chains.items():
            for block in chains.among(found.keys()):
                found[block].append(holder)
        return [found[block] for block in blocks]

    def by_host(self, hosts: Collection[str]) -> dict[str, list[tuple[Holder, Chains]]]:
        """Return all holders of some hosts and their chains, sorted, by host."""
        found: dict[str, list[tuple[Holder, Chains]]] = {host: [] for host in hosts}
        for holder, chains in sorted(self._chains.items(), key=itemgetter(0)):
            if holder[0] in found:
                found[holder[0]].append((Holder(*holder), chains))
        assert found.keys() == set(hosts), f"{hosts} are asked for, not {list(found)}"
        return found

    def of_sources(self, prefix: str) -> list[tuple[Holder, Chains]]:
        """Return all holders whose source's name has this prefix, with their chains, sorted."""
        return sorted(
            (Holder(*holder), chains)
            for holder, chains in self._chains.items()
            if holder[1].startswith(prefix)
        )

    def match(self, asked: Sequence[SequenceHash]) -> list[tuple[Holder, int]]:
        """Return how many of `asked` each holder has without a hole, from the first on.

        The longest comes first.
        """
        if not asked:
            return []
        # All holders of a first block are listed: their events named the root as its parent. No
        # holder of a block in the middle of a chain is.
        first = asked[0]
        listed = self._starts.get(first)
        has = Chains.begins_with if listed else Chains.__contains__
        found = [
            (Holder(*holder), chains.run_length(asked))
            for holder in listed or self._chains
            if (chains := self._chains.get(holder)) is not None and has(chains, first)
        ]
        return sorted(found, key=lambda one: (-one[1], one[0])) if len(found) > 1 else found

    def check(self) -> None:
        """Assert every invariant, in O(blocks)."""
        assert all(self._chains.values()), "a holder holds something"
        for holder, chains in self._chains.items():
            chains.check()
            for segment in chains.images():
                if segment.rooted:
                    start = segment.blocks[:HASH_BYTES]
                    assert holder in self._starts[start], "who has a first block is listed"
        listed = {holder for holders in self._holders.values() for holder in holders}
        assert listed == self._chains.keys(), "sources list their holders"
        for key, holders in self._holders.items():
            assert holders, f"{key} has no holder"
            assert all((holder.host, holder.source) == key for holder in holders)

    def _note_starts(self, holder: HolderTuple, chains: Chains) -> None:
        fresh = dict.fromkeys(chains.starts(), (holder,))
        for block in fresh.keys() & self._starts.keys():
            del fresh[block]
            self._note_start(block, holder)
        self._starts.update(fresh)
        self._starts_room -= len(fresh)

    def _note_start(self, block: bytes, holder: HolderTuple) -> None:
        listed = self._starts.get(block, ())
        if holder in listed:
            return
        self._starts[block] = (*listed, holder)
        self._starts_room -= 1

    def _sift_starts(self, room: int) -> int:
        """Remove holders from the lists of some blocks that they no longer have; return the room
        that is left. Doubling makes this cheap on the whole."""
        if room <= 0:
            return room
        if self._unsifted is None:
            if self._starts_room > 0:
                return room
            self._unsifted, self._sifted = iter([*self._starts]), 0
        none, count = Chains(), -(-room // BLOCKS_PER_START)
        assert count > 0, f"room for {room} blocks"
        blocks = list(islice(self._unsifted, count))
        for block in blocks:
            holders = self._starts[block]
            kept = tuple(one for one in holders if self._chains.get(one, none).begins_with(block))
            self._sifted += len(kept)
            if not kept:
                del self._starts[block]
            elif len(kept) < len(holders):
                self._starts[block] = kept
        if len(blocks) == count:
            return 0
        self._unsifted, self._starts_room = None, max(STARTS_MIN, self._sifted)
        return room - BLOCKS_PER_START * len(blocks)

    def _new(self, holder: HolderTuple, chains: Chains | None = None) -> Chains:
        named = Holder(*holder)
        assert named not in self._chains, f"{named} holds blocks already"
        self._holders.setdefault(SourceKey(named.host, named.source), set()).add(named)
        found = self._chains[named] = Chains() if chains is None else chains
        return found

    def _forget(self, holder: Holder) -> None:
        key = SourceKey(holder.host, holder.source)
        gone = self._chains.pop(holder, None)
        assert gone is not None, f"{holder} is listed, and holds nothing"
        if gone:
            self._unfreed.append(gone)
        holders = self._holders.get(key, set())
        holders.discard(holder)
        if not holders:
            self._holders.pop(key, None)
