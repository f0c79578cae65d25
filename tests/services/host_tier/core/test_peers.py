"""Blocks of other hosts: asked for, pulled, verified, used, and admitted when used again."""

from __future__ import annotations

from time import process_time

import pytest
from kvbm_common.nats.answers import request_failed
from kvbm_common.tier.breaker import FAILURES_MAX, PAUSE_MS
from kvbm_common.wire.local import Found
from kvbm_common.wire.verbs import DoorReply
from kvbm_host_tier.core.messages import AskFill
from kvbm_host_tier.core.peer_messages import (
    AskHolders,
    HoldersTold,
    OpenPeerReader,
    PeerId,
    PeerJoined,
    PeerLeft,
    PeerPullFailed,
    PeerPullSettled,
    PullFromPeer,
    ReleaseAtPeer,
)
from kvbm_host_tier.core.peers import AVOID_MS, QUESTIONS_MAX
from kvbm_host_tier.shell.peer_client import readable

from tests.services.host_tier.helpers import LOOKUP_MS, Host, name, of
from tests.services.host_tier.peer_helpers import (
    ANN,
    BEN,
    PEER_LEASE,
    HostWithPeers,
    asked_numbers,
    leased,
)
from tests.services.host_tier.running import replace


def door_of(*, slot_count: int) -> DoorReply:
    """A peer's arena."""
    return DoorReply(epoch=1, slot_bytes=4096, slot_count=slot_count, address=0, agent=b"")


def reason_counts(host: Host) -> dict[str, int]:
    """What was given up about peers."""
    counts = host.core.view.counts
    return {k.removeprefix("dropped.peer_"): v for k, v in counts.items() if "dropped.peer" in k}


# --- the way ------------------------------------------------------------------------------------


def test_the_rest_of_a_run_comes_from_a_peer() -> None:
    """1. Block 1 is here; the index is asked for the rest. 2. ann has 2 and 3 of it: pulled.

    3. Found says which came from afar; the peer's lease goes back; nothing is announced.
    """
    host = HostWithPeers()
    host.store(1)
    [ask] = of(host.look_up(1, 2, 3, 4), AskHolders)
    assert asked_numbers(ask) == [2, 3, 4]
    [pull] = of(host.answer(ask, (ANN, 2)), PullFromPeer)
    assert (pull.peer, asked_numbers(pull)) == (ANN, [2, 3])
    effects = host.came(pull)
    found = host.found(effects)
    assert (len(found.slots), found.remote_blocks, found.reason) == (3, [1, 2], "not_stored")
    assert of(effects, ReleaseAtPeer) == [ReleaseAtPeer(ANN, PEER_LEASE)]
    assert host.announced == {1}
    assert host.core.view.statistics(host.now_ms).figures["guests"] == 2


def test_a_long_rest_on_disk_after_a_peers_block_takes_no_long_step() -> None:
    """8,000 blocks. Built anew for each, the set of the disk's blocks would take seconds."""
    count = 8_000
    host = HostWithPeers(slots=count + 1)
    host.disk_stored(*range(2, count + 2))
    [ask] = of(host.look_up(*range(1, count + 2)), AskHolders)
    started_s = process_time()
    effects = host.core.step(HoldersTold(ask.question, ((ANN, 1),)), host.now_ms)
    assert process_time() - started_s < 0.5
    assert [asked_numbers(pull) for pull in of(effects, PullFromPeer)] == [[1]]
    assert sum(len(fill.request.slots) for fill in of(effects, AskFill)) == count


def test_disk_and_peer_share_a_run() -> None:
    """The disk has 1 and 3, ann has 2: the walk goes on below after what the peer has."""
    host = HostWithPeers()
    host.disk_stored(1)
    host.disk_stored(3)
    effects = host.look_up(1, 2, 3)
    [first], [ask] = of(effects, AskFill), of(effects, AskHolders)
    effects = host.answer(ask, (ANN, 1))
    [second], [pull] = of(effects, AskFill), of(effects, PullFromPeer)
    host.filled(second)
    host.came(pull)
    found = host.found(host.filled(first))
    assert (found.disk_blocks, found.remote_blocks) == ([0, 2], [1])


