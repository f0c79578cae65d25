"""Overload: what a disk tier keeps when blocks come twice as fast as the disk takes them.

The disk tier's real core behind a host memory, with the frequency filter off. Requests hit their
leading blocks in either tier. A block whose parents are not on disk cannot be reached there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from kvbm_cli.replay import ROOT, Chain, requests_of
from kvbm_common.identity import SequenceHash
from kvbm_common.tier.announcer import Announcer
from kvbm_common.tier.blocks import Block
from kvbm_common.tier.layout import UNIT_BYTES, Layout
from kvbm_common.wire.slot_entries import LeasedSlot
from kvbm_common.wire.verbs import ArenaReply, Hits, LeaseReply
from kvbm_disk_tier.core import effects as wanted
from kvbm_disk_tier.core import messages as told
from kvbm_disk_tier.core.core import DiskTierCore
from kvbm_disk_tier.core.frequency_filter import FrequencyFilter
from kvbm_disk_tier.core.journal import Replay
from kvbm_disk_tier.core.limits import DiskTierLimits

from benchmarks.admission import Tier, leading
from benchmarks.eviction_loads import LOADS
from benchmarks.harness import Row

REQUESTS = 2_000
SEED = 1
RATIO = 2
"""Blocks that come for each that the disk can write."""
HOST_SHARE, DISK_SHARE = 20, 1
"""Host memory and disk have one part in so many of the distinct blocks."""
PENDING_HOSTS = 20
"""The queue has one part in so many of the slots of host memory."""
NAMES = ("chat", "chat, one system prompt", "agents", "documents")
NAMESPACE = bytes(32)
TARGET_PERCENT = 5


class Overload:
    """A host memory of names, the disk tier's core, and a disk that takes so many blocks a time."""

    def __init__(self, block_count: int) -> None:
        self.arena = Tier(block_count // HOST_SHARE)
        self.slot_count = block_count // DISK_SHARE
        self.parent_of: dict[SequenceHash, SequenceHash] = {}
        self.asked = self.disk_hits = self.hits = 0
        limits = DiskTierLimits(pending_max=max(1, self.arena.slot_count // PENDING_HOSTS))
        self.core = DiskTierCore(
            host="h", instance="0", epoch=1, limits=limits,
            frequency_filter=FrequencyFilter(enabled=False),
        )  # fmt: skip
        self._host = Announcer(host="h", source="host-tier-0", tier="host", epoch=1)
        self._writes: deque[wanted.WriteSlots] = deque()
        self._credit = 0.0
        self._now_ms = 0
        self.core.start()
        self._step(told.ArenaKnown(ArenaReply(
            path="/a", bytes=UNIT_BYTES << 20, slot_bytes=UNIT_BYTES, slot_count=1 << 20, epoch=1,
            instance="0", sizes=[UNIT_BYTES],
        )))  # fmt: skip
        layout = Layout.of(UNIT_BYTES, self.slot_count)
        self._step(told.StoreOpened(layout, Replay({}, 1, 0, 0)))

    def on_disk(self) -> set[SequenceHash]:
        """Return the blocks that the disk has."""
        return {block.hash for block in self.core.inventory.table.blocks()}

    def serve(self, chain: Chain) -> None:
        """Serve a request from both tiers, and let the disk write for as long as it took."""
        find = self.core.inventory.table.find
        hits = leading(chain, lambda name: name in self.arena.here or find(name) is not None)
        old = [name for name in chain[:hits] if name in self.arena.here]
        self.asked, self.hits = self.asked + len(chain), self.hits + hits
        self.disk_hits += hits - len(old)
        self.arena.use(old)
        for name, parent in zip(chain, (ROOT, *chain), strict=False):
            self.parent_of[name] = parent
        before = set(self.arena.here)
        self.arena.take(chain, range(len(chain)))
        new = [name for name in chain if name in self.arena.here and name not in before]
        gone = [self._block(name) for name in before - self.arena.here]
        for removed in self._host.removed(gone, "evicted"):
            self._step(told.HostEvent("0", removed))
        for event in self._host.stored([self._block(name) for name in new]):
            self._step(told.HostEvent("0", event))
        lacking = [name.hex() for name in old if find(name) is None]
        if lacking:
            hits_told = Hits(namespace=NAMESPACE.hex(), hashes=lacking, block_bytes=UNIT_BYTES)
            self._step(told.HitsTold("0", hits_told))
        self._credit = min(self._credit + len(chain[hits:]) / RATIO, 64)
        self._work()

    def _work(self) -> None:
        while self._writes and self._credit >= len(self._writes[0].blocks):
            write = self._writes.popleft()
            self._credit -= len(write.blocks)
            self._step(told.Written(write.write))

    def _step(self, event: told.Input) -> None:
        self._now_ms += 1
        for effect in self.core.step(event, self._now_ms):
            match effect:
                case wanted.LeaseHost():
                    self._step(told.Leased(effect.write, self._leased(effect)))
                case wanted.WriteSlots():
                    self._writes.append(effect)
                case wanted.ReleaseHost():
                    self._step(told.Released(effect.write, valid=True, answered=True))
                case wanted.AppendJournal(write=int() as write):
                    self._step(told.Journaled((write,)))
                case _:
                    pass

    def _leased(self, effect: wanted.LeaseHost) -> LeaseReply:
        """Lease what is still in host memory."""
        names = [SequenceHash(bytes.fromhex(text)) for text in effect.request.hashes]
        slots = [
            LeasedSlot(
                hash=name.hex(), parent=self.parent_of[name].hex(), namespace=NAMESPACE.hex(),
                slot=number, checksum=1, bytes=UNIT_BYTES, parts=1,
            )
            for number, name in enumerate(names) if name in self.arena.here
        ]  # fmt: skip
        return LeaseReply(lease=effect.write, slots=slots)

    def _block(self, name: SequenceHash) -> Block:
        return Block(name, self.parent_of[name], NAMESPACE, 1, UNIT_BYTES)


def unreachable(names: set[SequenceHash], parent_of: dict[SequenceHash, SequenceHash]) -> int:
    """Return how many of these blocks have a parent, or one of its parents, that is not there."""
    known: dict[SequenceHash, bool] = {ROOT: True}

    def reached(name: SequenceHash) -> bool:
        path: list[SequenceHash] = []
        while name not in known and name in names:
            path.append(name)
            name = parent_of[name]
        known.update(dict.fromkeys(path, known.get(name, False)))
        return known.get(path[0] if path else name, False)

    return sum(not reached(name) for name in names)


def overloaded(name: str) -> Overload:
    """Return what there is after a load."""
    load = requests_of(LOADS[name](REQUESTS, SEED))
    overload = Overload(load.block_count)
    for chain in load.chains:
        overload.serve(chain)
    return overload


def run() -> list[Row]:
    """Every load."""
    return list(_rows(NAMES))


def _rows(names: Sequence[str]) -> Iterator[Row]:
    for name in names:
        found = overloaded(name)
        held = found.on_disk()
        part = 100 * unreachable(held, found.parent_of) / max(1, len(held))
        hit = 100 * found.hits / found.asked
        yield Row(
            name=f"{name}: blocks on disk whose root is not ({len(held):,} there, {hit:.1f} % hit)",
            unit="%", value=round(part, 1), target=TARGET_PERCENT, met=part <= TARGET_PERCENT,
        )  # fmt: skip
