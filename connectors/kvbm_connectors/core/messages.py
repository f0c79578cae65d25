"""Messages of the connector's core: inputs, effects, answers, and its limits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from kvbm_common.config.settings import Settings
from kvbm_common.errors import KvbmError
from kvbm_common.identity import SequenceHash
from kvbm_common.wire.consolidator import ToConsolidator
from kvbm_common.wire.local import ToHostTier


class ConnectorMisuse(KvbmError):
    """The engine side called out of turn."""

    code = "connector_misuse"


@dataclass(frozen=True, slots=True)
class OfferRun:
    """A run of device blocks: block `blocks[i]` holds `hashes[i]`, whose parent is before it."""

    parent: SequenceHash
    hashes: tuple[SequenceHash, ...]
    blocks: tuple[int, ...]


OFFER_BLOCKS_MAX = 256
"""Blocks of one offer; a long prompt makes several, so that the host tier can share its time and
the first blocks are free early."""


def offers_of(run: OfferRun) -> Iterator[OfferRun]:
    """Cut a run into offers of at most OFFER_BLOCKS_MAX blocks, prefix first."""
    if 0 < len(run.hashes) <= OFFER_BLOCKS_MAX:
        yield run
        return
    parent = run.parent
    for start in range(0, len(run.hashes), OFFER_BLOCKS_MAX):
        end = min(start + OFFER_BLOCKS_MAX, len(run.hashes))
        yield OfferRun(parent, run.hashes[start:end], run.blocks[start:end])
        parent = run.hashes[end - 1]


@dataclass(frozen=True, slots=True)
class Origin:
    """The fields by which a lookup is explained and traced; see `Lookup`."""

    content: bytes = b""
    trace: str = ""
    sent_us: int = 0
    parent: str = ""


UNSAID = Origin()


@dataclass(frozen=True, slots=True)
class Load:
    """A load for a worker to pull: arena slot `slots[i]` into device block `blocks[i]`.

    `checksums[i]` are those of block i's parts, packed: each worker verifies those that it holds.
    `deadline_ms` is the lease's end on the holder's own clock: a pull that ends later has failed.
    """

    request: str
    epoch: int
    lease: int
    slots: tuple[int, ...]
    blocks: tuple[int, ...]
    hashes: tuple[SequenceHash, ...]
    checksums: tuple[bytes, ...]
    """The packed checksums of the parts of each block."""
    block_bytes: int
    deadline_ms: int
    lookup: int = 0
    whole: bool = False
    """True if no block can be used when one fails, as with several KV groups."""


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The result of a load, by block. `corrupt` are those whose bytes arrived wrong."""

    load: Load
    intact: tuple[bool, ...]
    corrupt: tuple[int, ...] = ()
    reason: str = ""
    seconds: float = 0.0
    """The time that the bytes took to arrive."""

    @property
    def usable(self) -> int:
        """Return the blocks of the prefix that can be used."""
        if self.load.whole and not all(self.intact):
            return 0
        return next((i for i, ok in enumerate(self.intact) if not ok), len(self.intact))


def merge_results(results: Sequence[LoadResult]) -> LoadResult:
    """Return one result of all ranks' results: a block is good if it is good on every rank."""
    assert results, "no rank has reported"
    intact = tuple(all(flags) for flags in zip(*(r.intact for r in results), strict=True))
    corrupt = tuple(sorted({index for result in results for index in result.corrupt}))
    reason = next((result.reason for result in results if result.reason), "")
    seconds = max(result.seconds for result in results)
    return LoadResult(results[0].load, intact, corrupt, reason, seconds)


@dataclass(frozen=True, slots=True)
class Hit:
    """The answer to a lookup: this many blocks, leased; some may come from disk or afar."""

    blocks: int
    host: int = 0
    disk: int = 0
    remote: int = 0
    reason: str = ""
    """The reason why there are not more blocks."""
    boundary: int = 0
    """The tokens that the blocks stand for, in a lookup over several KV groups."""
    shared: int = 0
    """The tokens up to which the groups without a window have all blocks: where this is more,
    blocks of a window are missing."""


@dataclass(frozen=True, slots=True)
class ToHost:
    """Send to the host tier."""

    message: ToHostTier


@dataclass(frozen=True, slots=True)
class ToEvents:
    """Send to the consolidator."""

    message: ToConsolidator


@dataclass(frozen=True, slots=True)
class OfferEnded:
    """The engine may free what it offered."""

    offer: int
    stored: int
    complete: bool = False
    """All of it is in the host tier now: stored, or there before."""


Effect = ToHost | ToEvents | OfferEnded


@dataclass(frozen=True, slots=True)
class ConnectorLimits:
    """Every bound of the core."""

    lease_ms: int = 5_000
    onboard_deadline_ms: int = 2_000
    answer_margin_ms: int = 500
    """The time after its deadline in which an answer may still arrive."""
    offer_deadline_ms: int = 5_000
    offers_max: int = 256
    """Offers in flight; further blocks are not offered, and counted."""
    avoid_ms: int = 60_000
    avoid_max: int = 65_536

    def __post_init__(self) -> None:
        """Assert that nothing waits without end for a bound of zero."""
        assert min(self.lease_ms, self.onboard_deadline_ms, self.offer_deadline_ms) > 0, self
        assert min(self.answer_margin_ms, self.avoid_ms) >= 0, self
        assert min(self.offers_max, self.avoid_max) >= 0, self

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """Return what the configuration bounds; the rest by default."""
        return cls(
            lease_ms=settings.lease_ms,
            onboard_deadline_ms=settings.onboard_deadline_ms,
            offer_deadline_ms=settings.offer_deadline_ms,
        )