def test_the_longest_holder_that_is_known_is_taken() -> None:
    host = HostWithPeers(peers=(ANN, BEN))
    [ask] = of(host.look_up(1, 2, 3), AskHolders)
    effects = host.answer(ask, (ANN, 1), (BEN, 3))
    assert [pull.peer for pull in of(effects, PullFromPeer)] == [BEN]
    [ask] = of(host.look_up(11, 12), AskHolders)
    host.step(PeerLeft(BEN))
    assert [pull.peer for pull in of(host.answer(ask, (BEN, 2), (ANN, 1)), PullFromPeer)] == [ANN]


@pytest.mark.parametrize("peer_pulls_max", [0, 4])
def test_who_has_no_peers_or_wants_none_asks_nobody(peer_pulls_max: int) -> None:
    peers = () if peer_pulls_max else (ANN,)
    host = HostWithPeers(peers=peers, peer_pulls_max=peer_pulls_max)
    effects = host.look_up(1, 2)
    assert not of(effects, AskHolders)
    assert host.found(effects).reason == "not_stored"


def test_the_door_opens_once_when_there_are_peers_and_slots() -> None:
    host = Host(attach=False)
    assert not of(host.step(PeerJoined(ANN)), OpenPeerReader), "there is nothing to read yet"
    host.attach()
    assert of(host.wait(50), OpenPeerReader) == [OpenPeerReader("/arena")]
    assert not of([*host.step(PeerJoined(BEN)), *host.wait(50)], OpenPeerReader)
    assert of(HostWithPeers().wait(50), OpenPeerReader) == []


# --- admission ----------------------------------------------------------------------------------


def test_the_second_use_admits() -> None:
    host = HostWithPeers()
    [pull] = host.ask_peers(1, 2)
    host.release(host.found(host.came(pull)).lease)
    assert host.announced == set()
    found = host.found(host.look_up(1))
    assert (len(found.slots), found.remote_blocks, host.announced) == (1, [], {1})
    assert host.core.view.counts["peer_admitted_blocks"] == 1


def test_two_who_want_a_block_at_once_share_one_pull_and_admit_it() -> None:
    host = HostWithPeers()
    host.attach(engine="bob")
    [pull] = host.ask_peers(1)
    assert not of(host.look_up(1, engine="bob"), PullFromPeer)
    effects = host.came(pull)
    assert len(of(host.told(effects), Found)) == 2
    assert host.announced == {1}


def test_an_engine_that_computes_a_guest_itself_admits_it() -> None:
    host = HostWithPeers()
    [pull] = host.ask_peers(1)
    host.came(pull)
    host.offer(1)
    assert host.announced == {1}


def test_guests_go_first_and_unannounced() -> None:
    """Block 1 is older than the guest 2, but ours."""
    host = HostWithPeers(slots=2)
    host.store(1)
    [pull] = host.ask_peers(2)
    host.release(host.found(host.came(pull)).lease)
    host.store(3)
    assert host.announced == {1, 3}
    assert host.slot_of(2) is None
    assert host.core.view.counts["evictions.guest"] == 1


def test_a_guest_that_is_pinned_stays() -> None:
    host = HostWithPeers(slots=2)
    host.store(1)
    [pull] = host.ask_peers(2)
    host.came(pull)
    host.store(3)
    assert host.announced == {3}
    assert host.slot_of(2) is not None


# --- what may go wrong --------------------------------------------------------------------------


def test_wrong_bytes_are_not_served_and_not_asked_for_again() -> None:
    """1. Block 2 does not have the checksum of its lease: the run ends before it.

    2. Another look-up does not ask for it; after a while it does.
    """
    host = HostWithPeers(engine_lost_ms=2 * AVOID_MS)
    [pull] = host.ask_peers(1, 2, 3)
    found = host.found(host.came(pull, wrong=[2]))
    assert (len(found.slots), found.reason) == (1, "corrupt")
    assert host.slot_of(2) is None
    host.release(found.lease)
    assert not of(host.look_up(2), AskHolders)
    host.wait(AVOID_MS)
    assert of(host.look_up(2), AskHolders)


