"""Onboard at its edges: prefetches, whole blocks, the diary, exact instants, counts that add up."""

from __future__ import annotations

from kvbm_common.identity import pack_hashes
from kvbm_common.tier.slots import Block
from kvbm_common.wire.admin import PrefetchReply, PrefetchRequest
from kvbm_common.wire.local import Lookup
from kvbm_common.wire.verbs import ErrorBody, FillSlot
from kvbm_host_tier.core.limits import COUNTS_MAX
from kvbm_host_tier.core.messages import AdminAsked, Answer, AskFill, Effect, ToEngine
from kvbm_host_tier.core.peer_messages import AskHolders, PullFromPeer

from tests.services.host_tier.helpers import (
    BLOCK_BYTES,
    EPOCH,
    LOOKUP_MS,
    NAMESPACE,
    Host,
    asked,
    checksum,
    incarnation,
    name,
    of,
)
from tests.services.host_tier.peer_helpers import ANN, HostWithPeers


def prefetch(
    host: Host, *wanted: int, reply_to: int = 5, deadline_ms: int = LOOKUP_MS
) -> list[Effect]:
    """An operator wants blocks here."""
    hashes = [name(number).hex() for number in wanted]
    request = PrefetchRequest(hashes=hashes, deadline_ms=deadline_ms)
    return host.step(AdminAsked(reply_to, "prefetch", request))


def fills(effects: list[Effect]) -> list[AskFill]:
    """The fills that were asked for."""
    return of(effects, AskFill)


# --- prefetches ---------------------------------------------------------------------------------


def test_a_prefetch_is_answered_by_the_number_of_its_question() -> None:
    """1 is here, 2 is filled: two blocks, one of them brought. Nothing stays pinned."""
    host = Host()
    host.store(1)
    host.disk_stored(2)
    [fill] = fills(prefetch(host, 1, 2))
    assert fill.request.until_ms == host.now_ms + LOOKUP_MS
    assert of(host.filled(fill), Answer) == [Answer(5, PrefetchReply(blocks=2, filled=1))]
    assert host.slots["active"] == 0
    assert of(prefetch(host, 1, 2, reply_to=6), Answer) == [
        Answer(6, PrefetchReply(blocks=2, filled=0))
    ]


def test_a_prefetch_that_is_refused_says_why() -> None:
    """Too many wait already; then the tier is drained, which goes before."""
    host = Host(lookups_max=1)
    host.disk_stored(1, 2)
    host.look_up(1)
    text = "this host tier takes no prefetch now"
    assert of(prefetch(host, 2), Answer) == [Answer(5, ErrorBody(code="busy", message=text))]
    host.drain()
    assert of(prefetch(host, 2), Answer) == [Answer(5, ErrorBody(code="draining", message=text))]


def test_a_prefetch_ends_at_its_deadline_and_not_before() -> None:
    host = Host()
    host.disk_stored(1)
    prefetch(host, 1)
    assert of(host.wait(LOOKUP_MS - 1), Answer) == []
    assert of(host.wait(1), Answer) == [
        Answer(5, PrefetchReply(blocks=0, filled=0, reason="deadline"))
    ]


# --- fills --------------------------------------------------------------------------------------


def test_every_field_of_a_fill() -> None:
    host = Host(batch_blocks_max=1)
    host.disk_stored(1, 2)
    first, second = fills(host.look_up(1, 2))
    assert (first.instance, first.tier) == ("0", "disk")
    request = first.request
    assert (request.epoch, request.until_ms) == (EPOCH, host.now_ms + LOOKUP_MS)
    assert request.slots == [FillSlot(hash=name(1).hex(), slot=0)]
    assert (request.ahead, second.request.ahead) == (0, 1)
    assert first.fill != second.fill


def test_a_filled_block_is_committed_as_the_disk_tier_says_it_is() -> None:
    """Parent, namespace, checksum, bytes; and the diary has its way."""
    host = Host()
    host.disk_stored(1)
    [fill] = fills(host.look_up(1))
    host.now_ms += 10
    host.filled(fill)
    slot = host.slot_of(1)
    assert slot is not None
    assert host.core.view.blocks()[slot] == Block(
        name(1), name(0), NAMESPACE.digest, checksum(1), BLOCK_BYTES
    )
    assert host.diary(1) == [
        (1_000, "staged in slot 0 for a fill"), (1_010, "came from disk to slot 0"),
    ]  # fmt: skip


def test_failed_fills_are_counted_by_their_reason() -> None:
    """Two are gone, one is corrupt; then another is gone."""
    host = Host(slots=8)
    host.disk_stored(1, 2, 3, 4)
    [fill] = fills(host.look_up(1, 2))
    host.filled(fill, 1, 2, reason="gone")
    assert host.core.view.counts["dropped.fill_gone"] == 2
    [fill] = fills(host.look_up(3))
    host.filled(fill, 3, reason="corrupt")
    assert host.core.view.counts["dropped.fill_corrupt"] == 1
    assert host.core.view.counts["dropped.fill_gone"] == 2
    assert host.core.view.counts["promoted_blocks"] == 0
    [fill] = fills(host.look_up(4))
    host.filled(fill)
    host.disk_stored(5)
    [fill] = fills(host.look_up(5))
    host.filled(fill)
    assert host.core.view.counts["promoted_blocks"] == 2


