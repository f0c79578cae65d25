"""Offload when something fails: pulls, workers, engines, deadlines. Nothing wrong is stored."""

from __future__ import annotations

from kvbm_host_tier.core.messages import (
    AttachPeer,
    DetachPeer,
    PeerAttached,
    PullSettled,
    StartPull,
)

from tests.services.host_tier.helpers import (
    Host,
    engine_id,
    of,
)
from tests.services.host_tier.offers import one_pull, stored_blocks, told_pulled


def test_a_failed_pull_fails_its_batch_only() -> None:
    """Two batches: 1, 2 arrive, 3, 4 do not. 1, 2 are committed, the slots of 3, 4 given back."""
    host = Host(batch_blocks_max=2)
    first, second = of(host.offer(1, 2, 3, 4, offer=5), StartPull)
    host.pulled(first)
    pulled = told_pulled(host, host.pull_failed(second))
    assert (pulled.pulled, pulled.failed, pulled.reason) == (2, 2, "transfer_timeout")
    host.confirm(5)
    assert host.announced == {1, 2}
    assert host.slots["reset"] == 2
    assert host.core.view.counts["dropped.pull_transfer_timeout"] == 2


def test_slots_of_an_unsettled_pull_are_not_used_until_it_settles() -> None:
    """1. The pull of 1 times out, and may still write. 2. 1 is pulled again, into another slot.

    3. However full it gets, and however late, the first slot stays out of use. 4. The last late
    byte has landed: it is a slot like any other.
    """
    host = Host(slots=3)
    pull = one_pull(host.offer(1))
    [lost] = pull.slots
    host.pull_failed(pull, settled=False)
    assert host.figure("slots_unsettled") == 1
    host.store(1)
    assert host.announced == {1}
    for number in range(11, 20):
        host.store(number)
        assert host.slot_of(number) != lost
    for _ in range(20):
        host.wait(4_000)
        host.beat()
    assert host.slots["staged"] == 1
    assert host.core.view.statistics(host.now_ms).figures["slots_unsettled"] == 1
    assert host.step(PullSettled(pull.pull)) == []
    assert host.slots["staged"] == host.figure("slots_unsettled") == 0
    host.store(31, 32, 33)
    assert lost in {host.slot_of(number) for number in (31, 32, 33)}


def test_a_pull_settles_after_its_offer_and_its_engine_have_gone() -> None:
    """Who offered does not matter to the slot, nor that another engine wants the block by now."""
    host = Host(slots=2)
    pull = one_pull(host.offer(1, deadline_ms=100))
    host.wait(100)
    host.pull_failed(pull, settled=False)
    host.bye()
    host.attach(engine="bob")
    again = one_pull(host.offer(1, engine="bob"))
    assert not set(again.slots) & set(pull.slots)
    host.step(PullSettled(pull.pull))
    assert host.slots["staged"] == 1
    host.pulled(again)
    assert host.slots["reset"] == 1


def test_a_pull_has_no_longer_than_the_offer() -> None:
    """The offer ends 500 ms after it came; a pull never outlives it, nor the tier's own limit."""
    host = Host(transfers_max=1, pull_deadline_ms=300)
    first = one_pull(host.offer(1, deadline_ms=500))
    assert first.deadline_ms == 300
    assert host.offer(2, deadline_ms=500) == []
    host.now_ms += 400
    assert one_pull(host.pulled(first)).deadline_ms == 100


def test_an_offers_deadline_gives_its_slots_back_when_they_are_safe() -> None:
    """1. One batch is in, one in flight, one waits. 2. The deadline: the first is given back.

    3. The second when its pull has ended, well or not. Every block is counted once.
    """
    host = Host(batch_blocks_max=1, transfers_max=2)
    first, second = of(host.offer(1, 2, 3, offer=5, deadline_ms=100), StartPull)
    third = one_pull(host.pulled(first))
    host.wait(100)
    assert host.slots["staged"] == 2
    assert host.pulled(second) == []
    assert host.slots["staged"] == 1
    assert host.pull_failed(third) == []
    assert host.slots["reset"] == 4
    assert host.figure("offers") == 0
    counts = host.core.view.counts
    assert counts["dropped.offer_deadline"] == 2
    assert counts["dropped.pull_transfer_timeout"] == 1
    assert stored_blocks(host) == []