def test_what_the_peer_has_lost_ends_the_run_and_is_nobodys_fault() -> None:
    host = HostWithPeers()
    for number in range(1, FAILURES_MAX + 2):
        [pull] = host.ask_peers(10 * number, 10 * number + 1)
        found = host.found(host.came(pull, missing=[10 * number + 1]))
        assert (len(found.slots), found.reason) == (1, "gone")
        host.release(found.lease)


@pytest.mark.parametrize("early", [False, True])
def test_slots_that_late_bytes_may_reach_are_kept(early: bool) -> None:
    """1. A pull fails, and may still write. 2. Until it has settled its slot is nobody's.

    Whether the settling is heard of before the failure does not matter.
    """
    host = HostWithPeers(slots=1)
    [pull] = host.ask_peers(1)
    if early:
        host.step(PeerPullSettled(pull.pull))
    assert host.found(host.lost(pull, settled=False)).slots == []
    if not early:
        host.store(2)
        assert host.announced == set()
        assert host.core.view.statistics(host.now_ms).figures["peer_slots_unsettled"] == 1
        host.step(PeerPullSettled(pull.pull))
    host.store(2)
    assert host.announced == {2}


def test_a_peer_that_fails_is_bypassed_and_tried_again() -> None:
    host = HostWithPeers()
    for number in range(1, FAILURES_MAX + 1):
        [pull] = host.ask_peers(number)
        host.lost(pull)
    assert host.ask_peers(9) == []
    assert host.core.view.counts["peer_bypasses"] == 1
    host.wait(PAUSE_MS)
    [pull] = host.ask_peers(9)
    host.came(pull)
    assert len(host.ask_peers(20)) == 1


@pytest.mark.parametrize("reason", ["bus_unavailable", "reader_closed"])
def test_our_own_outage_is_not_the_peers_fault(reason: str) -> None:
    host = HostWithPeers()
    for number in range(1, FAILURES_MAX + 3):
        [pull] = host.ask_peers(number)
        host.lost(pull, reason=reason)


def test_a_peer_whose_reader_is_closed_does_not_hide_another_that_has_the_blocks() -> None:
    """Ben has the longest run and lends nothing: a few pulls fail, and then ann is asked."""
    host = HostWithPeers(peers=(ANN, BEN))
    asked = list[PeerId]()
    for number in range(1, FAILURES_MAX + 2):
        [ask] = of(host.look_up(10 * number, 10 * number + 1), AskHolders)
        [pull] = of(host.answer(ask, (ANN, 1), (BEN, 2)), PullFromPeer)
        host.lost(pull, reason="door_closed")
        asked.append(pull.peer)
    assert asked == [BEN] * FAILURES_MAX + [ANN]
    assert host.core.view.counts["peer_bypasses"] == 1


def test_a_peer_that_was_bypassed_is_tried_with_blocks_that_no_other_has() -> None:
    """1. Ann is to be tried again. 2. Ben has as much: no lookup is risked. 3. Ann has more."""
    host = HostWithPeers(peers=(ANN, BEN))
    for number in range(FAILURES_MAX):
        [ask] = of(host.look_up(10 * number, 10 * number + 1), AskHolders)
        [pull] = of(host.answer(ask, (ANN, 2)), PullFromPeer)
        host.lost(pull, reason="door_closed")
    host.wait(PAUSE_MS)
    for number, blocks, peer in ((100, 2, BEN), (200, 1, ANN)):
        [ask] = of(host.look_up(number, number + 1), AskHolders)
        [pull] = of(host.answer(ask, (BEN, blocks), (ANN, 2)), PullFromPeer)
        assert pull.peer == peer


def test_askers_are_spread_among_peers_that_have_the_same_blocks() -> None:
    """Whatever the order of the answer, an asker stays with one of them."""
    first = list[PeerId]()
    for number in range(16):
        host = HostWithPeers(peers=(ANN, BEN), host=f"h{number}")
        [one] = of(host.look_up(1), AskHolders)
        [other] = of(host.look_up(11), AskHolders)
        pulls = of(host.answer(one, (ANN, 1), (BEN, 1)), PullFromPeer)
        pulls += of(host.answer(other, (BEN, 1), (ANN, 1)), PullFromPeer)
        assert pulls[0].peer == pulls[1].peer
        first.append(pulls[0].peer)
    assert 4 <= first.count(ANN) <= 12


