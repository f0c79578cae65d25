"""A host tier's core with peers around it: what `Host` is, and what an index and peers do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvbm_common.checksum import pack_sums
from kvbm_common.wire.slot_entries import LeasedSlot
from kvbm_host_tier.core.messages import Effect
from kvbm_host_tier.core.peer_messages import (
    AskHolders,
    HoldersTold,
    PeerId,
    PeerJoined,
    PeerPulled,
    PeerPullFailed,
    PulledBlock,
    PullFromPeer,
)

from tests.services.host_tier.helpers import BLOCK_BYTES, DIGEST, Host, checksum, name, of

ANN = PeerId("ann", "0")
BEN = PeerId("ben", "0")
PEER_LEASE = 77


def asked_numbers(effect: AskHolders | PullFromPeer) -> list[int]:
    """The blocks that a question or a pull is about."""
    return [int.from_bytes(one, "big") for one in effect.names]


class HostWithPeers(Host):
    """`ann` is there from the beginning."""

    def __init__(self, *, peers: Sequence[PeerId] = (ANN,), **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for peer in peers:
            self.step(PeerJoined(peer))

    def answer(self, ask: AskHolders, *holders: tuple[PeerId, int]) -> list[Effect]:
        """The index answers."""
        return self.step(HoldersTold(ask.question, holders))

    def index_silent(self, ask: AskHolders) -> list[Effect]:
        """… or does not."""
        return self.step(HoldersTold(ask.question, None))

    def came(
        self, pull: PullFromPeer, *, missing: Sequence[int] = (), wrong: Sequence[int] = (),
        lease: int = PEER_LEASE,
    ) -> list[Effect]:  # fmt: skip
        """A pull has ended: all came but `missing`, and `wrong` with other bytes."""
        blocks = [
            PulledBlock(slot, leased(number), pack_sums([checksum(number) + (number in wrong)]))
            for number, slot in zip(asked_numbers(pull), pull.slots, strict=True)
            if number not in missing
        ]
        return self.step(PeerPulled(pull.pull, tuple(blocks), lease))

    def lost(
        self, pull: PullFromPeer, *, settled: bool = True, reason: str = "transfer_timeout"
    ) -> list[Effect]:
        """A pull has failed."""
        return self.step(PeerPullFailed(pull.pull, reason, settled, PEER_LEASE))

    def ask_peers(self, *wanted: int, has: int | None = None, **kwargs: Any) -> list[PullFromPeer]:
        """A look-up that ann can serve; returns the pulls in flight."""
        [ask] = of(self.look_up(*wanted, **kwargs), AskHolders)
        count = len(asked_numbers(ask)) if has is None else has
        return of(self.answer(ask, (ANN, count)), PullFromPeer)


def leased(number: int) -> LeasedSlot:
    """A block as its peer leases it."""
    return LeasedSlot(
        hash=name(number).hex(), parent=name(number - 1).hex(), namespace=DIGEST, slot=number,
        checksum=checksum(number), bytes=BLOCK_BYTES,
    )  # fmt: skip
