"""Retries: blocks that the host tier was asked for, and it did not answer.

NATS may be away for seconds or minutes, and says so at once: without a pause everything that waits
for the disk would be asked for in vain, and forgotten, in a moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvbm_common.breaker import Breaker
from kvbm_common.errors import BusUnavailable, DeadlineExceeded, NoResponder
from kvbm_common.identity import SequenceHash

TRIES_MAX = 20
"""With the breaker's pauses about a quarter of an hour; then a block is given up."""
UNANSWERED = (BusUnavailable.code, DeadlineExceeded.code, NoResponder.code)
"""Reasons that say nothing of the blocks. After any other the same would come again."""


class Retries:
    """Pure: time comes in. Knows only blocks that have failed and are neither done nor given up."""

    def __init__(self) -> None:
        self._breaker = Breaker()
        self._tries: dict[SequenceHash, int] = {}

    def __len__(self) -> int:
        return len(self._tries)

    def allows(self, now_ms: int) -> bool:
        """May the host tier be asked now? Then call `start`."""
        return self._breaker.allows(now_ms)

    def start(self) -> None:
        """It is asked."""
        self._breaker.start()

    def answered(self) -> None:
        """It has answered, whatever it said."""
        self._breaker.good()

    def unanswered(self, names: Sequence[SequenceHash], now_ms: int) -> list[SequenceHash]:
        """It has not; returns those that are worth another try."""
        self._breaker.trouble(now_ms)
        again: list[SequenceHash] = []
        for name in names:
            self._tries[name] = self._tries.get(name, 0) + 1
            if self._tries[name] < TRIES_MAX:
                again.append(name)
            else:
                del self._tries[name]
        return again

    def forget(self, names: Iterable[SequenceHash]) -> None:
        """These are done, or dropped for another reason."""
        for name in names:
            self._tries.pop(name, None)
