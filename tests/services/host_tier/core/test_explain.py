"""Why lookups miss: every reason, once, as it comes about; and what is kept of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from kvbm_common.identity import Namespace, pack_hashes
from kvbm_common.tier.reasons import MEANINGS, OUTCOMES
from kvbm_common.wire.admin import RemoveRequest
from kvbm_common.wire.explain import Explanation, FateEntry, FatesReply, Place, Segment
from kvbm_common.wire.local import Lookup, Outcome
from kvbm_host_tier.core import explain, first_blocks, miss_reason
from kvbm_host_tier.core.messages import (
    AdminAsked,
    AskDepartures,
    AskFill,
    DeparturesTold,
    Effect,
    LowerTierJoined,
    LowerTierLeft,
    LowerTierSnapshot,
    StartPull,
)
from kvbm_host_tier.core.peer_messages import AskHolders, PullFromPeer

from tests.services.host_tier.helpers import (
    LEASE_MS,
    LOOKUP_MS,
    NAMESPACE,
    Host,
    engine_id,
    incarnation,
    name,
    of,
)
from tests.services.host_tier.peer_helpers import ANN, HostWithPeers

OTHER = Namespace(model="test", block_tokens=4, revision="other")


def ask(
    host: Host, request: str, *wanted: int, content: bytes = b"", avoided: int = 0,
    namespace: bytes = NAMESPACE.digest, lookup: int = 1,
) -> list[Effect]:  # fmt: skip
    """A request of an engine."""
    return host.say(
        Lookup(
            engine="ada", incarnation=incarnation(1), lookup=lookup, namespace=namespace,
            hashes=pack_hashes(map(name, wanted)), lease_ms=LEASE_MS, deadline_ms=LOOKUP_MS,
            request=request, content=content, avoided=avoided,
        )
    )  # fmt: skip


def told(host: Host, request: str) -> Explanation:
    """The only lookup of a request."""
    [found] = host.core.view.explanations(request)
    return found


def misses(host: Host, request: str) -> list[tuple[int, str, str]]:
    """(blocks, reason, tier) of its missed segments."""
    return [(s.blocks, s.reason, s.tier) for s in told(host, request).segments if s.reason]


def missed_counts(host: Host) -> dict[str, int]:
    """The metric."""
    counts = host.core.view.counts
    return {k.removeprefix("missed_blocks."): n for k, n in counts.items() if "missed_b" in k}


def answer_fates(host: Host, effect: AskDepartures, *entries: FateEntry) -> None:
    """A lower tier tells, one for each block that was asked for."""
    assert len(entries) == len(effect.request.hashes)
    reply = FatesReply(fates=list(entries))
    host.step(DeparturesTold(effect.question, effect.instance, reply, effect.tier))


def evicted(*, disk: Sequence[int] = (), history_entries: int | None = None) -> Host:
    """Blocks 1 and 2 were here and had to go for 3 and 4. The disk has `disk`."""
    host = Host(slots=2, history_entries=history_entries)
    host.disk_stored(*disk)
    host.store(1, 2)
    host.now_ms += 500
    host.store(3, 4)
    host.now_ms += 500
    return host


# --- what is here ---------------------------------------------------------------------------


def test_a_hit_says_where_each_block_came_from() -> None:
    """Host, disk, host: three segments, in the order of the blocks; nothing was missed."""
    host = Host(slots=4)
    host.store(1)
    host.store(3)
    host.disk_stored(2)
    [fill] = of(ask(host, "r", 1, 2, 3), AskFill)
    host.filled(fill)
    found = told(host, "r")
    assert [(s.blocks, s.tier) for s in found.segments] == [(1, "host"), (1, "disk"), (1, "host")]
    assert (found.blocks, found.hit_blocks, found.reason) == (3, 3, "")
    assert (found.engine, found.ts_ms) == ("ada", host.now_ms)
    assert missed_counts(host) == {}


def test_blocks_that_nobody_ever_had() -> None:
    """One segment for all of them, which says since when that is known."""
    host = Host()
    host.now_ms += 500
    ask(host, "r", 1, 2, 3)
    [segment] = told(host, "r").segments
    assert segment == Segment(blocks=3, reason="never_stored", hash=name(1).hex(), at_ms=1_000)
    assert missed_counts(host) == {"never_stored": 3}


def test_what_left_long_ago_is_told_from_what_never_was_here() -> None:
    """Blocks 1 and 2 have left, and memory has room for one story: 1 was here, 9 never was."""
    host = evicted(history_entries=1)
    host.store(5, 6)
    host.now_ms += 500
    ask(host, "r", 9)
    ask(host, "s", 1, 9)
    assert [(one.reason, one.blocks, one.at_ms) for one in told(host, "r").segments] == [
        ("never_stored", 1, 1_000)
    ]
    assert [(one.reason, one.blocks, one.at_ms) for one in told(host, "s").segments] == [
        ("not_remembered", 1, 2_000),
        ("never_stored", 1, 1_000),
    ]


def test_evicted_with_policy_and_time() -> None:
    host = evicted()
    ask(host, "r", 1, 2)
    [segment] = told(host, "r").segments
    assert (segment.blocks, segment.reason, segment.tier) == (2, "evicted", "host")
    assert (segment.policy, segment.at_ms) == ("lru", 1_500)


def test_what_is_there_after_a_hole_is_of_no_use() -> None:
    """4 is here and 2 was never stored: the run ends after 1."""
    host = Host(slots=4)
    host.store(1)
    host.store(4)
    ask(host, "r", 1, 2, 4)
    assert misses(host, "r") == [(1, "never_stored", ""), (1, "behind", "host")]


def test_a_block_that_is_on_its_way_in() -> None:
    host = Host()
    [_pull] = of(host.offer(1), StartPull)
    ask(host, "r", 1)
    assert misses(host, "r") == [(1, "arriving", "host")]


@pytest.mark.parametrize("reason", ["transfer_timeout", "peer_lost"])
def test_an_offer_that_did_not_come_in(reason: str) -> None:
    host = Host()
    [pull] = of(host.offer(1), StartPull)
    host.pull_failed(pull, reason=reason)
    ask(host, "r", 1)
    [segment] = told(host, "r").segments
    assert (segment.reason, segment.detail) == ("offload_failed", reason)


def test_an_offer_that_was_not_held() -> None:
    host = Host()
    [pull] = of(host.offer(1, offer=5), StartPull)
    host.pulled(pull)
    host.confirm(5, held=False)
    ask(host, "r", 1)
    assert [s.detail for s in told(host, "r").segments] == ["revoked"]


def test_a_drained_tier_takes_no_offers() -> None:
    host = Host()
    host.drain()
    host.offer(1)
    ask(host, "r", 1)
    [segment] = told(host, "r").segments
    assert (segment.reason, segment.detail) == ("offload_failed", "draining")


def test_wrong_bytes_at_the_worker() -> None:
    """The worker says so with its release: for whoever comes next the block is corrupt."""
    host = Host()
    host.store(1)
    found = host.found(ask(host, "r", 1))
    host.release(found.lease, 0)
    ask(host, "s", 1)
    assert misses(host, "s") == [(1, "corrupt", "host")]


def test_an_operator_has_removed_it() -> None:
    host = Host()
    host.store(1)
    host.step(AdminAsked(1, "evict", RemoveRequest(hashes=[name(1).hex()])))
    ask(host, "r", 1)
    assert misses(host, "r") == [(1, "removed", "host")]


# --- what is below --------------------------------------------------------------------------


def test_a_fill_that_fails_ends_the_run_and_is_avoided_afterwards() -> None:
    host = Host()
    host.disk_stored(1)
    [fill] = of(ask(host, "r", 1), AskFill)
    host.fill_failed(fill)
    [segment] = told(host, "r").segments
    assert (segment.reason, segment.tier) == ("fill_failed", "disk")
    assert segment.detail == "deadline_exceeded"
    ask(host, "s", 1)
    assert misses(host, "s") == [(1, "avoided", "disk")]


@pytest.mark.parametrize(("word", "reason"), [("corrupt", "corrupt"), ("gone", "lost")])
def test_a_block_that_the_disk_does_not_have_any_more(word: str, reason: str) -> None:
    host = Host()
    host.disk_stored(1, 2)
    [fill] = of(ask(host, "r", 1, 2), AskFill)
    host.filled(fill, 2, reason=word)
    assert misses(host, "r") == [(1, reason, "disk")]


def test_the_deadline_says_which_tier_was_slow() -> None:
    host = Host()
    host.disk_stored(1)
    ask(host, "r", 1)
    host.wait(LOOKUP_MS)
    assert misses(host, "r") == [(1, "deadline", "disk")]


def test_no_slot_to_bring_it_to() -> None:
    """Both slots are leased to somebody."""
    host = Host(slots=2)
    host.store(1, 2)
    host.found(ask(host, "q", 1, 2))
    host.disk_stored(3)
    ask(host, "r", 1, 2, 3)
    assert misses(host, "r") == [(1, "no_room", "")]


def test_a_tier_that_is_away_had_it() -> None:
    """1. Away: said so. 2. Back with the block: it is there."""
    host = Host()
    host.disk_stored(1)
    host.step(LowerTierLeft("0"))
    ask(host, "r", 1)
    assert misses(host, "r") == [(1, "tier_away", "disk")]
    host.disk_restarts()
    host.disk_stored(1)
    assert of(ask(host, "s", 1), AskFill)


def test_the_disk_has_evicted_it_and_names_the_policy() -> None:
    """Host memory evicted 1 first, then the disk did: that counts. The disk knows its policy."""
    host = evicted(disk=[1])
    host.disk_removed(1)
    ask(host, "r", 1)
    assert misses(host, "r") == [(1, "evicted", "disk")]
    [question] = of(host.wait(50), AskDepartures)
    answer_fates(host, question, FateEntry(why="evicted", ago_ms=300, detail="prefix"))
    [segment] = told(host, "r").segments
    assert (segment.tier, segment.policy) == ("disk", "prefix")
    assert segment.at_ms == host.now_ms - 300
    assert missed_counts(host) == {"evicted": 1}


def test_what_the_filter_kept_from_the_disk() -> None:
    """Only the disk tier knows: it is asked at the next tick, once for all that is open."""
    host = evicted(disk=[7])
    ask(host, "r", 1, 2)
    ask(host, "s", 2)
    [question] = of(host.wait(50), AskDepartures)
    assert question.request.hashes == [name(1).hex(), name(2).hex()]
    filtered = FateEntry(why="filtered", detail="count 1 of 2")
    answer_fates(host, question, filtered, FateEntry(why="waiting", detail="its write"))
    assert misses(host, "r") == [(1, "filtered", "disk"), (1, "not_written", "disk")]
    assert misses(host, "s") == [(1, "not_written", "disk")]
    detail = told(host, "r").segments[0].detail
    assert detail == "count 1 of 2; left host memory by lru"
    assert not of(host.wait(50), AskDepartures)


def test_a_disk_that_has_nothing_yet_is_asked_as_well() -> None:
    """It has joined and its snapshot got lost: what it has filtered, it knows all the same."""
    host = evicted()
    host.step(LowerTierJoined("0"))
    host.step(LowerTierSnapshot("0", None))
    ask(host, "r", 1)
    assert of(host.wait(50), AskDepartures)


def test_a_lower_tier_that_is_silent_keeps_nobody_waiting() -> None:
    """1. Found while open. 2. Late: kept as far as it is known, and the silence is counted."""
    host = evicted(disk=[7])
    ask(host, "r", 1)
    assert misses(host, "r") == [(1, "evicted", "host")]
    [question] = of(host.wait(50), AskDepartures)
    assert host.core.view.explanation_count == 0
    host.wait(explain.TOLD_WITHIN_MS)
    assert host.core.view.explanation_count == 1
    assert misses(host, "r") == [(1, "evicted", "host")]
    assert host.core.view.counts["dropped.fates_unanswered"] == 1
    answer_fates(host, question, FateEntry(why="filtered"))
    assert misses(host, "r") == [(1, "evicted", "host")]


def test_two_lower_tiers_are_heard() -> None:
    """The bucket has evicted it after the disk had not taken it: the last place counts."""
    host = evicted(disk=[7])
    host.object_stored(8)
    ask(host, "r", 1)
    disk, bucket = of(host.wait(50), AskDepartures)
    answer_fates(host, disk, FateEntry(why="filtered"))
    answer_fates(host, bucket, FateEntry(why="surplus", ago_ms=10))
    [segment] = told(host, "r").segments
    assert (segment.reason, segment.tier, segment.policy) == ("evicted", "object", "block limit")


def test_open_lookups_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain, "OPEN_MAX", 1)
    host = evicted(disk=[7])
    for number in range(3):
        ask(host, f"r{number}", 1)
    assert host.core.view.explanations("r2")
    assert host.core.view.counts["dropped.explain_open"] == 2
    assert host.core.view.explanation_count == 2


# --- peers ----------------------------------------------------------------------------------


def test_a_peer_that_did_not_bring_it() -> None:
    host = HostWithPeers(slots=4)
    [question] = of(ask(host, "r", 1), AskHolders)
    [pull] = of(host.answer(question, (ANN, 1)), PullFromPeer)
    host.lost(pull)
    [segment] = told(host, "r").segments
    assert (segment.reason, segment.tier, segment.detail) == (
        "peer_failed", "remote", "transfer_timeout",
    )  # fmt: skip


def test_blocks_of_a_peer_are_remote_hits() -> None:
    host = HostWithPeers(slots=4)
    [question] = of(ask(host, "r", 1), AskHolders)
    [pull] = of(host.answer(question, (ANN, 1)), PullFromPeer)
    host.came(pull)
    assert [(s.blocks, s.tier) for s in told(host, "r").segments] == [(1, "remote")]


# --- salt and namespace ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("namespace", "reason"),
    [(NAMESPACE, "salt_differs"), (OTHER, "namespace_differs")],
)
def test_the_same_tokens_under_another_name(namespace: Namespace, reason: str) -> None:
    """Ada's prompt is here as block 1; the same tokens are block 11 for whoever comes now.

    Only the first block is known to have the same tokens. A third tenant sees the same.
    """
    host = Host(slots=4, attach=False)
    host.attach(group_namespaces=[OTHER])
    ask(host, "q", 1, 2, content=b"t" * 16)
    host.store(1, 2)
    ask(host, "r", 11, 12, content=b"t" * 16, namespace=namespace.digest)
    assert misses(host, "r") == [(1, reason, "host"), (1, "never_stored", "")]
    assert told(host, "r").segments[0].hash == name(11).hex()


@pytest.mark.parametrize("content", [b"", b"u" * 16, b"t" * 15, b"t" * 1_000_000])
def test_other_tokens_are_simply_new(content: bytes) -> None:
    host = Host(slots=4)
    ask(host, "q", 1, content=b"t" * 16)
    host.store(1)
    ask(host, "r", 11, content=content)
    assert misses(host, "r") == [(1, "never_stored", "")]


def test_the_same_tokens_that_are_not_here_any_more_are_no_reason() -> None:
    host = Host(slots=4)
    ask(host, "q", 1, content=b"t" * 16)
    ask(host, "r", 11, content=b"t" * 16)
    assert misses(host, "r") == [(1, "never_stored", "")]


def test_remembered_tokens_have_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of prompts, the oldest go; of one prompt's hashes, too."""
    monkeypatch.setattr(first_blocks, "HASHES_MAX", 1)
    host = Host(slots=4, history_entries=2)
    for number in (1, 2, 3):
        ask(host, "q", number, content=bytes([number]) * 16)
    host.store(1)
    host.store(3)
    ask(host, "r", 11, content=bytes([1]) * 16)
    ask(host, "s", 13, content=bytes([3]) * 16)
    assert misses(host, "r") == [(1, "never_stored", "")]
    assert misses(host, "s") == [(1, "salt_differs", "host")]
    ask(host, "t", 23, content=bytes([3]) * 16)
    assert misses(host, "t") == [(1, "never_stored", "")]


