"""Blocks that are discarded while a lookup waits: no answer leases them, whoever discarded them.

Block 1 is here, block 2 on the disk: a lookup of both has pinned 1, and waits for 2.
"""

from __future__ import annotations

import random

import pytest
from kvbm_common.tier.kv_groups import GroupRun
from kvbm_common.wire.admin import PrefetchReply, PrefetchRequest, RemoveReply, RemoveRequest
from kvbm_common.wire.local import Found, Pulled
from kvbm_host_tier.core.messages import AdminAsked, Answer, AskFill, Effect, StartPull

from tests.services.host_tier.helpers import (
    LOOKUP_MS,
    Host,
    asked,
    name,
    of,
)

BLOCKS = range(1, 9)
SEEDS = 200


def reset(host: Host, *wanted: int) -> list[Effect]:
    """An operator resets blocks."""
    request = RemoveRequest(hashes=[name(number).hex() for number in wanted])
    effects = host.step(AdminAsked(5, "reset", request))
    assert isinstance(of(effects, Answer)[0].reply, RemoveReply)
    return effects


def corrupt(host: Host, number: int) -> None:
    """A worker of bob's reads a block, and its checksum is another."""
    found = host.found(host.look_up(number, engine="bob"))
    host.release(found.lease, 0, engine="bob")


def waiting(*, slots: int = 8) -> tuple[Host, AskFill]:
    """Return a host tier with a lookup of 1 and 2 that waits for 2."""
    host = Host(slots=slots)
    host.attach(engine="bob")
    host.store(1)
    host.disk_stored(2)
    [fill] = of(host.look_up(1, 2, request="r"), AskFill)
    return host, fill


def test_a_block_that_was_reset_while_a_lookup_waits_is_not_served() -> None:
    """The run ends before it, nothing stays pinned, and the explanation names the operator."""
    host, fill = waiting()
    reset(host, 1)
    found = host.found(host.filled(fill))
    assert (found.slots, found.lease, found.reason) == ([], 0, "removed")
    assert host.slots["active"] == 0
    [told] = host.core.view.explanations("r")
    assert [(s.blocks, s.tier, s.reason) for s in told.segments] == [
        (1, "host", "removed"), (1, "host", "behind"),
    ]  # fmt: skip


def test_a_block_that_was_found_corrupt_while_a_lookup_waits_is_not_served() -> None:
    host, fill = waiting()
    corrupt(host, 1)
    found = host.found(host.filled(fill))
    assert (found.slots, found.reason, host.slots["active"]) == ([], "corrupt", 0)
    [told] = host.core.view.explanations("r")
    assert [(s.tier, s.reason) for s in told.segments] == [("host", "corrupt"), ("host", "behind")]


def test_the_blocks_before_a_discarded_one_are_served() -> None:
    """Also at the deadline, when the fill has not come."""
    host = Host(slots=8)
    host.store(1, 2, 3)
    host.disk_stored(4)
    host.look_up(1, 2, 3, 4)
    reset(host, 2)
    found = host.found(host.wait(LOOKUP_MS))
    assert (found.slots, found.reason) == ([host.slot_of(1)], "removed")
    assert host.slots["active"] == 1


def test_a_block_that_came_back_is_another_one() -> None:
    """It was reset and stored again while the lookup waits, which has the old one's slot."""
    host, fill = waiting()
    reset(host, 1)
    host.store(1)
    assert host.found(host.filled(fill)).slots == []
    assert len(host.found(host.look_up(1, 2)).slots) == 2


def test_a_hit_over_groups_falls_back_before_a_discarded_block() -> None:
    """1, 2, 11 are here, 12 comes from disk: 2 is reset, so the hit has four tokens."""
    host = Host(slots=8)
    host.store(1, 2)
    host.store(11)
    host.disk_stored(12)
    groups = [GroupRun(4, 2), GroupRun(4, 2, 1)]
    [fill] = of(host.look_up(1, 2, 11, 12, groups=groups), AskFill)
    reset(host, 2)
    found = host.found(host.filled(fill))
    assert (found.boundary, found.reason) == (4, "removed")
    assert found.slots == [host.slot_of(1), host.slot_of(11)]
    assert host.slots["active"] == 2


