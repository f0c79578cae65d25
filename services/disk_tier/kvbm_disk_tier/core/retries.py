"""Retries: blocks that the host tier was asked for, and it did not answer.

NATS may be away for seconds or minutes, and says so at once: without a pause everything that waits
for the disk would be asked for in vain, and forgotten, in a moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvbm_common.errors import BusUnavailable, DeadlineExceeded, NoResponder
from kvbm_common.identity import SequenceHash
from kvbm_common.tier.breaker import Breaker

TRIES_MAX = 20
"""With the breaker's pauses about a quarter of an hour; then a block is given up."""
UNANSWERED = (BusUnavailable.code, DeadlineExceeded.code, NoResponder.code)
"""Reasons that say nothing of the blocks. After any other the same would come again."""


class Retries(Breaker):
    """The breaker of the host tiers' answers, with the tries of each block.

    Pure: time comes in. Knows only blocks that have failed and are neither done nor given up.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tries: dict[SequenceHash, int] = {}

    def unanswered(self, names: Sequence[SequenceHash], now_ms: int) -> list[SequenceHash]:
        """Note that these were asked for in vain; returns those that are worth another try."""
        assert names, "a host tier is asked for blocks"
        self.trouble(now_ms)
        again: list[SequenceHash] = []
        for name in names:
            self.tries[name] = self.tries.get(name, 0) + 1
            if self.tries[name] < TRIES_MAX:
                again.append(name)
            else:
                del self.tries[name]
        assert len(again) <= len(names)
        return again

    def forget(self, names: Iterable[SequenceHash]) -> None:
        """Forget blocks that are done, or dropped for another reason."""
        for name in names:
            self.tries.pop(name, None)
