"""A connector that is told that another host tier serves it: what is under way ends first."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvbm_common.wire.local import Bye, Found, Hello, Moved, to_host_tier
from kvbm_connectors.client.link import BEAT_MS, SILENCE_BEATS, LinkState
from kvbm_connectors.client.link_thread import LinkThread
from kvbm_connectors.core.messages import Hit

from tests.connectors.client.test_link import HELLO, Driven, make_link
from tests.connectors.endpoints import host_tier, welcome
from tests.connectors.helpers import INCARNATION, Engine, answer, of
from tests.waiting import wait_for

THERE = "ipc://there"
BYE = Bye(engine="ada", incarnation=INCARNATION)


def moved(version: int = 5, endpoint: str = THERE) -> Moved:
    return Moved(endpoint=endpoint, version=version, within_ms=500)


def up() -> Driven:
    """A link that is welcomed, with something under way as long as the test says so."""
    driven = Driven()
    driven.link.bye = BYE
    driven.wait()
    driven.hear(welcome())
    return driven


# --- the link ---------------------------------------------------------------------------------


def test_a_link_stays_until_nothing_is_under_way_then_says_bye_and_goes() -> None:
    driven = up()
    busy = True
    driven.link.may_leave = lambda: not busy
    told: list[Moved] = []
    driven.link.on_moved = told.append
    driven.hear(moved())
    driven.hear(moved())
    assert (driven.state(), told) == (LinkState.LEAVING, [moved()])
    assert driven.wait() == []
    driven.link.outbox.append(BYE)
    assert driven.wait() == [BYE], "what is under way goes on"
    busy = False
    assert driven.wait() == [BYE]
    assert (driven.state(), driven.downs) == (LinkState.MOVING, 1)
    assert (driven.link.endpoint, driven.link.shards) == (THERE, 5)
    assert driven.wait(BEAT_MS) == [], "nothing more is said there"


def test_a_greeting_that_is_sent_on_says_by_which_map_it_comes() -> None:
    driven = Driven()
    assert driven.wait() == [HELLO]
    driven.hear(moved())
    driven.reopen()
    [greeting] = of(driven.wait(), Hello)
    assert greeting.shards == 5
    assert driven.link.counts["moved"] == 1


def test_who_is_sent_in_circles_goes_home_and_waits() -> None:
    """The one that was named sends us on by a map that is no newer: that cannot be."""
    driven = Driven()
    driven.wait()
    driven.hear(moved(5))
    driven.reopen()
    driven.wait()
    driven.hear(moved(5, "ipc://elsewhere"))
    assert (driven.link.endpoint, driven.link.shards) == (driven.link.home, 0)
    driven.reopen()
    assert driven.wait(BEAT_MS - 1) == []
    assert driven.wait(1) == [HELLO]


def test_the_newest_map_wins_while_it_waits() -> None:
    driven = up()
    driven.link.may_leave = lambda: False
    for version, endpoint in ((5, THERE), (7, "ipc://newer"), (6, "ipc://older")):
        driven.hear(moved(version, endpoint))
    driven.link.may_leave = lambda: True
    driven.wait()
    assert (driven.link.endpoint, driven.link.shards) == ("ipc://newer", 7)


def test_a_host_tier_that_falls_silent_while_we_leave_is_left_at_once() -> None:
    driven = up()
    driven.link.may_leave = lambda: False
    driven.hear(moved())
    driven.wait()
    for _ in range(SILENCE_BEATS + 1):
        driven.wait(BEAT_MS)
    assert (driven.state(), driven.link.endpoint) == (LinkState.MOVING, THERE)


@pytest.mark.slow
def test_on_real_sockets_it_follows_and_comes_home_when_nobody_is_there(tmp_path: Path) -> None:
    """1. The front sends it to another, where it is welcomed. 2. That one dies: after a while it

    greets the front again, by no map."""
    home, there = (f"ipc://{tmp_path}/{name}.sock" for name in ("home", "there"))
    link = make_link(home, lambda _: None)
    thread = LinkThread([link], name="test")
    with host_tier(home) as front:
        with host_tier(there) as other:
            thread.start()
            front.hear(Hello)
            front.say(Moved(endpoint=there, version=9))
            assert other.hear(Hello).shards == 9
            other.say(welcome())
            wait_for(lambda: link.state is LinkState.UP)
        assert front.hear(Hello).shards == 0
        thread.close()


def test_an_endpoint_that_is_none_is_not_followed(tmp_path: Path) -> None:
    home = f"ipc://{tmp_path}/home.sock"
    link = make_link(home, lambda _: None)
    thread = LinkThread([link], name="test")
    with host_tier(home) as front:
        thread.start()
        front.hear(Hello)
        front.say(Moved(endpoint="nonsense", version=9))
        front.hear(Hello)
        wait_for(lambda: link.counts["dropped.moved_nowhere"] == 1)
        thread.close()


def test_the_bye_arrives_although_the_socket_is_replaced(tmp_path: Path) -> None:
    home, there = (f"ipc://{tmp_path}/{name}.sock" for name in ("home", "there"))
    link = make_link(home, lambda _: None)
    link.bye = BYE
    thread = LinkThread([link], name="test")
    with host_tier(home) as front, host_tier(there) as other:
        thread.start()
        front.welcome(Hello, welcome(), lambda: link.state is LinkState.UP)
        front.say(moved(9, there))
        assert front.hear(Bye) == BYE
        assert other.hear(Hello).shards == 9
        thread.close()
    assert to_host_tier.decode(to_host_tier.encode(BYE)) == BYE


# --- the core ---------------------------------------------------------------------------------


def test_what_was_asked_is_answered_and_loaded_and_nothing_new_is_asked() -> None:
    """1. A lookup is on its way, an offer is out: it may not leave. 2. Meanwhile others miss at

    once, and nothing is offered. 3. Answered, loaded, pulled: it may leave.
    """
    engine = Engine()
    offer = engine.offer(5, 6)
    assert offer is not None
    engine.look_up(1, 2)
    engine.core.moved(engine.now_ms, 500)
    assert not engine.may_leave()
    assert engine.look_up(3, request="other") == Hit(0, reason="moving")
    assert engine.offer(7) is None
    engine.hear(answer(engine.lookups[-1].lookup, 2))
    assert engine.look_up(1, 2) == Hit(2, host=2)
    load = engine.take(70, 71)
    engine.pulled(offer, 2)
    assert not engine.may_leave(), "a load is under way"
    engine.load_ended(load)
    assert engine.may_leave()
    assert engine.confirms == [(offer, True)]
    assert len(engine.released) == 1
    engine.detached()
    engine.attached(epoch=3)  # The other one may be older.
    assert engine.look_up(3, request="other") is None


def test_what_has_not_ended_in_time_is_given_up_but_for_loads() -> None:
    """1. One is asked, one is found, one is loading, one is on offer. 2. Time is up: the offer ends

    and its blocks are free; who asks is told so; the load goes on, and then it may leave.
    """
    engine = Engine()
    engine.found(1, request="loading")
    load = engine.take(70, request="loading")
    engine.found(2, request="found")
    engine.look_up(3, request="asked")
    assert engine.offer(5) is not None
    engine.core.moved(engine.now_ms, 200)
    engine.wait(199)
    assert len(engine.held) == 1
    engine.wait(1)
    assert engine.held == set()
    assert engine.look_up(3, request="asked") == Hit(0, reason="moving")
    assert not engine.may_leave()
    engine.load_ended(load)
    assert engine.may_leave()
    late: Found = answer(engine.lookups[-1].lookup, 1, lease=77)
    engine.hear(late)
    assert 77 in engine.released, "an answer that nobody waits for gives its lease back"
