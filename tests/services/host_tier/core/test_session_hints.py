"""Hints of agents in a host tier: pins with a time, blocks that leave first, prefetches."""

from __future__ import annotations

from typing import Any

import pytest
from kvbm_common.identity import Namespace, of_tenant, pack_hashes
from kvbm_common.wire.bounds import Usage
from kvbm_common.wire.local import Found, Refused
from kvbm_common.wire.session_hint import SessionHint
from kvbm_host_tier.core import late_demotions, session_pins
from kvbm_host_tier.core.late_demotions import LATE_MS
from kvbm_host_tier.core.messages import Answer, AskFill, Effect, TellHits
from kvbm_host_tier.core.session_pins import SESSIONS_MAX

from tests.services.host_tier.helpers import NAMESPACE, Host, incarnation, name, numbers, of

TTL_MS = 60_000
GOLD = of_tenant(NAMESPACE, "gold")


def hint(
    host: Host, action: Any, *wanted: int, session: str = "s", ttl_ms: int = TTL_MS,
    engine: str = "ada", namespace: Namespace = NAMESPACE,
) -> list[Effect]:  # fmt: skip
    """Say what becomes of a session's blocks; there is no answer."""
    effects = host.say(
        SessionHint(
            engine=engine, incarnation=incarnation(1), namespace=namespace.digest, session=session,
            action=action, hashes=pack_hashes(name(one) for one in wanted),
            ttl_ms=ttl_ms if action == "pin" else 0,
        )
    )  # fmt: skip
    assert not of(effects, Answer)
    return effects


def count(host: Host, key: str) -> int:
    """A counter of the core."""
    return host.core.view.counts.get(key, 0)


def test_a_pinned_session_survives_noise_until_its_time_has_passed() -> None:
    """Ten slots: 1, 2 are pinned, and 3 to 22 come; then 1, 2 are as others."""
    host = Host(slots=10)
    host.store(1, 2)
    hint(host, "pin", 1, 2)
    for number in range(3, 23):
        host.store(number)
    assert {1, 2} <= host.announced
    host.wait(TTL_MS - 1)
    host.beat()
    assert host.slots["active"] == 2
    host.wait(1)
    assert (host.slots["active"], count(host, "hint_pins_expired")) == (0, 1)


def test_blocks_that_come_later_are_pinned_when_they_come() -> None:
    """The hint is faster than the offer of the same request."""
    host = Host(slots=10)
    hint(host, "pin", 1, 2)
    assert host.slots["active"] == 0
    host.store(1, 2, 3)
    assert host.slots["active"] == 2


def test_a_pin_holds_at_most_its_part_of_the_medium() -> None:
    """40 % of ten slots are four: of six blocks two are refused. A newer session takes a place."""
    host = Host(slots=10)
    host.store(1, 2, 3, 4, 5, 6)
    hint(host, "pin", 1, 2, 3, 4, 5, 6)
    assert (host.slots["active"], count(host, "hint_blocks_refused")) == (4, 2)
    hint(host, "pin", 6, session="t")
    assert (host.slots["active"], count(host, "hint_blocks_refused")) == (1, 2)


def test_a_tenants_pins_are_bounded_by_its_share_and_touch_its_own_blocks() -> None:
    """Two tenants with a share of ten slots each: each may pin four."""
    host = Host(slots=20)
    host.attach(engine="eve", namespace=GOLD)
    host.store(1, 2, 3, 4, 5, 6)
    gold = GOLD.digest.hex()
    offered = host.offer(11, 12, offer=99, engine="eve", namespace=gold)
    assert offered
    hint(host, "pin", 1, 2, 3, 4, 5, 6, engine="eve", namespace=GOLD)
    assert host.slots["active"] == 0, "another tenant's blocks are pinned"
    hint(host, "pin", 1, 2, 3, 4, 5, 6)
    pinned = host.slots["active"]
    hint(host, "demote", session="s", engine="eve", namespace=GOLD)
    assert host.slots["active"] == pinned, "a session of the same name is another tenant's"
    assert count(host, "hint_blocks_demoted") == 0


def test_a_namespace_that_is_not_the_engines_is_dropped() -> None:
    """What a hint may touch is what its engine has said hello with."""
    host = Host(slots=10)
    host.store(1)
    hint(host, "pin", 1, namespace=GOLD)
    assert (host.slots["active"], count(host, "dropped.hint_namespace")) == (0, 1)


