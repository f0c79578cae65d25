"""What an engine must not ask for again for a while: blocks whose loads have failed."""

from __future__ import annotations

from kvbm_common.identity import SequenceHash, unpack_hashes
from kvbm_common.wire.local import Lookup
from kvbm_connectors.core.messages import Load, LoadResult

from tests.sim.host_lookups import Question
from tests.sim.invariants import require


class FailedLoads:
    """The blocks that have failed to load in one life of an engine, from one life of an arena."""

    def __init__(self, avoid_ms: int) -> None:
        self._avoid_ms = avoid_ms
        self._epoch = 0
        self._until_ms: dict[SequenceHash, int] = {}
        self._asked: dict[int, dict[SequenceHash, int]] = {}
        """Lookup → what had failed when it was asked, and until when that counts."""

    def ended(self, result: LoadResult, epoch: int, now_ms: int) -> int:
        """Remember which blocks have failed, and return how many: only those of this arena."""
        if result.load.epoch != epoch:
            return 0
        self._enter(epoch)
        pairs = zip(result.load.hashes, result.intact, strict=True)
        failed = [name for name, is_intact in pairs if not is_intact]
        self._until_ms |= dict.fromkeys(failed, now_ms + self._avoid_ms)
        return len(failed)

    def asked(self, lookup: Lookup, question: Question, epoch: int, now_ms: int) -> None:
        """Require of a lookup that a hit of all that it asks for needs no block that has just
        failed, and that nothing is avoided without a failure."""
        self._enter(epoch)
        failed = {name: until for name, until in self._until_ms.items() if now_ms < until}
        self._asked[lookup.lookup] = failed
        good = set(unpack_hashes(lookup.hashes)) - failed.keys()
        text = f"{lookup.request} asks for blocks that have failed to load"
        require(question.boundary(good) == question.most, text)
        text = f"{lookup.request} avoids {lookup.avoided} blocks, and none has failed"
        require(not lookup.avoided or bool(failed), text)

    def taken(self, load: Load, now_ms: int) -> None:
        """Require of a load that none of its blocks had just failed when it was asked for."""
        failed = self._asked.get(load.lookup, {})
        again = [name for name in load.hashes if now_ms < failed.get(name, now_ms)]
        require(not again, f"{load.request} takes {len(again)} blocks that have failed to load")

    def _enter(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._epoch = epoch
            self._until_ms.clear()
