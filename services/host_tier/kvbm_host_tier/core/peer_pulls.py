"""The pulls: batches of blocks that are read from peers, and the queue of those that wait.

A batch waits in the queue as long as a lookup wants one of its blocks, and its deadline counts from
its start. The states of a pull are drawn in `docs/state_machines.md`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from kvbm_common.identity import SequenceHash, hash_from_hex
from kvbm_common.tier.machine import Machine
from kvbm_common.tier.parts import is_divisible
from kvbm_common.tier.slots import Block

from kvbm_host_tier.core.load_times import Loading
from kvbm_host_tier.core.peer_messages import PeerId, PulledBlock

AHEAD_MS = 1
"""The delay of a pull for each block of its run before it, in milliseconds, as with fills from
disk. The front of a short run overtakes the tail of a long one, and no tail waits without end."""
TAKEN_MAX = 256
"""Pulls that are given up in the queue in one step."""


class PeerPullState(Enum):
    """The states of a pull."""

    QUEUED = "queued"
    IN_FLIGHT = "in_flight"
    SETTLED = "settled"
    """The read is known to have settled, and not yet known to have failed."""
    UNSETTLED = "unsettled"
    """The read has failed, and late bytes may still reach its slots."""

    __hash__ = object.__hash__  # Enum's own is written in Python.


PEER_PULL = Machine(
    "peer pull",
    {
        (None, "queued"): PeerPullState.QUEUED,
        (PeerPullState.QUEUED, "started"): PeerPullState.IN_FLIGHT,
        (PeerPullState.QUEUED, "given up"): None,
        (PeerPullState.IN_FLIGHT, "pulled"): None,
        (PeerPullState.IN_FLIGHT, "failed, settled"): None,
        (PeerPullState.IN_FLIGHT, "failed"): PeerPullState.UNSETTLED,
        (PeerPullState.IN_FLIGHT, "settled"): PeerPullState.SETTLED,
        (PeerPullState.SETTLED, "failed, settled"): None,
        (PeerPullState.UNSETTLED, "settled"): None,
    },
)


@dataclass(slots=True)
class PeerPull:
    """A batch: blocks of a peer, and the slots here that they are read into."""

    peer: PeerId
    names: tuple[SequenceHash, ...]
    slots: tuple[int, ...]
    slot_bytes: int
    until_ms: int
    """The deadline: of its lookup's answer while it is QUEUED, of its own arrival afterwards."""
    loading: Loading
    trace: str = ""
    state: PeerPullState = PeerPullState.QUEUED


class PullQueue:
    """The numbers of the pulls that are QUEUED, by their turns."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, int]] = []
        """A heap of turns and numbers."""

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, number: int, now_ms: int, *, ahead: int) -> None:
        """Queue a pull that has so many blocks of its run before it."""
        assert ahead >= 0, f"{ahead} blocks are before pull {number}"
        heapq.heappush(self._waiting, (now_ms + ahead * AHEAD_MS, number))

    def pop(self) -> int:
        """Return the pull whose turn it is; it waits no longer."""
        assert self._waiting, "a pull has its turn"
        return heapq.heappop(self._waiting)[1]

    def take(self, is_over: Callable[[int], bool]) -> list[int]:
        """Return pulls that are over, in their order, TAKEN_MAX at most; they wait no longer."""
        found = heapq.nsmallest(TAKEN_MAX, (one for one in self._waiting if is_over(one[1])))
        over = [number for _, number in found]
        if over:
            taken = set(over)
            self._waiting = [one for one in self._waiting if one[1] not in taken]
            heapq.heapify(self._waiting)
            assert taken.isdisjoint(number for _, number in self._waiting), "a pull is queued twice"
        return over


def verdict(name: SequenceHash, came: PulledBlock | None, slot_bytes: int) -> Block | str:
    """Return the block that has come into a slot, or the reason why none has."""
    if came is None:
        return "gone"
    leased = came.leased
    if hash_from_hex(leased.hash) != name or not 0 < leased.bytes <= slot_bytes:
        return "malformed"
    parent, namespace = hash_from_hex(leased.parent), bytes.fromhex(leased.namespace)
    if not is_divisible(leased.bytes, leased.parts):
        return "malformed"
    block = Block(name, parent, namespace, leased.checksum, leased.bytes, leased.parts)
    return block.with_sums(came.sums) if block.has_sums(came.sums) else "corrupt"