def test_the_next_turn_pins_more_and_lets_go_of_what_it_does_not_have() -> None:
    """1, 2 become 1, 3; another session still wants 2."""
    host = Host(slots=20)
    host.store(1, 2, 3)
    hint(host, "pin", 1, 2)
    hint(host, "pin", 1, 2, session="t")
    hint(host, "pin", 1, 3)
    assert host.slots["active"] == 3
    hint(host, "pin", session="t", ttl_ms=0)
    assert host.slots["active"] == 2


def test_a_session_that_has_other_blocks_pins_these_instead() -> None:
    """Two of five slots may be pinned: 1, 2 make room for 3, 4. They once were refused for 1, 2."""
    host = Host(slots=5)
    host.store(1, 2, 3, 4)
    hint(host, "pin", 1, 2)
    hint(host, "pin", 3, 4)
    assert (host.slots["active"], count(host, "hint_blocks_refused")) == (2, 0)
    host.store(5, 6, 7)
    assert {3, 4} <= host.announced


def test_no_session_yields_to_one_that_lets_go_of_as_much() -> None:
    """Two of five slots may be pinned: t keeps 1, while s goes on from 2 to 3."""
    host = Host(slots=5)
    host.store(1, 2, 3)
    hint(host, "pin", 1, session="t")
    hint(host, "pin", 2)
    hint(host, "pin", 3)
    assert (host.slots["active"], count(host, "hint_pins_yielded.newer")) == (2, 0)


def test_demoted_blocks_leave_first_unless_they_are_used_again() -> None:
    """1, 2 are the latest of four; 2 leaves before the others, and 1 does not: it is used again."""
    host = Host(slots=4)
    host.store(30)
    host.store(40)
    host.store(1, 2)
    hint(host, "demote", 1, 2)
    host.release(host.found(host.look_up(1)).lease)
    host.store(50)
    assert host.announced == {1, 30, 40, 50}
    host.store(60)
    assert host.announced == {1, 40, 50, 60}
    assert count(host, "evictions.evicted") == 2


def test_a_requests_last_blocks_are_demoted_when_they_come() -> None:
    """The hint of 1, 2, 3 is sent before the offer of 2, 3: all three leave before older blocks."""
    host = Host(slots=6)
    host.store(1)
    host.store(30, 40, 50)
    hint(host, "demote", 1, 2, 3)
    host.store(2, 3)
    assert count(host, "hint_blocks_demoted") == 3
    for number in (60, 70, 80):
        host.store(number)
    assert host.announced == {30, 40, 50, 60, 70, 80}
    host.core.check()


@pytest.mark.parametrize("why", ["pinned", "shared", "late", "namespace"])
def test_a_block_that_comes_is_not_demoted_any_more(why: str) -> None:
    """Its session wants it again, another one has it, the hint is old, or it is another tenant's.

    Where it is pinned, it is not demoted when the pin ends either.
    """
    host = Host(slots=10)
    host.attach(engine="eve", namespace=GOLD)
    hint(host, "demote", 2)
    if why == "pinned":
        hint(host, "pin", 2)
        hint(host, "pin", 2, ttl_ms=0)
    elif why == "shared":
        hint(host, "pin", 2, session="t", ttl_ms=0)
        hint(host, "demote", 2)
    elif why == "late":
        host.wait(LATE_MS)
        host.attach()
    if why == "namespace":
        host.store_for(2, engine="eve", namespace=GOLD)
    else:
        host.store(2)
    assert 2 in host.announced
    assert count(host, "hint_blocks_demoted") == 0
    assert count(host, "hint_demotions_forgotten.age") == (why == "late")