def test_lookups_that_the_deadline_has_cut_are_counted() -> None:
    """Two together, a third later; each where it is due and not before."""
    host = Host()
    host.disk_stored(1, 2)
    host.look_up(1)
    host.look_up(1, 2)
    host.wait(LOOKUP_MS - 1)
    assert host.core.view.counts["lookups_cut_by_deadline"] == 0
    host.wait(1)
    assert host.core.view.counts["lookups_cut_by_deadline"] == 2
    host.look_up(1)
    host.wait(LOOKUP_MS)
    assert host.core.view.counts["lookups_cut_by_deadline"] == 3


def test_lookups_that_are_too_many_are_counted() -> None:
    host = Host(lookups_max=1)
    host.disk_stored(1)
    host.look_up(1)
    for times in (1, 2):
        assert host.found(host.look_up(2)).reason == "busy"
        assert host.core.view.counts["dropped.lookup_busy"] == times


def test_blocks_without_a_slot_are_counted() -> None:
    """Two slots, one leased: of three on disk one is filled, two are cut; twice."""
    host = Host(slots=2)
    host.store(9)
    host.found(host.look_up(9))
    host.disk_stored(1, 2, 3)
    [fill] = fills(host.look_up(1, 2, 3))
    assert asked(fill) == [1]
    assert host.core.view.counts["dropped.fill_no_room"] == 2
    host.look_up(2, 3)
    assert host.core.view.counts["dropped.fill_no_room"] == 4


def test_an_engine_that_ends_leaves_the_lookups_of_others() -> None:
    host = Host()
    host.attach(engine="bob")
    host.disk_stored(1)
    [fill] = fills(host.look_up(1))
    host.look_up(1, engine="bob")
    host.bye()
    assert host.figure("lookups_waiting") == 1
    assert len(host.found(host.filled(fill)).slots) == 1


# --- peers --------------------------------------------------------------------------------------


def test_what_comes_from_a_peer_is_counted_and_written_down() -> None:
    """Two blocks in two pulls of one; then a third."""
    host = HostWithPeers(slots=8, batch_blocks_max=1)
    pulls = host.ask_peers(1, 2)
    assert host.diary(1) == [(1_000, "staged in slot 0 from ann/0")]
    host.now_ms += 10
    for pull in pulls:
        host.came(pull)
    assert host.core.view.counts["peer_pulled_blocks"] == 2
    assert host.core.view.counts["bytes.r2h"] == 2 * BLOCK_BYTES
    assert host.diary(1)[-1] == (1_010, "came from remote to slot 0")
    [pull] = host.ask_peers(3)
    host.came(pull)
    assert host.core.view.counts["peer_pulled_blocks"] == 3
    assert host.core.view.counts["bytes.r2h"] == 3 * BLOCK_BYTES


# --- answers ------------------------------------------------------------------------------------


def traced(*wanted: int) -> Lookup:
    """A lookup of Ada's that is traced."""
    return Lookup(
        engine="ada", incarnation=incarnation(1), lookup=8, namespace=NAMESPACE.digest,
        hashes=pack_hashes([name(number) for number in wanted]), lease_ms=1_000,
        deadline_ms=LOOKUP_MS, trace="00-trace",
    )  # fmt: skip


def test_answers_go_to_the_connection_that_has_asked() -> None:
    """A full one, one that is filled, and a refusal."""
    host = Host(lookups_max=1)
    host.store(1)
    host.disk_stored(2)
    answers = of(host.look_up(1), ToEngine)
    [fill] = fills(host.look_up(1, 2))
    answers += of(host.look_up(9), ToEngine)
    answers += of(host.filled(fill), ToEngine)
    assert [answer.connection for answer in answers] == [b"ada:1/scheduler"] * 3


def test_a_run_that_is_whole_has_no_reason_wherever_it_comes_from() -> None:
    """1 is here, 2 below, 3 at a peer."""
    host = HostWithPeers(slots=8)
    host.store(1)
    host.disk_stored(2)
    [fill] = fills(host.look_up(1, 2))
    found = host.found(host.filled(fill))
    assert (len(found.slots), found.disk_blocks, found.reason) == (2, [1], "")
    host.release(found.lease)
    [pull] = host.ask_peers(1, 2, 3)
    found = host.found(host.came(pull))
    assert (len(found.slots), found.remote_blocks, found.reason) == (3, [2], "")


def test_a_trace_travels_with_fills_and_pulls() -> None:
    host = HostWithPeers(slots=8, traces=True)
    host.disk_stored(1)
    [fill] = fills(host.say(traced(1)))
    assert fill.request.trace == "00-trace"
    host.filled(fill)
    [ask] = of(host.say(traced(2)), AskHolders)
    [pull] = of(host.answer(ask, (ANN, 1)), PullFromPeer)
    assert pull.trace == "00-trace"


def test_what_a_peer_does_not_bring_in_time_is_said_to_be_late() -> None:
    """Neither disk nor bucket has it: it was to come from another host."""
    host = HostWithPeers(slots=8)
    host.ask_peers(1)
    found = host.found(host.wait(LOOKUP_MS))
    assert (found.slots, found.reason) == ([], "deadline")


def test_reasons_that_a_lower_tier_invents_share_a_counter_at_last() -> None:
    """Counters are bounded, an empty reason is a reason, and neither ends the host tier."""
    host = Host(slots=8)
    for number in range(COUNTS_MAX + 2):
        host.disk_stored(1 + number)
        [fill] = fills(host.look_up(1 + number))
        host.filled(fill, 1 + number, reason=f"invented_{number}" if number else "")
    counts = host.core.view.counts
    assert counts["dropped.fill_no_reason"] == counts["dropped.fill_invented_1"] == 1
    assert len(counts) <= COUNTS_MAX + 1
    assert counts["dropped.fill_other"] > 1