def test_a_prefetch_does_not_count_a_discarded_block() -> None:
    host = Host(slots=8)
    host.store(1)
    host.disk_stored(2)
    request = PrefetchRequest(hashes=[name(1).hex(), name(2).hex()], deadline_ms=100)
    [fill] = of(host.step(AdminAsked(4, "prefetch", request)), AskFill)
    reset(host, 1)
    [answer] = of(host.filled(fill), Answer)
    assert answer.reply == PrefetchReply(blocks=0, filled=0, reason="removed")
    assert host.slots["active"] == 0


class Operator:
    """A host tier, lookups of two engines, fills, and an operator, in an order that a seed draws.

    The disk keeps what was reset in host memory. Whatever is served can be found when it is.
    """

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.host = Host(slots=16, batch_blocks_max=2)
        self.host.attach(engine="bob")
        self.fills: list[AskFill] = []
        self.leases: list[tuple[str, int]] = []
        self.engines: dict[int, str] = {}

    def some(self) -> list[int]:
        """Return consecutive blocks."""
        first = self.draw.choice(BLOCKS)
        return [*BLOCKS][first - 1 : first - 1 + self.draw.randint(1, 5)]

    def take(self, effects: list[Effect]) -> None:
        self.fills += of(effects, AskFill)
        here = self.host.core.view.blocks()
        for found in of(self.host.told(effects), Found):
            gone = [slot for slot in found.slots if slot not in here]
            assert not gone, f"slots {gone} hold no block that can be found, and are served"
            served = {int.from_bytes(here[slot].hash, "big") for slot in found.slots}
            assert served <= self.host.announced
            if found.lease:
                self.leases.append((self.engines[found.lookup], found.lease))

    def act(self) -> None:
        """Do one thing."""
        host, draw = self.host, self.draw
        match draw.choice(["store", "disk", "look", "look", "reset", "corrupt", "fill", "wait"]):
            case "store":
                self.offload(host.offer(*self.some()))
            case "disk":
                host.disk_stored(*self.some())
            case "look":
                engine, lookup = draw.choice(["ada", "bob"]), 1_000 + len(self.engines)
                self.engines[lookup] = engine
                self.take(host.look_up(*self.some(), engine=engine, lookup=lookup))
            case "reset":
                self.take(reset(host, *self.some()))
            case "corrupt" if self.leases:
                engine, lease = self.leases.pop(draw.randrange(len(self.leases)))
                host.release(lease, 0, engine=engine)
            case "fill" if self.fills:
                fill = self.fills.pop(draw.randrange(len(self.fills)))
                missing = asked(fill)[draw.choice([1, 2]) :]
                self.take(host.filled(fill, *missing))
            case _:
                self.take(host.beat())
                self.take(host.wait(draw.choice([1, LOOKUP_MS])))

    def offload(self, effects: list[Effect]) -> None:
        """Bring every block in that there is room for."""
        host = self.host
        for pull in of(effects, StartPull):
            self.offload(host.pulled(pull))
        for pulled in of(host.told(effects), Pulled):
            if pulled.confirm:
                host.confirm(pulled.offer)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_no_lookup_is_served_a_block_that_cannot_be_found(seed: int) -> None:
    operator = Operator(seed)
    for _ in range(60):
        operator.act()


def test_a_known_run_whose_first_block_is_discarded_while_its_lookup_waits_is_empty() -> None:
    """1 was answered before, and is found corrupt while 2 comes from disk."""
    host = Host(stretch_blocks=1)
    host.store(1)
    host.disk_stored(2)
    lease = host.found(host.look_up(1)).lease
    [fill] = of(host.look_up(1, 2), AskFill)
    host.release(lease, 0)
    found = host.found(host.filled(fill))
    assert (found.lease, found.slots, found.reason) == (0, [], "corrupt")
