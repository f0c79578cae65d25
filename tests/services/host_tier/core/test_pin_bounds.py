"""Pins of hints never keep a tier from taking blocks: their bound against a model, and at the core.

The model knows no slots: it counts names, and goes through all sessions at every question.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from kvbm_common.eviction import make_policy
from kvbm_common.identity import Namespace, of_tenant, pack_hashes
from kvbm_common.tier.layout import Layout
from kvbm_common.tier.slots import Block, SlotTable
from kvbm_common.wire.admin import ResizeReply, ResizeRequest
from kvbm_common.wire.session_hint import SessionHint
from kvbm_common.wire.verbs import ErrorBody
from kvbm_host_tier.core.messages import AdminAsked, Answer, StartPull
from kvbm_host_tier.core.session_pins import SessionPins

from tests.libs.helpers import make_room
from tests.services.host_tier.core.test_sizes import LARGE_BYTES, SLAB_UNITS, attach, found, store
from tests.services.host_tier.helpers import NAMESPACE, Host, incarnation, name, of

SPACES = {tenant: of_tenant(NAMESPACE, tenant).digest for tenant in ("gold", "tin", "zinc")}
SLOTS, PART = 12, 0.5
BLOCKS = st.integers(1, 15)
HOUR_MS = 3_600_000


def tenant_of(number: int) -> str:
    """Blocks 1 to 5 are gold's, 6 to 10 tin's, 11 to 15 zinc's."""
    return ("gold", "tin", "zinc")[(number - 1) // 5]


@dataclass
class Pinning:
    """What the model knows of a session."""

    tenant: str
    numbers: list[int]
    until_ms: int
    is_pinning: bool = True


class BoundedPins(RuleBasedStateMachine):
    """Three tenants with two sessions each, in a tier that grows and shrinks."""

    def __init__(self) -> None:
        super().__init__()
        self.table = SlotTable(Layout.of(4096, SLOTS), partial(make_policy, "lru"))
        self.counts = Counter[str]()
        self.pins = SessionPins(self.table, self.counts, part_max=PART)
        self.now_ms, self.usable = 1, SLOTS
        self.sessions: dict[str, Pinning] = {}
        """Those with the oldest hint first."""
        self.holders: dict[int, list[str]] = {}
        self.awaited: dict[int, list[str]] = {}
        self.expected = Counter[str]()

    # --- the model --------------------------------------------------------------------------

    def here(self, tenant: str) -> list[int]:
        """The blocks of a tenant that can be found."""
        return [one for one in range(1, 16)
                if tenant_of(one) == tenant and self.table.find(name(one)) is not None]  # fmt: skip

    def used(self, tenant: str = "") -> int:
        """How many blocks of a tenant, or of all, are pinned."""
        return sum(1 for one in self.holders if tenant in ("", tenant_of(one)))

    def bound(self, tenant: str) -> float:
        """Half of the tenant's equal share among those with blocks."""
        return PART * self.usable / len({one for one in SPACES if self.here(one)} | {tenant})

    def trim(self) -> None:
        """Sessions yield, oldest first, until each tenant is within its bound."""
        for key, session in list(self.sessions.items()):
            if session.is_pinning and self.used(session.tenant) > self.bound(session.tenant):
                self.end(key)
                self.expected["hint_pins_yielded.share"] += 1

    def end(self, key: str) -> None:
        """A session pins nothing any more."""
        self.sessions[key].is_pinning = False
        self.let_go(key, self.sessions[key].numbers)

    def let_go(self, key: str, numbers: Iterable[int]) -> None:
        """A session pins these no more."""
        for number in numbers:
            for table in (self.holders, self.awaited):
                if key in table.get(number, ()):
                    table[number].remove(key)
                    if not table[number]:
                        del table[number]

    def takes(self, key: str, number: int) -> bool:
        """A session pins a block, or awaits it; False: it is refused."""
        tenant = tenant_of(number)
        if number in self.holders:
            if tenant == self.sessions[key].tenant and key not in self.holders[number]:
                self.holders[number].append(key)
        elif number not in self.here(tenant):
            if key not in self.awaited.setdefault(number, []):
                self.awaited[number].append(key)
        elif tenant == self.sessions[key].tenant:
            bound = self.bound(tenant)
            for older, session in list(self.sessions.items()):
                if older == key or self.used(tenant) + 1 <= bound:
                    break
                if session.tenant == tenant and session.is_pinning:
                    self.end(older)
                    self.expected["hint_pins_yielded.newer"] += 1
            if self.used(tenant) + 1 > bound:
                return False
            if self.used() + 1 > PART * self.usable:
                self.trim()
            if self.used() + 1 > PART * self.usable:
                return False
            self.holders[number] = [key]
        return True

    # --- what happens -----------------------------------------------------------------------

    @rule(number=BLOCKS)
    def come(self, number: int) -> None:
        """A block is committed, perhaps in place of others."""
        if self.table.find(name(number)) is not None:
            return
        namespace = SPACES[tenant_of(number)]
        make_room(self.table, 1, 64, namespace)
        slot = self.table.stage(name(number), 64)
        if slot is None:
            return  # The tenant is above its share, and has nothing that may leave.
        self.table.register(slot, Block(name(number), name(0), namespace, 1, 64))
        for key in self.awaited.pop(number, []):
            if self.sessions[key].is_pinning and not self.takes(key, number):
                self.expected["hint_blocks_refused"] += 1
        self.pins.arrived([name(number)])

    @rule(number=BLOCKS)
    def leave(self, number: int) -> None:
        """A block turns out to be wrong."""
        self.pins.left([name(number)])
        self.table.discard(name(number))
        if number in self.holders:
            self.awaited[number] = self.holders.pop(number)

    @rule(tenant=st.sampled_from(list(SPACES)), which=st.sampled_from("ab"),
          numbers=st.lists(BLOCKS, unique=True, max_size=7), ttl_ms=st.integers(1, 6))  # fmt: skip
    def pin(self, tenant: str, which: str, numbers: list[int], ttl_ms: int) -> None:
        """A session pins these blocks, some perhaps another's."""
        key = tenant + which
        known = self.sessions.pop(key, None)
        before = known.numbers if known and known.is_pinning else []
        self.let_go(key, [number for number in before if number not in numbers])
        self.sessions[key] = Pinning(tenant, numbers, self.now_ms + ttl_ms)
        for place, number in enumerate(numbers):
            if not self.takes(key, number):
                self.expected["hint_blocks_refused"] += len(numbers) - place
                break
        self.pins.pin(
            (SPACES[tenant], key), [name(number) for number in numbers],
            frozenset([SPACES[tenant]]), self.now_ms + ttl_ms,
        )  # fmt: skip

    @rule(ms=st.integers(1, 4))
    def wait(self, ms: int) -> None:
        """Time passes."""
        self.now_ms += ms
        self.trim()
        for key, session in self.sessions.items():
            if session.is_pinning and session.until_ms <= self.now_ms:
                self.end(key)
                self.expected["hint_pins_expired"] += 1
        self.pins.tick(self.now_ms)
        assert self.used() <= PART * self.usable

    @rule(count=st.integers(1, 6))
    def shrink(self, count: int) -> None:
        """An operator makes the tier smaller, by slots that are free."""
        self.usable -= self.table.retire(min(count, self.usable - 2))

    @rule(count=st.integers(1, 6))
    def grow(self, count: int) -> None:
        """An operator makes it larger again."""
        self.usable += self.table.revive(min(count, SLOTS - self.usable))

    @invariant()
    def agrees(self) -> None:
        """The same blocks are pinned, and as much was refused, has yielded and has ended."""
        self.table.check()
        self.pins.check()
        pinned = {int.from_bytes(self.table.block(slot).hash, "big") for slot in self.pins.slots()}
        assert pinned == set(self.holders)
        yielded = ("hint_pins_yielded.newer", "hint_pins_yielded.share")
        for what in ("hint_blocks_refused", "hint_pins_expired", *yielded):
            assert self.counts[what] == self.expected[what], what
        assert self.pins.usage().used == 4096 * len(pinned)


TestBoundedPins = BoundedPins.TestCase


def test_a_block_that_another_tenant_has_pinned_is_not_kept_by_this_one() -> None:
    """Goal: who knows another tenant's names does not hold that tenant's share after its pin."""
    machine = BoundedPins()
    machine.come(number=1)
    machine.pin(tenant="gold", which="a", numbers=[1], ttl_ms=2)
    machine.pin(tenant="tin", which="a", numbers=[1], ttl_ms=5)
    machine.wait(ms=2)
    assert list(machine.pins.slots()) == []


# --- at the core ----------------------------------------------------------------------------------


def pin(
    host: Host, *wanted: int, engine: str = "ada", namespace: Namespace = NAMESPACE,
    session: str = "s", action: Any = "pin", ttl_ms: int = HOUR_MS,
) -> None:  # fmt: skip
    """A session pins for an hour, if nothing else is wanted."""
    host.say(
        SessionHint(
            engine=engine, incarnation=incarnation(1), namespace=namespace.digest, session=session,
            action=action, hashes=pack_hashes(map(name, wanted)),
            ttl_ms=ttl_ms if action == "pin" else 0,
        )
    )  # fmt: skip


def count(host: Host, key: str) -> int:
    """A counter of the core."""
    return host.core.view.counts.get(key, 0)


def resize(host: Host, slots: int) -> ResizeReply | ErrorBody:
    """An operator makes the tier smaller or larger."""
    [answer] = of(host.step(AdminAsked(1, "resize", ResizeRequest(slots=slots))), Answer)
    assert isinstance(answer.reply, ResizeReply | ErrorBody)
    return answer.reply


def come(host: Host, engine: str, namespace: Namespace, *wanted: int) -> None:
    """The whole offload path of a tenant's blocks, one by one."""
    for number in wanted:
        host.store_for(number, engine=engine, namespace=namespace)


def test_tenants_that_come_one_after_the_other_pin_no_more_than_the_part_of_all() -> None:
    """40 % of 30 slots are 12, whoever comes: the first tenants' oldest sessions yield."""
    host = Host(slots=30)
    for place in range(7):
        tenant, first = of_tenant(NAMESPACE, f"t{place}"), 100 * (place + 1)
        host.attach(engine=f"e{place}", namespace=tenant)
        come(host, f"e{place}", tenant, *range(first, first + 12))
        for number in range(first, first + 12):
            pin(host, number, engine=f"e{place}", namespace=tenant, session=str(number))
        assert host.slots["active"] <= 12
    host.wait(1)
    figures = host.core.view.statistics(host.now_ms).figures
    assert figures["hint_pinned_bytes"] == host.slots["active"] * 4096 > 0
    assert count(host, "hint_pins_yielded.share") > 0


def test_a_block_of_another_size_finds_room_after_pins() -> None:
    """Ada's sessions pin one block in each of four slabs for an hour: that of one slab yields."""
    host = Host(slots=4 * SLAB_UNITS, slab_bytes=SLAB_UNITS * 4096)
    store(host, *range(1, 4 * SLAB_UNITS + 1), engine="ada")
    for slab in range(4):
        pin(host, 1 + slab * SLAB_UNITS, session=f"s{slab}")
    attach(host, "eve", LARGE_BYTES)
    store(host, 101, engine="eve")
    assert len(found(host, 101, engine="eve").slots) == 1
    assert (host.slots["active"], count(host, "hint_pins_yielded.room")) == (3 + 1, 1)


def test_a_smaller_tier_ends_pins_and_keeps_their_part() -> None:
    """Ten slots, four pinned, become two: of two none may be pinned, and the next block comes."""
    host = Host(slots=10)
    host.store(*range(1, 11))
    for number in (1, 2, 3, 4):
        pin(host, number, session=str(number))
    reply = resize(host, 2)
    assert isinstance(reply, ResizeReply)
    assert reply.slots == 2
    host.wait(1)
    assert host.slots["active"] == 0
    host.store(20)
    assert 20 in host.announced


def test_no_pin_ends_while_slots_are_read_or_filled() -> None:
    """The others are leased by lookups, or being filled: they are free soon."""
    host = Host(slots=5)
    host.store(1, 2, 3, 4, 5)
    pin(host, 1, session="older")
    pin(host, 2)
    host.look_up(3, 4)
    assert of(host.offer(20), StartPull)
    host.store(21)
    assert 21 not in host.announced
    assert (host.slots["active"], count(host, "hint_pins_yielded.room")) == (4, 0)


def test_the_oldest_session_yields_to_a_newer_one_of_its_tenant() -> None:
    """Two of five slots may be pinned. The oldest has 1, the next one 2, and the last takes 3."""
    host = Host(slots=5)
    host.store(1, 2, 3)
    for number in (1, 2, 3):
        pin(host, number, session=str(number))
    assert (host.slots["active"], count(host, "hint_pins_yielded.newer")) == (2, 1)
    for number in range(20, 30):
        host.store(number)
    assert {2, 3} <= host.announced
    assert 1 not in host.announced


def test_a_block_that_comes_late_does_not_end_the_pins_of_newer_sessions() -> None:
    """The older session awaits 3; when it comes, the newer ones keep what they have."""
    host = Host(slots=5)
    host.store(1, 2)
    pin(host, 3, session="older")
    pin(host, 1, 2, session="newer")
    host.store(3)
    refused = count(host, "hint_blocks_refused")
    assert (host.slots["active"], refused, count(host, "hint_pins_yielded.newer")) == (2, 1, 0)


def test_a_refused_pin_is_counted_and_its_bound_is_seen() -> None:
    """Two of five slots may be pinned."""
    host = Host(slots=5)
    host.store(1, 2, 3)
    pin(host, 1, 2, 3)
    usage = host.core.view.usages(host.now_ms)["hinted"]
    assert (usage.used, usage.size, usage.dropped) == (2 * 4096, 2 * 4096, 1)


def test_a_session_that_ends_leaves_what_another_has_although_that_pins_nothing() -> None:
    """1 is the system prompt of both, and stays when 2 leaves first."""
    host = Host(slots=4)
    host.store(1, 2)
    pin(host, 1, session="t", ttl_ms=1)
    host.wait(1)
    pin(host, 1, 2, action="demote")
    assert count(host, "hint_blocks_demoted") == 1


HINTS = st.lists(
    st.tuples(st.sampled_from(["pin", "demote", "resize", "store"]), st.integers(0, 2),
              st.integers(1, 12), st.integers(1, 12)),
    max_size=25,
)  # fmt: skip


@settings(deadline=None, max_examples=40)
@given(HINTS)
@example([("pin", 0, 1, 1), ("pin", 1, 1, 1), ("store", 0, 1, 1), ("store", 1, 1, 1),
          ("resize", 2, 1, 1)])  # fmt: skip
def test_whatever_is_pinned_the_next_block_is_taken(
    steps: list[tuple[str, int, int, int]],
) -> None:
    """Three tenants pin and demote for an hour, and the tier grows and shrinks."""
    host = Host(slots=12, hint_pin_percent=45.0)
    tenants = [of_tenant(NAMESPACE, f"t{place}") for place in range(3)]
    for place, tenant in enumerate(tenants):
        host.attach(engine=f"e{place}", namespace=tenant)
    new = 1_000
    for what, place, first, length in steps:
        engine, tenant = f"e{place}", tenants[place]
        numbers = range(100 * place + first, 100 * place + first + length)
        if what == "resize":
            resize(host, max(2, length))
        elif what == "store":
            come(host, engine, tenant, *numbers)
        else:
            pin(host, *numbers, engine=engine, namespace=tenant, session=str(first), action=what)
        new += 1
        come(host, engine, tenant, new)
        assert new in host.announced, (what, place, first, length)