def test_a_silent_index_is_not_asked_for_a_while() -> None:
    """A look-up waits for it at most until its own deadline, and then not at all."""
    host = HostWithPeers()
    host.store(1)
    for number in range(FAILURES_MAX):
        [ask] = of(host.look_up(1, 10 + number), AskHolders)
        assert ask.deadline_ms <= LOOKUP_MS
        assert len(host.found(host.index_silent(ask)).slots) == 1
    effects = host.look_up(1, 20)
    assert not of(effects, AskHolders)
    assert len(host.found(effects).slots) == 1
    host.wait(PAUSE_MS)
    assert of(host.look_up(1, 20), AskHolders)


def test_an_index_that_answers_too_late_changes_nothing() -> None:
    host = HostWithPeers()
    host.store(1)
    [ask] = of(host.look_up(1, 2), AskHolders)
    assert len(host.found(host.wait(LOOKUP_MS)).slots) == 1
    assert not of(host.answer(ask, (ANN, 1)), PullFromPeer)


def test_a_pull_that_comes_after_the_answer_stays_as_a_guest() -> None:
    host = HostWithPeers()
    [pull] = host.ask_peers(1)
    assert host.found(host.wait(LOOKUP_MS)).reason == "deadline"
    host.came(pull)
    assert host.slot_of(1) is not None
    assert host.announced == set()


def test_so_many_pulls_are_in_flight_and_the_rest_waits() -> None:
    """1. Two of three batches are in flight; the third starts when one has ended, or never."""
    host = HostWithPeers(slots=8, peer_pulls_max=2, batch_blocks_max=1)
    first, second = host.ask_peers(1, 2, 3)
    [third] = of(host.came(first), PullFromPeer)
    assert asked_numbers(third) == [3]
    host.ask_peers(4, 5)
    host.wait(LOOKUP_MS)
    host.came(second)
    host.came(third)
    assert reason_counts(host)["deadline"] == 2
    assert host.slots["staged"] == 0


def test_room_is_made_for_what_fits() -> None:
    host = HostWithPeers(slots=2)
    [pull] = host.ask_peers(1, 2, 3)
    assert asked_numbers(pull) == [1, 2]
    assert host.found(host.came(pull)).reason == "no_room"


def test_a_pull_that_a_peer_refuses_without_a_code_fails_for_a_reason() -> None:
    """The code travels from the peer's error to the core's input."""
    host = HostWithPeers()
    [pull] = host.ask_peers(1)
    error = request_failed("", b'{"error":{"code":"","message":""}}')
    found = host.found(host.step(PeerPullFailed(pull.pull, error.code, settled=True)))
    assert (found.slots, found.reason) == ([], "no_code")


def test_questions_have_a_limit() -> None:
    host = HostWithPeers()
    asked = [host.look_up(number) for number in range(1, QUESTIONS_MAX + 2)]
    assert [len(of(effects, AskHolders)) for effects in asked] == [1] * QUESTIONS_MAX + [0]
    assert reason_counts(host) == {"question": 1}


def test_a_lease_is_read_only_where_it_fits() -> None:
    """Whatever a peer answers, nothing is written outside a slot of ours, or read outside its."""
    host = HostWithPeers()
    [pull] = host.ask_peers(1, 2, 3, 4)
    good, other = leased(1), leased(9)
    huge = replace(leased(2), bytes=pull.slot_bytes + 1)
    behind = replace(leased(3), slot=99)
    short = replace(leased(4), bytes=32)
    wanted = readable(pull, door_of(slot_count=10), [good, good, other, huge, behind, short])
    assert wanted == [(pull.slots[0], good)]
    assert pull.names[0] == name(1)


def test_a_lease_is_read_only_at_addresses_that_exist() -> None:
    """A peer may say that its arena reaches beyond all addresses: the reader is not asked."""
    host = HostWithPeers()
    [pull] = host.ask_peers(1, 2)
    largest = replace(door_of(slot_count=2**63 - 1), address=2**63 - 1)
    good, far = leased(1), replace(leased(2), slot=2**62)
    assert readable(pull, largest, [good, far]) == [(pull.slots[0], good)]
