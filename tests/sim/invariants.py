"""The checkers: what must hold at each moment, and when everything has come to rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvbm_common.identity import SequenceHash
from kvbm_common.slots import SlotTable
from kvbm_common.wire.events import Cleared, Event, Stored
from kvbm_connectors.core import Limits

from tests.sim.memory import ROT, Memory


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

    def take(self, event: Event) -> None:
        """Epochs only grow and begin with `cleared`; numbers have no hole."""
        epoch, seq = self._position.get(event.source, (0, 0))
        fresh = event.epoch > epoch and event.seq == 1 and isinstance(event, Cleared)
        text = f"{event.source} published {event.epoch}/{event.seq} after {epoch}/{seq}"
        require(fresh or (event.epoch, event.seq) == (epoch, seq + 1), text)
        self._position[event.source] = (event.epoch, event.seq)


def contents(table: SlotTable, memory: Memory) -> dict[SequenceHash, bytes]:
    """What is truly in the slot of each block that can be found."""
    found = {block.hash: table.find(block.hash) for block in table.blocks()}
    return {name: memory.slots[slot] for name, slot in found.items() if slot is not None}


def check_content(name: SequenceHash, content: bytes, where: str) -> None:
    """No wrong bytes."""
    if content != name:
        raise Violation(f"{where} should hold {name.hex()}, holds {content!r} ({content.hex()})")


def check_contents(found: Mapping[SequenceHash, bytes], where: str) -> None:
    """No wrong bytes in a whole tier."""
    for name, content in found.items():
        if not content.startswith(ROT):
            check_content(name, content, where)


def check_stored(event: Stored, found: Mapping[SequenceHash, bytes] | None) -> None:
    """Nothing is announced before it is committed, and what is committed is right."""
    if found is None or event.tier == "device":
        return
    for run in event.runs:
        for text in run.hashes:
            name = SequenceHash(bytes.fromhex(text))
            require(name in found, f"{event.source} announced {text} before its commit")
    check_contents(found, event.source)


def check_corrupt(seen: Sequence[bytes]) -> None:
    """A checksum may only find what the world has rotted: our own mistakes are no accidents."""
    for content in seen:
        require(content.startswith(ROT), f"a checksum was needed against {content!r}")


def check_patience(limits: Limits, asked_ms: float, now_ms: float) -> None:
    """An engine is told to ask again only for so long."""
    limit_ms = limits.onboard_deadline_ms + limits.answer_margin_ms
    require(now_ms - asked_ms <= limit_ms + 1, f"no answer after {now_ms - asked_ms:.0f} ms")


def check_request_time(took_ms: float, limit_ms: float) -> None:
    """Requests finish."""
    require(took_ms <= limit_ms, f"a request took {took_ms:.0f} ms")
