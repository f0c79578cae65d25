"""Offload: offer → pull → confirm → stored, and every other way in which an offer may end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kvbm_common.wire.local import Pulled
from kvbm_common.wire.verbs import OFFER_BLOCKS_MAX, Offer, OfferRun
from kvbm_host_tier.core.messages import (
    OfferReceived,
    StartPull,
)

from tests.services.host_tier.helpers import (
    BLOCK_BYTES,
    DEVICE_BLOCKS,
    DIGEST,
    Host,
    checksum,
    incarnation,
    name,
    of,
)
from tests.services.host_tier.offers import one_pull, stored_blocks, told_pulled


def test_an_offer_is_pulled_confirmed_and_announced_in_this_order() -> None:
    """1. Offer 1, 2: pulled into two slots. 2. The bytes are in: nothing is announced yet.

    3. Confirmed: announced, found, with checksum and parent.
    """
    host = Host()
    pull = one_pull(host.offer(1, 2, offer=5))
    assert (pull.blocks, len(set(pull.slots)), pull.block_bytes) == ((1, 2), 2, BLOCK_BYTES)
    effects = host.pulled(pull)
    assert told_pulled(host, effects) == Pulled(offer=5, pulled=2, skipped=0, confirm=True)
    assert stored_blocks(host) == []
    assert host.slot_of(1) is None
    host.confirm(5)
    assert stored_blocks(host) == [1, 2]
    assert tuple(host.slot_of(number) for number in (1, 2)) == pull.slots
    committed = host.core.view.blocks()[pull.slots[1]]
    assert (committed.parent, committed.checksum) == (name(1), checksum(2))
    assert host.core.view.counts["offload_blocks_d2h"] == 2
    assert host.core.view.counts["bytes.d2h"] == 2 * BLOCK_BYTES


def test_a_hold_that_was_broken_commits_nothing() -> None:
    """The engine says `held: no`: its blocks may have been rewritten under the pull."""
    host = Host()
    host.pulled(one_pull(host.offer(1, 2, offer=5)))
    host.confirm(5, held=False)
    assert stored_blocks(host) == []
    assert host.slots["reset"] == 4
    assert host.core.view.counts["dropped.offer_revoked"] == 2
    assert host.figure("offers") == 0


def test_a_confirm_that_does_not_come_commits_nothing() -> None:
    """2 s after `Pulled` the slots are given back; the confirm after that is dropped."""
    host = Host()
    host.pulled(one_pull(host.offer(1, offer=5)))
    host.wait(1_999)
    assert host.figure("offers") == 1
    host.wait(1)
    assert host.slots["reset"] == 4
    host.confirm(5)
    assert stored_blocks(host) == []
    assert host.core.view.counts["dropped.confirm_unknown"] == 1


def test_a_confirm_before_the_bytes_are_in_commits_nothing() -> None:
    """The question has not been asked yet."""
    host = Host()
    pull = one_pull(host.offer(1, offer=5))
    host.confirm(5)
    assert stored_blocks(host) == []
    host.pulled(pull)
    host.confirm(5)
    assert stored_blocks(host) == [1]


def test_what_is_here_is_not_pulled_again() -> None:
    """1 is committed, 2 is being pulled for another offer: only 3 is wanted."""
    host = Host()
    host.store(1)
    first = one_pull(host.offer(1, 2))
    assert first.blocks == (2,)
    second = one_pull(host.offer(1, 2, 3))
    assert second.blocks == (3,)
    assert told_pulled(host, host.pulled(second)).skipped == 2


def test_an_offer_of_nothing_new_needs_no_confirm() -> None:
    """The engine frees its blocks at once."""
    host = Host()
    host.store(1, 2)
    pulled = told_pulled(host, host.offer(1, 2, offer=9))
    assert pulled == Pulled(offer=9, pulled=0, skipped=2, confirm=False)
    assert host.figure("offers") == 0


def test_two_engines_offer_the_same_block() -> None:
    """It is pulled once, from whoever came first, and announced once."""
    host = Host()
    host.attach(engine="bob")
    pull = one_pull(host.offer(1, offer=1))
    assert pull.parts[0].peer == "ada-1-0"
    pulled = told_pulled(host, host.offer(1, offer=1, engine="bob"))
    assert (pulled.skipped, pulled.confirm) == (1, False)
    host.pulled(pull)
    host.confirm(1)
    assert stored_blocks(host) == [1]


def test_a_late_duplicate_of_an_offer_is_not_pulled_again() -> None:
    """1. While it waits for its confirm, and 2. after it has ended and its block is evicted: the
    engine may have reused the device block by then."""
    host = Host(slots=1)
    [pull] = of(host.offer(1, offer=70), StartPull)
    host.pulled(pull)
    assert of(host.offer(1, offer=70), StartPull) == []
    host.confirm(70)
    host.store(2)
    assert host.announced == {2}
    assert of(host.offer(1, offer=70), StartPull) == []
    assert host.core.view.counts["dropped.offer_duplicate"] == 2
    host.confirm(70)
    assert host.announced == {2}


def test_a_duplicate_of_a_running_offer_is_dropped() -> None:
    """The bus may deliver twice; the offer goes on."""
    host = Host()
    pull = one_pull(host.offer(1, offer=5))
    assert host.offer(1, offer=5) == []
    assert host.core.view.counts["dropped.offer_duplicate"] == 1
    host.pulled(pull)
    host.confirm(5)
    assert stored_blocks(host) == [1]


def test_a_block_twice_in_an_offer_is_pulled_once() -> None:
    """The second mention is skipped."""
    host = Host()
    pull = one_pull(host.offer(1, 1, 2))
    assert pull.blocks == (1, 2)
    assert told_pulled(host, host.pulled(pull)).skipped == 1


# --- limits -------------------------------------------------------------------------------------


def test_offers_take_turns_batch_by_batch() -> None:
    """One pull at a time, one block each: the small offer does not wait for the large one."""
    host = Host(transfers_max=1, batch_blocks_max=1)
    pull = one_pull(host.offer(1, 2, 3))
    assert host.offer(11) == []
    order: list[tuple[int, ...]] = []
    while True:
        order.append(pull.blocks)
        pulls = of(host.pulled(pull), StartPull)
        if not pulls:
            break
        [pull] = pulls
    assert order == [(1,), (2,), (11,), (3,)]


@pytest.mark.parametrize(
    ("room", "slots", "first"), [(0, 64, 1), (2, 64, 2), (3, 64, 3), (9, 64, 4), (9, 47, 2)]
)
def test_small_blocks_are_pulled_together(room: int, slots: int, first: int) -> None:
    """Four blocks, batches of one, and room for so many blocks in a pull: some come at once, but
    no more than a sixteenth of the arena's slots."""
    host = Host(slots=slots, batch_blocks_max=1, batch_bytes=room * BLOCK_BYTES)
    pulls = of(host.offer(1, 2, 3, 4), StartPull)
    assert len(pulls[0].blocks) == first
    assert sum(len(pull.blocks) for pull in pulls) == 4