def test_a_lost_worker_is_introduced_again() -> None:
    """1. NIXL lost the peer of a pull, and has forgotten it. 2. The worker is attached anew.

    3. Until then nothing is pulled: what was still wanted is given up, and offers come back.
    4. Then all is well again.
    """
    host = Host(transfers_max=1, batch_blocks_max=1)
    effects = host.pull_failed(one_pull(host.offer(1, 2, 3, offer=5)), reason="peer_lost")
    assert of(effects, DetachPeer) == [DetachPeer("ada-1-0")]
    assert of(effects, AttachPeer) == [AttachPeer(engine_id(), 0, b"agent")]
    pulled = told_pulled(host, effects)
    assert (pulled.failed, pulled.reason, pulled.confirm) == (3, "incomplete_engine", False)
    assert told_pulled(host, host.offer(4)).reason == "incomplete_engine"
    host.step(PeerAttached(engine_id(), 0, "anew"))
    assert one_pull(host.offer(4)).parts[0].peer == "anew"
    assert host.core.view.counts["dropped.pull_peer_lost"] == 1


def test_what_arrived_before_the_worker_was_lost_is_still_good() -> None:
    """1 is in, 2 is lost with the peer: the engine held 1, so 1 is committed."""
    host = Host(batch_blocks_max=1)
    first, second = of(host.offer(1, 2, offer=5), StartPull)
    host.pulled(first)
    pulled = told_pulled(host, host.pull_failed(second, reason="peer_lost"))
    assert (pulled.pulled, pulled.failed, pulled.confirm) == (1, 1, True)
    host.confirm(5)
    assert host.announced == {1}


def test_pulls_that_fail_together_introduce_the_worker_once() -> None:
    """NIXL fails all transfers of a peer at once; one AttachPeer is in flight, not two."""
    host = Host(batch_blocks_max=1)
    first, second = of(host.offer(1, 2), StartPull)
    assert of(host.pull_failed(first, reason="peer_lost"), AttachPeer)
    effects = host.pull_failed(second, reason="peer_lost")
    assert of(effects, AttachPeer) == []
    assert of(effects, DetachPeer) == []


def test_every_rank_of_a_lost_engine_is_introduced_again() -> None:
    """Nobody says which rank it was. The engine is complete when all are back."""
    host = Host(attach=False)
    host.attach(world_size=2)
    effects = host.pull_failed(one_pull(host.offer(1)), reason="peer_lost")
    assert [attach.rank for attach in of(effects, AttachPeer)] == [0, 1]
    host.step(PeerAttached(engine_id(), 0, "a"))
    assert told_pulled(host, host.offer(2)).reason == "incomplete_engine"
    host.step(PeerAttached(engine_id(), 1, "b"))
    assert [part.peer for part in one_pull(host.offer(2)).parts] == ["a", "b"]


def test_a_worker_that_is_really_gone_is_not_asked_for_ever() -> None:
    """The engine's beats have stopped: its lost pull introduces nobody."""
    host = Host(pull_deadline_ms=60_000)
    pull = one_pull(host.offer(1, deadline_ms=60_000))
    host.wait(5_001)
    assert host.pull_failed(pull, reason="peer_lost") == []
    assert host.slots["reset"] == 4


def test_an_engine_lost_in_mid_pull_commits_nothing() -> None:
    """Silence; then the pull ends well after all. Its slot is free again, and nothing is stored."""
    host = Host(pull_deadline_ms=60_000)
    pull = one_pull(host.offer(1, deadline_ms=60_000))
    host.wait(5_001)
    assert host.slots["staged"] == 1
    assert host.pulled(pull) == []
    assert host.slots["reset"] == 4
    assert host.core.view.counts["dropped.offer_engine_lost"] == 1


def test_an_engine_that_leaves_while_its_offer_waits_for_a_confirm() -> None:
    """Its confirm cannot come any more."""
    host = Host()
    host.pulled(one_pull(host.offer(1)))
    host.bye()
    assert host.slots["reset"] == 4
    assert host.figure("offers") == 0


def test_offers_of_others_go_on_when_an_engine_ends() -> None:
    """Ada's pull is in flight, her second and Bob's wait. She leaves; Bob is next."""
    host = Host(transfers_max=1, batch_blocks_max=1)
    host.attach(engine="bob")
    pull = one_pull(host.offer(1, 2))
    host.offer(11, engine="bob")
    host.bye()
    following = one_pull(host.pulled(pull))
    assert following.parts[0].peer == "bob-1-0"
    assert host.slots["staged"] == 1


def test_the_root_of_a_chain_outlives_its_leaf() -> None:
    """1, 2, 3 are stored at once, then two slots are needed: 3 and 2 go."""
    host = Host(slots=3)
    host.store(1, 2, 3)
    host.store(11, 12)
    assert host.announced == {1, 11, 12}