# --- what connectors tell -------------------------------------------------------------------


def outcome(host: Host, request: str, reason: str, blocks: int, *, lookup: int = 1) -> None:
    """A connector tells."""
    host.say(
        Outcome(
            engine="ada", incarnation=incarnation(1), request=request, lookup=lookup,
            reason=reason, blocks=blocks,
        )
    )  # fmt: skip


@pytest.mark.parametrize("reason", OUTCOMES)
def test_what_was_found_and_not_used(reason: str) -> None:
    """The lookup is amended, and counted."""
    host = Host()
    host.store(1)
    ask(host, "r", 1)
    outcome(host, "r", reason, 1)
    found = told(host, "r")
    assert (found.outcome, found.lost_blocks, found.hit_blocks) == (reason, 1, 1)
    assert host.core.view.counts[f"unused_blocks.{reason}"] == 1


def test_an_outcome_finds_a_lookup_that_is_still_open() -> None:
    host = evicted(disk=[7])
    ask(host, "r", 1)
    host.wait(50)
    outcome(host, "r", "no_answer", 1)
    assert told(host, "r").outcome == "no_answer"


def test_a_lookup_that_was_never_sent_is_kept_all_the_same() -> None:
    """And so are blocks that the connector has cut off."""
    host = Host()
    outcome(host, "r", "avoided", 3, lookup=0)
    assert misses(host, "r") == [(3, "avoided", "")]
    host.store(1)
    ask(host, "s", 1, avoided=2)
    assert misses(host, "s") == [(2, "avoided", "")]
    assert (told(host, "s").blocks, told(host, "s").hit_blocks) == (3, 1)
    assert missed_counts(host) == {"avoided": 5}


