"""The checkers: what must hold at each moment, and when everything has come to rest."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from kvbm_common.identity import Namespace, SequenceHash
from kvbm_common.tier.slots import Block
from kvbm_common.wire.events import Cleared, Event, Stored
from kvbm_connectors.core.messages import ConnectorLimits
from kvbm_host_tier.core.messages import PullPart

from tests.sim.memory import ROT, Memory, right, right_cells, right_checksum, units_of

Contents = Mapping[SequenceHash, tuple[bytes, ...]]
"""By block, what each rank's part of it holds."""


class Violation(AssertionError):
    """The product has broken a promise."""


def require(good: bool, text: str) -> None:
    """Raise Violation unless `good`."""
    if not good:
        raise Violation(text)


class Announced:
    """The events of one process, over all its lives."""

    def __init__(self) -> None:
        self._position: dict[str, tuple[int, int]] = {}

    def aged(self, source: str, epoch: int, seq: int) -> None:
        """Expect the events of a source to go on after this number."""
        self._position[source] = epoch, seq

    def take(self, event: Event) -> None:
        """Check an event: epochs only grow and begin with `cleared`; numbers have no hole."""
        epoch, seq = self._position.get(event.source, (0, 0))
        fresh = event.epoch > epoch and event.seq == 1 and isinstance(event, Cleared)
        if not fresh and (event.epoch, event.seq) != (epoch, seq + 1):
            text = f"{event.source} published {event.epoch}/{event.seq} after {epoch}/{seq}"
            raise Violation(text)
        self._position[event.source] = (event.epoch, event.seq)


def contents(blocks: Mapping[int, Block], memory: Memory) -> dict[SequenceHash, tuple[bytes, ...]]:
    """Return what is truly in the place of each block that can be found."""
    return {one.hash: memory.content(place, units_of(one.bytes)) for place, one in blocks.items()}


def check_content(name: SequenceHash, rank: int, content: bytes, where: str) -> None:
    """Require the right bytes in one rank's part of a block."""
    if content != right(name, rank):
        text = f"rank {rank} of {where} should hold {name.hex()}"
        raise Violation(f"{text}, holds {content!r} ({content.hex()})")


def check_contents(found: Contents, where: str) -> None:
    """Require the right bytes in a whole tier, but for what the world has rotted."""
    for name, cells in found.items():
        if cells == right_cells(name, len(cells)):
            continue
        for part, content in enumerate(cells):
            if not content.startswith(ROT):
                check_content(name, part, content, where)


def check_stored(
    event: Stored, found: Contents | None, part_count: int, gone: Collection[str] = ()
) -> None:
    """Require that what is announced is committed, and that what is committed is right.

    Blocks in `gone` were evicted by the step that has announced them.
    """
    if found is None or event.tier == "device":
        return
    for run in event.runs:
        for text in run.hashes:
            if text in gone:
                continue
            cells = found.get(SequenceHash(bytes.fromhex(text)))
            if cells is None:
                raise Violation(f"{event.source} announced {text} before its commit")
            if len(cells) != part_count:
                raise Violation(f"{text} has {len(cells)} parts")
    check_contents(found, event.source)


def check_sums(blocks: Iterable[Block], part_count: int, where: str) -> None:
    """Require of each committed block the checksum of its name's content: a wrong one would make
    good bytes look bad, or bad ones good."""
    for block in blocks:
        if block.checksum != right_checksum(block.hash, part_count):
            raise Violation(f"{where} has a wrong checksum of {block.hash.hex()}")


def check_found(blocks: Iterable[Block], namespaces: Iterable[Namespace], where: str) -> None:
    """Require of the blocks that an engine is given slots of that they are in its namespaces."""
    digests = {namespace.digest for namespace in namespaces}
    for block in blocks:
        if block.namespace not in digests:
            raise Violation(f"{where} is given {block.hash.hex()} of another namespace")


def check_denied(
    denied: Sequence[SequenceHash], absent: Sequence[SequenceHash], where: str
) -> None:
    """Require of names of which a miss filter denies one that a lookup would not find one."""
    text = ", ".join(name.hex() for name in denied)
    require(bool(absent), f"the filter of {where} denies {text}: a lookup finds it")


def check_pulled(pulled: Sequence[PullPart], where: str) -> None:
    """Require that each part of a block is pulled once: of ranks that hold the same, from one."""
    held = [part for one in pulled for part in one.share.parts]
    right_parts = list(range(pulled[0].share.grid.count))
    require(sorted(held) == right_parts, f"{where} is pulled from for parts {sorted(held)}")


def check_corrupt(seen: Iterable[bytes]) -> None:
    """Require that a checksum finds only what the world has rotted: our own mistakes are no
    accidents."""
    for content in seen:
        if not content.startswith(ROT):
            raise Violation(f"a checksum was needed against {content!r}")


def check_corrupt_block(name: SequenceHash, cells: Sequence[bytes]) -> None:
    """Require the same of a block of which some part is wrong."""
    check_corrupt(c for part, c in enumerate(cells) if c != right(name, part))


def check_patience(limits: ConnectorLimits, asked_ms: float, now_ms: float) -> None:
    """Require that an engine is told to ask again only for so long."""
    limit_ms = limits.onboard_deadline_ms + limits.answer_margin_ms
    require(now_ms - asked_ms <= limit_ms + 1, f"no answer after {now_ms - asked_ms:.0f} ms")


def check_request_time(took_ms: float, limit_ms: float) -> None:
    """Require that requests finish."""
    require(took_ms <= limit_ms, f"a request took {took_ms:.0f} ms")
