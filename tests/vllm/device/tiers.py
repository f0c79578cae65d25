"""The tiers, as a connector's scheduler half meets them: names and what was read for them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvbm_common.identity import SequenceHash
from kvbm_common.tier import kv_groups
from kvbm_common.tier.kv_groups import GroupRun, Reach, needed_names, split
from kvbm_connectors.core.messages import (
    ConnectorMisuse,
    Hit,
    Load,
    LoadResult,
    OfferEnded,
    OfferRun,
)

from tests.vllm.device.memory import Cell, Cells, WrongBytes

NEVER_MS = 1 << 60


@dataclass
class Asked:
    """A lookup."""

    names: Sequence[SequenceHash]
    groups: Sequence[GroupRun]
    wait: int
    """How often the engine asks in vain."""
    found: list[SequenceHash] = field(default_factory=list)
    hit: Hit | None = None


class Tiers:
    """SchedulerHalf and all behind it."""

    epoch = 1

    def __init__(
        self,
        rng: random.Random,
        cells: Cells,
        right: Mapping[SequenceHash, Cell],
        counts: Counter[str],
    ) -> None:
        """`right` is what each name stands for."""
        self._rng, self._cells, self._right, self._counts = rng, cells, right, counts
        self.held: dict[SequenceHash, Cell] = {}
        self.offers: dict[int, Sequence[OfferRun]] = {}
        self.patience = 0.6
        """How likely an offer waits for the next pull."""
        self._ended: list[OfferEnded] = []
        self._asked: dict[str, Asked] = {}
        self._leases: dict[int, dict[SequenceHash, Cell]] = {}
        self._next = 0

    # --- lookups and loads --------------------------------------------------------------------

    def lookup(
        self, request: str, hashes: Sequence[SequenceHash], *, groups: Sequence[GroupRun] = (),
        **_: Any,
    ) -> Hit | None:  # fmt: skip
        asked = self._asked.get(request)
        if asked is None or asked.names != list(hashes):
            wait = self._rng.choice((0, 0, 1, 3))
            asked = self._asked[request] = Asked(list(hashes), list(groups), wait)
        if asked.hit is None and asked.wait > 0:
            asked.wait -= 1
            return None
        if asked.hit is None:
            self._answer(asked)
            self._counts["hits"] += bool(asked.found)
        return asked.hit

    def _answer(self, asked: Asked) -> None:
        if not asked.groups:
            count = next(
                (at for at, name in enumerate(asked.names) if name not in self.held),
                len(asked.names),
            )
            asked.found = list(asked.names[:count])
            asked.hit = Hit(count, host=count)
            return
        names = split(asked.groups, asked.names)
        found = kv_groups.reach(asked.groups, names, kv_groups.has_each(self.held.__contains__))
        asked.found = needed_names(asked.groups, names, found.tokens)
        count = len(asked.found)
        asked.hit = Hit(count, host=count, boundary=found.tokens, shared=found.shared)
        self._count_short(found)

    def _count_short(self, found: Reach) -> None:
        self._counts["hits that end before what is shared"] += found.tokens < found.shared

    def take(self, request: str, blocks: Sequence[int]) -> Load:
        asked = self._asked.pop(request, None)
        if asked is None or asked.hit is None:
            raise ConnectorMisuse(f"{request} has no hit")
        count = len(blocks)
        if asked.groups and count != len(asked.found):
            raise ConnectorMisuse(f"{request}: {count} blocks of {len(asked.found)}")
        self._next += 1
        self._leases[self._next] = {name: self.held[name] for name in asked.found[:count]}
        self._counts["loads"] += 1
        self._counts["loaded blocks"] += count
        return Load(
            request=request, epoch=1, lease=self._next, slots=(0,) * count, blocks=tuple(blocks),
            hashes=tuple(asked.found[:count]), checksums=(b"",) * count, block_bytes=1,
            deadline_ms=NEVER_MS, whole=bool(asked.groups),
        )  # fmt: skip

    def write(self, load: Load, *, fails: bool) -> LoadResult:
        """Copy the blocks of a load into device memory, all or not all of them."""
        intact = [True] * len(load.blocks)
        if load.epoch == 0:
            return LoadResult(load, (False,) * len(load.blocks), (), "no_arena")
        if fails and intact:
            intact[self._rng.randrange(len(intact))] = False
        leased = self._leases[load.lease]
        for block, name, ok in zip(load.blocks, load.hashes, intact, strict=True):
            self._cells.content[block] = dict(leased[name]) if ok else {}
        corrupt = tuple(at for at, ok in enumerate(intact) if not ok)
        self._counts["failed loads"] += bool(corrupt)
        return LoadResult(load, tuple(intact), corrupt, "corrupt" if corrupt else "")

    def load_ended(self, result: LoadResult) -> None:
        self._leases.pop(result.load.lease, None)
        for name, ok in zip(result.load.hashes, result.intact, strict=True):
            if not ok and name not in self._promised():
                self.held.pop(name, None)

    def forget(self, request: str) -> None:
        self._asked.pop(request, None)

    # --- offers -------------------------------------------------------------------------------

    def offer(
        self, runs: Sequence[OfferRun], *, priority: int = 0, namespace: bytes = b"",
        hurry: bool = True,
    ) -> int | None:  # fmt: skip
        if self._rng.random() < 0.03:
            return None
        self._next += 1
        self.offers[self._next] = runs
        return self._next

    def revoke(self, offer: int) -> None:
        if self.offers.pop(offer, None) is not None:
            self._ended.append(OfferEnded(offer, 0))

    def drain_ended(self) -> list[OfferEnded]:
        ended, self._ended = self._ended, []
        return ended

    def pull(self, *, everything: bool = False) -> None:
        """Read some of the blocks on offer, now or later: they are held."""
        for offer in list(self.offers):
            if not everything and self._rng.random() < self.patience:
                continue
            runs = self.offers.pop(offer)
            for run in runs:
                for name, block in zip(run.hashes, run.blocks, strict=True):
                    self._read(name, block)
            count = sum(len(run.hashes) for run in runs)
            self._ended.append(OfferEnded(offer, count, complete=True))

    def _read(self, name: SequenceHash, block: int) -> None:
        found, right = self._cells.content[block], self._right.get(name)
        self._counts["stored blocks"] += name not in self.held
        if right is None:
            raise WrongBytes(f"{name.hex()} in block {block} is nobody's name")
        if any(found.get(at) != value for at, value in right.items()):
            raise WrongBytes(f"block {block} is stored as {right}, and is {found}")
        self.held[name] = right

    def evict(self, choose: Callable[[], float]) -> None:
        """Lose some blocks that no answer and no load needs."""
        promised = self._promised()
        for name in list(self.held):
            if name not in promised and choose() < 0.3:
                del self.held[name]
                self._counts["evicted blocks"] += 1

    def _promised(self) -> set[SequenceHash]:
        return {name for asked in self._asked.values() for name in asked.found}
