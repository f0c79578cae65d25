"""Plays of a source whose stream loses events, every short one, against what the source holds."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Literal

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.announcer import Announcer
from kvbm_common.tier.slots import Block
from kvbm_common.wire.events import Event, Tier
from kvbm_common.wire.verbs import SnapshotReply

Move = Literal[
    "said", "waits", "clear waits", "life waits", "lost", "notice", "flap", "answered", "lands"
]
NAMESPACE = bytes(32)


def block(number: int) -> Block:
    """A block after the one of the number before it."""
    name, parent = (SequenceHash((one + 1).to_bytes(16, "big")) for one in (number, number - 1))
    return Block(name, parent, NAMESPACE, 0, 4096)


class Follower(ABC):
    """An owner of followed sources, with one source; most events say one block more."""

    source = "disk-tier-0"
    tier: Tier = "disk"

    def __init__(self) -> None:
        self.asked = False
        """Whether the owner waits for a snapshot."""
        self.now_ms = 0
        self.epoch = 1
        """The life of the source."""
        self._announcer = Announcer(host="h", source=self.source, tier=self.tier, epoch=1)
        self._answer: SnapshotReply | None = None
        self._waiting: list[Event] = []
        self._is_noticed = True
        self._first = self._count = 0
        """The source holds the blocks from the first to the second number."""
        self.hear(self._announcer.cleared("start"))
        self.hear(self._say())

    # ---- what an owner does --------------------------------------------------------------------

    @abstractmethod
    def hear(self, event: Event) -> None:
        """Take an event."""

    @abstractmethod
    def lose(self) -> None:
        """Take the notice that events may be lost."""

    @abstractmethod
    def land(self, answer: SnapshotReply) -> None:
        """Take the snapshot that was asked for."""

    @abstractmethod
    def leave(self) -> None:
        """Take the registry's word that the source is gone."""

    @abstractmethod
    def join(self) -> None:
        """Take the registry's word that the source is there, in the same life."""

    @abstractmethod
    def wait(self) -> None:
        """Let a second pass."""

    @abstractmethod
    def is_current(self) -> bool:
        """Return whether the owner believes that it misses nothing."""

    @abstractmethod
    def held(self) -> set[SequenceHash]:
        """Return the blocks that the source has, as the owner believes."""

    # ---- a play --------------------------------------------------------------------------------

    def play(self, moves: Sequence[Move]) -> bool:
        """Make these moves, let all come to rest, and compare.

        Returns False, and compares nothing, if a move makes no sense when its turn comes.
        """
        if not all(self._move(move) for move in moves):
            return False
        self._deliver()
        if not self._is_noticed:
            self._notice()
        for _ in range(30):
            self._move("answered")
            self._move("lands")
            if self.is_current():
                break
            self.wait()
        assert self.is_current(), moves
        wanted = {one.hash for one in self._blocks()}
        assert self.held() == wanted, (moves, sorted(wanted - self.held()))
        return True

    def _move(self, move: Move) -> bool:
        """Make a move; False: it makes no sense now."""
        match move:
            case "said":
                self._deliver()
                self.hear(self._say())
            case "waits":
                self._waiting.append(self._say())
            case "clear waits":
                self._waiting.append(self._clear("flush"))
            case "life waits":
                self.epoch += 1
                self._announcer = Announcer(
                    host="h", source=self.source, tier=self.tier, epoch=self.epoch
                )
                self._waiting.append(self._clear("start"))
            case "lost":
                self._say()
                self._is_noticed = False
            case "notice":
                self._notice()
            case "flap":
                self._deliver()
                self.leave()
                self.hear(self._say())
                self.join()
            case "answered" if self.asked and self._answer is None:
                self._answer = self._announcer.snapshot(self._blocks())
            case "lands" if self._answer is not None:
                answer, self._answer, self.asked = self._answer, None, False
                self.land(answer)
            case _:
                return False
        return True

    def _say(self) -> Event:
        [event] = self._announcer.stored([block(self._count)])
        self._count += 1
        return event

    def _clear(self, reason: str) -> Event:
        self._first = self._count
        return self._announcer.cleared(reason)

    def _blocks(self) -> list[Block]:
        return [block(number) for number in range(self._first, self._count)]

    def _notice(self) -> None:
        """Say that events may be lost: ahead of those that wait in the owner's inbox."""
        self._is_noticed = True
        self.lose()

    def _deliver(self) -> None:
        waiting, self._waiting = self._waiting, []
        for event in waiting:
            self.hear(event)


def plays(moves: Sequence[Move], length: int) -> Iterator[tuple[Move, ...]]:
    """Yield every play of so many moves; the shorter ones end like some of them."""
    return itertools.product(moves, repeat=length)