def test_no_more_pulls_are_in_flight_than_allowed() -> None:
    """Five blocks, batches of one, two at a time."""
    host = Host(slots=8, transfers_max=2, batch_blocks_max=1)
    pulls = of(host.offer(1, 2, 3, 4, 5), StartPull)
    assert len(pulls) == 2
    flown = len(pulls)
    while pulls:
        started = of(host.pulled(pulls.pop(0)), StartPull)
        assert len(started) <= 1
        flown += len(started)
        pulls += started
    assert flown == 5


def test_without_room_the_rest_is_not_cached() -> None:
    """Two slots, both leased to a reader: nothing can be evicted, the offer comes back."""
    host = Host(slots=2)
    host.store(1, 2)
    host.found(host.look_up(1, 2))
    pulled = told_pulled(host, host.offer(11, 12, 13))
    assert (pulled.failed, pulled.reason, pulled.confirm) == (3, "no_room", False)
    assert host.core.view.counts["dropped.offer_no_room"] == 3
    assert host.announced == {1, 2}


def test_with_some_room_the_beginning_is_cached() -> None:
    """One of two slots is leased: block 11 goes in, 12 and 13 do not."""
    host = Host(slots=2)
    host.store(1)
    host.found(host.look_up(1))
    pull = one_pull(host.offer(11, 12, 13, offer=5))
    assert pull.blocks == (11,)
    pulled = told_pulled(host, host.pulled(pull))
    assert (pulled.pulled, pulled.failed, pulled.reason) == (1, 2, "no_room")
    host.confirm(5)
    assert host.announced == {1, 11}