def test_so_many_demotions_are_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three blocks the first is forgotten; the others are demoted when they come."""
    monkeypatch.setattr(late_demotions, "LATE_MAX", 2)
    host = Host(slots=10)
    hint(host, "demote", 1, 2, 3)
    assert count(host, "hint_demotions_forgotten.room") == 1
    usages = host.core.view.usages(now_ms=0)
    assert usages["awaited_demotions"] == Usage(used=2, size=2, dropped=1)
    host.store(1, 2, 3)
    assert count(host, "hint_blocks_demoted") == 2


def test_a_demoted_session_leaves_what_another_pins() -> None:
    """1 is the system prompt of both."""
    host = Host(slots=10)
    host.store(1, 2)
    hint(host, "pin", 1, session="t")
    hint(host, "pin", 1, 2)
    hint(host, "demote")
    assert (host.slots["active"], count(host, "hint_blocks_demoted")) == (1, 1)


def test_the_disk_tier_is_told_of_demoted_blocks_that_it_lacks() -> None:
    """1 is there already."""
    host = Host(slots=10)
    host.disk_stored(1)
    host.store(1, 2)
    [told] = of(hint(host, "demote", 1, 2), TellHits)
    assert numbers(told.hits.hashes) == [2]


def test_a_prefetch_brings_a_session_up_from_disk() -> None:
    """Its names are remembered when its pin is over; the lookup then finds it in the host."""
    host = Host(slots=4)
    host.store(1, 2)
    hint(host, "pin", 1, 2, ttl_ms=1)
    host.wait(1)
    host.disk_stored(1, 2)
    for number in (30, 40, 50, 60):
        host.store(number)
    assert host.announced == {30, 40, 50, 60}
    [fill] = of(hint(host, "prefetch"), AskFill)
    assert not of(host.filled(fill), Answer)
    found = host.found(host.look_up(1, 2))
    assert (len(found.slots), found.disk_blocks) == (2, [])


def test_a_session_that_is_not_known_is_counted() -> None:
    """Nothing is here that could be brought or demoted."""
    host = Host()
    hint(host, "prefetch")
    hint(host, "demote")
    assert count(host, "dropped.hint_unknown_session") == 2


def test_a_block_that_is_wrong_leaves_although_it_is_pinned() -> None:
    """The engine found it corrupt: its slot is free, and the next one is pinned again."""
    host = Host(slots=4)
    host.store(1)
    hint(host, "pin", 1)
    host.release(host.found(host.look_up(1)).lease, 0)
    assert (host.announced, host.slots["active"]) == (set(), 0)
    host.store(1)
    assert host.slots["active"] == 1


def test_a_block_twice_is_refused() -> None:
    """A chain cannot hold the same block twice."""
    host = Host()
    [refused] = of_refused(host, hint(host, "pin", 1, 1))
    assert (refused.about, refused.field) == ("sessionhint", "hashes")


def of_refused(host: Host, effects: list[Effect]) -> list[Refused]:
    """What engines are told that was refused."""
    return [one for one in host.told(effects) if isinstance(one, Refused)]


def test_the_oldest_session_is_forgotten_when_there_are_too_many() -> None:
    """Its pin ends with it."""
    host = Host(slots=10)
    host.store(1)
    hint(host, "pin", 1, session="first")
    for number in range(SESSIONS_MAX):
        hint(host, "pin", 2, session=f"s{number}")
    assert (host.slots["active"], count(host, "hint_sessions_forgotten")) == (0, 1)


@pytest.mark.parametrize(("bound", "length"), [("SESSIONS_MAX", 1), ("NAMES_MAX", 7)])
def test_sessions_of_a_tenant_end_no_pins_of_another(
    bound: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eve has too many sessions, or too long ones: her own are forgotten, not the oldest of all."""
    monkeypatch.setattr(session_pins, bound, 16)
    host = Host(slots=20)
    host.store(1)
    host.attach(engine="eve", namespace=GOLD)
    hint(host, "pin", 1, session="first")
    for number in range(17):
        blocks, session = range(2, 2 + length), f"s{number}"
        hint(host, "pin", *blocks, session=session, engine="eve", namespace=GOLD)
    assert host.slots["active"] == 1
    assert count(host, "hint_sessions_forgotten") == 17 - 16 // length + (length == 1)


@pytest.mark.parametrize("staging", [False, True])
def test_a_demoted_block_of_a_staging_arena_leaves_when_the_disk_has_it(staging: bool) -> None:
    """There it exists nowhere else."""
    host = Host(slots=2, staging=staging)
    host.store(1, 2)
    hint(host, "demote", 1, 2)
    host.offer(3)
    assert host.announced == ({1, 2} if staging else {1})


def test_lookups_go_on_beside_pins() -> None:
    """A pin and a lease hold the same slot."""
    host = Host(slots=10)
    host.store(1, 2)
    hint(host, "pin", 1, 2)
    effects = host.look_up(1, 2)
    assert of(host.told(effects), Found)
    hint(host, "pin", ttl_ms=0)
    assert host.slots["active"] == 2
    host.release(host.found(effects).lease)
    assert host.slots["active"] == 0
