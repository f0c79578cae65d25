"""Pins of sessions against a model: who pins what, within the bound, whatever blocks do."""

from __future__ import annotations

from collections import Counter
from functools import partial

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from kvbm_common.eviction import make_policy
from kvbm_common.identity import SequenceHash
from kvbm_common.tier.layout import Layout
from kvbm_common.tier.slots import Block, SlotTable
from kvbm_host_tier.core.session_pins import SessionPins

from tests.libs.helpers import make_room

NAMESPACE, OTHER = bytes(32), bytes(31) + b"x"
SLOTS, PINNED_MAX = 10, 4
BLOCKS = st.integers(1, 12)


def name(number: int) -> SequenceHash:
    """Block 7 is called 0…07."""
    return SequenceHash(number.to_bytes(16, "big"))


class Pins(RuleBasedStateMachine):
    """Blocks that come and leave, and three sessions; odd blocks from 9 on are another's."""

    def __init__(self) -> None:
        super().__init__()
        self.table = SlotTable(Layout.of(4096, SLOTS), partial(make_policy, "lru"))
        self.pins = SessionPins(self.table, Counter(), part_max=PINNED_MAX / SLOTS)
        self.now_ms = 1
        self.until: dict[str, int] = {}
        self.wanted: dict[str, set[int]] = {}

    @rule(number=BLOCKS)
    def come(self, number: int) -> None:
        """A block is committed, perhaps in place of others."""
        if self.table.find(name(number)) is not None:
            return
        make_room(self.table, 1, 64)
        slot = self.table.stage(name(number), 64)
        assert slot is not None, "sessions pin all of the medium"
        namespace = OTHER if number in (9, 11) else NAMESPACE
        self.table.register(slot, Block(name(number), name(0), namespace, 1, 64))
        self.pins.arrived([name(number)])

    @rule(number=BLOCKS)
    def leave(self, number: int) -> None:
        """A block turns out to be wrong."""
        self.pins.left([name(number)])
        self.table.discard(name(number))
        assert self.table.find(name(number)) is None

    @rule(session=st.sampled_from("abc"), numbers=st.lists(BLOCKS, unique=True, max_size=6),
          ttl_ms=st.integers(1, 5))  # fmt: skip
    def pin(self, session: str, numbers: list[int], ttl_ms: int) -> None:
        """A session pins these blocks, and no others."""
        names = [name(number) for number in numbers]
        self.pins.pin((NAMESPACE, session), names, frozenset([NAMESPACE]), self.now_ms + ttl_ms)
        self.until[session], self.wanted[session] = self.now_ms + ttl_ms, set(numbers)

    @rule(session=st.sampled_from("abc"))
    def unpin(self, session: str) -> None:
        """A session needs its blocks no longer."""
        self.pins.unpin((NAMESPACE, session))
        self.until.pop(session, None)

    @rule(ms=st.integers(1, 4))
    def wait(self, ms: int) -> None:
        """Time passes."""
        self.now_ms += ms
        self.pins.tick(self.now_ms)
        self.until = {one: until for one, until in self.until.items() if until > self.now_ms}

    @invariant()
    def holds(self) -> None:
        """Only what a session wants now is pinned, its own blocks alone, within the bound."""
        self.table.check()
        self.pins.check()
        slots = self.pins.slots()
        assert self.table.pins() == dict.fromkeys(slots, 1)
        assert len(slots) <= PINNED_MAX
        pinning = [one for one in self.until if self.is_pinning(one)]
        wanted = set[int]().union(*(self.wanted[session] for session in pinning))
        pinned = {int.from_bytes(self.table.block(slot).hash, "big") for slot in slots}
        assert pinned <= wanted - {9, 11}
        if len(wanted) <= PINNED_MAX and not self.refused_before():
            here = {one for one in wanted - {9, 11} if self.table.find(name(one)) is not None}
            assert pinned == here

    def is_pinning(self, session: str) -> bool:
        """Whether it has not yielded to a newer session."""
        known = self.pins.find((NAMESPACE, session))
        return known is not None and known.is_pinning

    def refused_before(self) -> bool:
        """Whether a block was beyond the bound once: it stays ordinary until the next hint."""
        return any(len(numbers) > 1 for numbers in self.wanted.values())


TestPins = Pins.TestCase