def test_an_outcome_of_nothing_that_is_kept_is_counted() -> None:
    """And whatever a connector calls a reason does not become a label."""
    host = Host()
    outcome(host, "r", "my-own-words", 1)
    assert host.core.view.counts["dropped.outcome_unknown"] == 1
    assert host.core.view.counts["unused_blocks.other"] == 1


# --- everything -----------------------------------------------------------------------------


def test_a_lookup_that_is_refused() -> None:
    host = Host(lookups_max=0)
    ask(host, "r", 1, 2)
    assert misses(host, "r")[0] == (1, "busy", "")


def test_an_engine_that_went_away() -> None:
    host = Host()
    host.disk_stored(1)
    ask(host, "r", 1)
    host.bye()
    assert engine_id().engine == told(host, "r").engine
    assert misses(host, "r")[0] == (1, "engine_lost", "")


def test_segments_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not fit is added up, not lost."""
    monkeypatch.setattr(explain, "SEGMENTS_MAX", 2)
    host = Host(slots=8)
    for number in (2, 4, 6):
        host.store(number)
    ask(host, "r", 1, 2, 3, 4, 5, 6)
    segments = told(host, "r").segments
    assert [(s.blocks, s.reason) for s in segments] == [(1, "never_stored"), (5, "behind")]
    assert segments[1].detail == "4 of them behind, each for a reason of its own"


def test_misses_are_not_added_to_hits_that_come_from_many_places() -> None:
    """Thirty blocks come from host and disk in turn; no tier has the five after them."""
    names = [name(number) for number in range(35)]
    places: dict[int, Place] = dict.fromkeys(range(1, 30, 2), "disk")
    looked = miss_reason.Looked("r", "e", 1, names, 30, places, "")
    looked.missed = [miss_reason.Missed(one, "never_stored") for one in names[30:]]
    found = explain.explanation_of(looked)
    assert (found.reason, found.hit_blocks, len(found.segments)) == ("never_stored", 30, 13)
    assert [s.blocks for s in found.segments if s.reason] == [5]
    assert sum(s.blocks for s in found.segments if not s.reason) == 30
    assert found.segments[11].detail == "18 of them from other tiers, too"


def test_hits_alone_that_come_from_many_places_have_a_limit() -> None:
    places: dict[int, Place] = dict.fromkeys(range(1, 30, 2), "disk")
    looked = miss_reason.Looked("r", "e", 1, [name(number) for number in range(30)], 30, places, "")
    found = explain.explanation_of(looked)
    assert (found.reason, len(found.segments)) == ("", explain.SEGMENTS_MAX)
    assert sum(segment.blocks for segment in found.segments) == 30


def test_every_reason_that_is_found_has_a_meaning() -> None:
    """Goal: no word that nobody explains."""
    assert set(miss_reason.REASON_OF_DEPARTURE.values()) <= MEANINGS.keys()
    assert set(miss_reason.OF_THE_RUN) <= MEANINGS.keys()


def test_nothing_is_kept_where_nothing_is_wanted() -> None:
    """KVBM_EXPLAIN_REQUESTS=0: counted all the same."""
    host: Any = Host(explain_requests=0)
    ask(host, "r", 1)
    assert host.core.view.explanations("r") == []
    assert missed_counts(host) == {"never_stored": 1}
