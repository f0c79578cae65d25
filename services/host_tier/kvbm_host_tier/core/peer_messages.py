"""Messages about other host tiers: the core's inputs and effects."""

from __future__ import annotations

from dataclasses import dataclass

from kvbm_common.identity import SequenceHash
from kvbm_common.wire.slot_entries import LeasedSlot


@dataclass(frozen=True, slots=True, order=True)
class PeerId:
    """Another host tier: of another host, or a sibling of ours."""

    host: str
    instance: str

    def __str__(self) -> str:
        return f"{self.host}/{self.instance}"


@dataclass(frozen=True, slots=True)
class PulledBlock:
    """A block as its peer leased it, and the packed checksums of the parts that have arrived in our
    slot."""

    slot: int
    leased: LeasedSlot
    sums: bytes


# --- inputs ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PeerJoined:
    """The registry has another host tier."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class PeerLeft:
    """… and has lost it."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class HoldersTold:
    """The other host tiers that have leading blocks of a question, and how many each.

    None: the index has not answered.
    """

    question: int
    holders: tuple[tuple[PeerId, int], ...] | None


@dataclass(frozen=True, slots=True)
class PeerPulled:
    """A pull has ended within its lease; blocks that are not in it the peer does not have."""

    pull: int
    blocks: tuple[PulledBlock, ...]
    lease: int = 0


@dataclass(frozen=True, slots=True)
class PeerPullFailed:
    """Nothing has come. Unless `settled`, late bytes may still land in the slots."""

    pull: int
    reason: str
    settled: bool
    lease: int = 0
    """The peer's, where it was granted."""


@dataclass(frozen=True, slots=True)
class PeerPullSettled:
    """The last late byte of a failed pull has landed: its slots are free."""

    pull: int


PeerInput = PeerJoined | PeerLeft | HoldersTold | PeerPulled | PeerPullFailed | PeerPullSettled


# --- effects --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AskHolders:
    """Ask the index who has these blocks; ends in HoldersTold within `deadline_ms` from now."""

    question: int
    names: tuple[SequenceHash, ...]
    deadline_ms: int


@dataclass(frozen=True, slots=True)
class PullFromPeer:
    """Lease these blocks at a peer, read them into these staged slots, sum them up.

    The slots are named by their places, and each is `slot_bytes` long. Ends in PeerPulled or
    PeerPullFailed within `deadline_ms` from now.
    """

    pull: int
    peer: PeerId
    names: tuple[SequenceHash, ...]
    slots: tuple[int, ...]
    slot_bytes: int
    deadline_ms: int
    trace: str = ""


@dataclass(frozen=True, slots=True)
class ReleaseAtPeer:
    """Give a lease back."""

    peer: PeerId
    lease: int


@dataclass(frozen=True, slots=True)
class OpenPeerReader:
    """There are peers, and blocks that they could read: let them."""

    path: str


PeerEffect = AskHolders | PullFromPeer | ReleaseAtPeer | OpenPeerReader