def test_old_blocks_make_room_and_say_good_bye_first() -> None:
    """Two slots hold 1, 2; 11 takes the slot of the leaf 2, whose loss is announced at once."""
    host = Host(slots=2)
    host.store(1, 2)
    pull = one_pull(host.offer(11))
    assert host.announced == {1}
    assert host.core.view.counts["evictions.evicted"] == 1
    host.pulled(pull)


def test_more_offers_than_allowed_are_turned_away() -> None:
    """The second of one comes back as `busy`."""
    host = Host(offers_max=1)
    one_pull(host.offer(1))
    pulled = told_pulled(host, host.offer(11, 12))
    assert (pulled.failed, pulled.reason) == (2, "busy")
    assert host.core.view.counts["dropped.offer_busy"] == 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"namespace": "0" * 64}, "namespace"),
        ({"blocks": [1]}, "malformed"),
        ({"blocks": [1, DEVICE_BLOCKS]}, "block_id"),
    ],
)
def test_an_offer_that_cannot_be_served_comes_back(change: dict[str, Any], reason: str) -> None:
    """The engine is told, so that it does not wait for its deadline."""
    host = Host()
    hashes = [name(1).hex(), name(2).hex()]
    run = OfferRun(parent=name(0).hex(), hashes=hashes, blocks=change.get("blocks", [1, 2]))
    offer = Offer(
        host="h", engine="ada", incarnation=incarnation(1), offer=1,
        namespace=change.get("namespace", DIGEST), deadline_ms=100, runs=[run],
    )  # fmt: skip
    pulled = told_pulled(host, host.step(OfferReceived(offer)))
    assert (pulled.failed, pulled.reason, pulled.confirm) == (2, reason, False)
    assert host.core.view.counts[f"dropped.offer_{reason}"] == 2


def draining() -> Host:
    """A host tier that takes no new blocks."""
    host = Host()
    host.drain()
    return host


def without_worker() -> Host:
    """A host tier whose engine has lost its worker."""
    host = Host()
    host.pull_failed(one_pull(host.offer(9)), reason="peer_lost")
    return host


@pytest.mark.parametrize("made", [draining, without_worker, lambda: Host(offers_max=0)])
@pytest.mark.parametrize(
    ("hashes", "blocks"), [([1], [1, 2]), ([1, 2], [1]), ([], [1]), ([1, 2], [])]
)
def test_an_uneven_offer_is_malformed_before_it_is_anything_else(
    made: Callable[[], Host], hashes: list[int], blocks: list[int]
) -> None:
    """Other refusals remember each of its blocks, and find no pairs."""
    host = made()
    run = OfferRun(parent=name(0).hex(), hashes=[name(n).hex() for n in hashes], blocks=blocks)
    offer = Offer(
        host="h", engine="ada", incarnation=incarnation(1), offer=99, namespace=DIGEST,
        deadline_ms=100, runs=[run],
    )  # fmt: skip
    assert told_pulled(host, host.step(OfferReceived(offer))).reason == "malformed"


def test_an_offer_with_too_many_blocks_is_malformed() -> None:
    """One offer pins device blocks until it is answered."""
    host = Host()
    pulled = told_pulled(host, host.offer(*range(1, OFFER_BLOCKS_MAX + 2)))
    assert pulled.reason == "malformed"


def test_an_offer_with_a_hash_that_is_none_is_dropped_whole() -> None:
    """Only a look inside finds it; the core goes on."""
    host = Host()
    run = OfferRun(parent=name(0).hex(), hashes=[name(1).hex(), "xyz"], blocks=[1, 2])
    offer = Offer(
        host="h", engine="ada", incarnation=incarnation(1), offer=1, namespace=DIGEST,
        deadline_ms=100, runs=[run],
    )  # fmt: skip
    assert host.step(OfferReceived(offer)) == []
    assert host.core.view.counts["dropped.malformed"] == 1
    host.store(1)


def test_a_strangers_offer_is_counted() -> None:
    """There is nobody to tell."""
    host = Host()
    assert host.offer(1, 2, engine="eve") == []
    assert host.offer(1, 2, life=9) == []
    assert host.core.view.counts["dropped.offer_unknown_engine"] == 4
