"""The consolidator's core, without IO: lives, order, names, orphans, merging, and a property."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvbm_common.identity import ExtraTag, Hasher, SequenceHash, request_extras
from kvbm_common.wire.engine_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EngineBatch,
    OtherEvent,
    decode_batch,
    split_published,
)
from kvbm_common.wire.events import Cleared, Removed, Stored
from kvbm_common.wire.local import Attached, Refused
from kvbm_connectors.consolidator.messages import (
    AskEpoch,
    BeatReceived,
    Describe,
    EngineBatchesReceived,
    EngineBatchReceived,
    EngineDetached,
    EngineLost,
    EpochFailed,
    EpochGranted,
    Limits,
    Publish,
    ReplayDone,
    RequestReplay,
    RevokeEpoch,
    StreamAttached,
    Subscribe,
    Tick,
    Unsubscribe,
)
from kvbm_connectors.consolidator.naming import extras_of

from tests import capture
from tests.connectors.consolidator.model import (
    INCARNATION,
    NAMESPACE,
    Device,
    Harness,
    attach,
    chain,
    engine_hash,
    key,
    removed,
    stored,
)

OTHER_INCARNATION = "00000000000000bb"
PROMPT = (1, 2, 3, 4, 5, 6)
BLOCKS = chain(PROMPT)


@pytest.fixture
def harness() -> Harness:
    """A core with one attached engine of one rank, an epoch, and nothing held."""
    harness = Harness()
    harness.attach()
    return harness


def kinds(harness: Harness) -> list[str]:
    """The kinds of all published events."""
    return [str(event.__struct_config__.tag) for event in harness.events]


# ---- lives -----------------------------------------------------------------------------------


def test_an_attach_subscribes_replays_and_asks_for_an_epoch() -> None:
    harness = Harness()
    effects = harness.send(StreamAttached(attach(), b"peer"))
    digest = NAMESPACE.digest.hex()
    assert effects == [
        Subscribe(key(), "ipc://pub0", ""),
        RequestReplay(key(), "ipc://replay0", 0, 1),
        AskEpoch("sim-0", INCARNATION, (0,), (digest,)),
    ]
    harness.send(EpochGranted("sim-0", INCARNATION, 7))
    assert harness.events == [
        Cleared(host="h", source="sim-0", tier="device", epoch=7, seq=1, ts_ms=0, reason="attached")
    ]
    assert harness.replies == [(b"peer", Attached(engine="sim-0", rank=0, epoch=7))]


def test_an_attach_again_changes_nothing_and_is_answered(harness: Harness) -> None:
    effects = harness.send(StreamAttached(attach(), b"other"))
    assert [type(effect).__name__ for effect in effects] == ["Reply"]
    assert harness.replies[-1] == (b"other", Attached(engine="sim-0", rank=0, epoch=1))


def test_every_rank_hears_when_offers_cannot_be_passed_on(harness: Harness) -> None:
    """1. NATS is away. 2. A rank that attaches meanwhile hears it too. 3. NATS is back."""
    harness.replies.clear()
    harness.send(Tick(offers_open=False))
    harness.send(Tick(offers_open=False))
    closed = Attached(engine="sim-0", rank=0, epoch=1, offers=False)
    assert harness.replies == [(b"peer0", closed)]
    harness.send(StreamAttached(attach(rank=1), b"peer1"))
    assert harness.replies[-1] == (b"peer1", msgspec.structs.replace(closed, rank=1))
    harness.send(Tick())
    assert [message.offers for _, message in harness.replies[-2:]
            if isinstance(message, Attached)] == [True, True]  # fmt: skip


def test_what_is_held_before_the_epoch_is_announced_with_it() -> None:
    harness = Harness()
    harness.attach(epoch=False)
    harness.answer(Device())
    harness.batch(0, stored(PROMPT))
    assert harness.events == []
    assert harness.core.snapshot("sim-0") is None
    harness.grant()
    assert kinds(harness) == ["cleared", "stored"]
    assert harness.live[0] == set(BLOCKS)


def test_a_refused_epoch_is_asked_for_again() -> None:
    harness = Harness()
    harness.attach(epoch=False)
    harness.other.clear()
    harness.send(EpochFailed("sim-0", INCARNATION, "no registry"))
    harness.tick(100)
    assert harness.other == []
    harness.tick(500)
    assert [type(effect) for effect in harness.other] == [AskEpoch]


def test_a_beat_is_answered_to_who_has_attached(harness: Harness) -> None:
    """Another peer (a rank that we do not know) and another life hear that they must attach."""
    harness.replies.clear()
    for incarnation, peer in ((INCARNATION, b"peer0"), (INCARNATION, b"new"), ("f" * 16, b"peer0")):
        harness.send(BeatReceived("sim-0", incarnation, peer))
    answers = [message for _, message in harness.replies]
    assert answers[0] == Attached(engine="sim-0", rank=0, epoch=1)
    for answer in answers[1:]:
        assert isinstance(answer, Refused)
        assert answer.code == "unknown_engine"


def test_a_silent_engine_is_lost_and_a_beating_one_is_not(harness: Harness) -> None:
    harness.batch(0, stored(PROMPT))
    for _ in range(4):
        harness.tick(3_000)
        harness.send(BeatReceived("sim-0", INCARNATION, b"peer0"))
    harness.other.clear()
    harness.tick(5_001)
    assert harness.events[-1] == Cleared(
        host="h", source="sim-0", tier="device", epoch=1, seq=3, ts_ms=0, reason="lost"
    )
    assert harness.other == [Unsubscribe(key()), RevokeEpoch("sim-0")]
    assert harness.core.statistics().engines == 0


def test_a_detached_engine_holds_nothing(harness: Harness) -> None:
    harness.batch(0, stored(PROMPT))
    harness.send(EngineDetached("sim-0", OTHER_INCARNATION))
    assert harness.live[0]
    harness.send(EngineDetached("sim-0", INCARNATION))
    assert harness.live == {}
    assert harness.core.statistics().drops["stale_detach"] == 1


def test_another_incarnation_replaces_the_engine(harness: Harness) -> None:
    harness.batch(0, stored(PROMPT))
    harness.other.clear()
    harness.send(StreamAttached(attach(incarnation=OTHER_INCARNATION), b"peer"))
    assert [type(effect) for effect in harness.other[:3]] == [Unsubscribe, RevokeEpoch, Subscribe]
    harness.grant(OTHER_INCARNATION)
    assert kinds(harness) == ["cleared", "stored", "cleared", "cleared"]
    harness.batch(1, stored((9, 9)))
    assert harness.core.statistics().drops["stale_batch"] == 1


def test_an_engine_taken_over_elsewhere_is_let_go(harness: Harness) -> None:
    harness.send(EngineLost("sim-0", epoch=99, reason="superseded"))
    assert harness.core.knows("sim-0", INCARNATION)
    harness.send(EngineLost("sim-0", epoch=1, reason="superseded"))
    assert not harness.core.knows("sim-0", INCARNATION)


@pytest.mark.parametrize("name", ["host-tier-0", "disk-tier-7"])
def test_an_engine_with_the_name_of_a_tier_is_refused(name: str) -> None:
    harness = Harness()
    harness.send(StreamAttached(attach(engine=name), b"peer"))
    assert isinstance(harness.replies[0][1], Refused)
    assert harness.replies[0][1].code == "bad_engine"


def test_streams_are_bounded() -> None:
    harness = Harness(Limits(streams_max=1))
    harness.attach()
    harness.send(StreamAttached(attach(rank=1), b"peer"))
    assert isinstance(harness.replies[-1][1], Refused)
    assert harness.replies[-1][1].code == "too_many_streams"


# ---- order -----------------------------------------------------------------------------------


def test_a_late_comer_replays_from_the_beginning() -> None:
    device = Device()
    device.publish(device.store(PROMPT, 0))
    device.publish(device.evict(0))
    harness = Harness()
    harness.attach(epoch=False)
    harness.grant()
    harness.answer(device)
    assert harness.live[0] == device.truth() == set(BLOCKS[:2])


def test_a_gap_is_replayed_and_later_batches_wait(harness: Harness) -> None:
    """1. Batch 1 is lost. 2. Batch 2 waits and a replay from 1 is asked for. 3. All is applied."""
    device = Device()
    for tokens in (PROMPT[:2], PROMPT[:4], PROMPT):
        device.publish(device.store(tokens, len(tokens) // 2 - 1))
    harness.send(EngineBatchReceived(key(), 0, device.batches[0]))
    harness.send(EngineBatchReceived(key(), 2, device.batches[2]))
    assert harness.replays == [RequestReplay(key(), "ipc://replay0", 1, 2)]
    assert harness.live[0] == set(BLOCKS[:1])
    harness.answer(device)
    assert harness.live[0] == set(BLOCKS)
    assert harness.core.statistics().pending_batches == 0


def test_duplicates_are_dropped_and_counted(harness: Harness) -> None:
    for _ in range(3):
        harness.batch(0, stored(PROMPT), ts=5.0)
    assert kinds(harness) == ["cleared", "stored"]
    assert harness.core.statistics().drops["duplicate"] == 2


def test_a_replay_that_begins_too_late_clears_and_rebuilds(harness: Harness) -> None:
    device = Device()
    device.publish(device.store(PROMPT, 0))
    device.publish(device.clear())
    device.publish(device.store((7, 8), 0))
    device.publish(device.store((9, 9), 0))
    harness.send(EngineBatchReceived(key(), 0, device.batches[0]))
    harness.send(EngineBatchReceived(key(), 3, device.batches[3]))
    harness.answer(device, first=2)
    assert kinds(harness) == ["cleared", "stored", "cleared", "stored", "stored"]
    assert harness.events[2] == Cleared(
        host="h", source="sim-0", tier="device", epoch=1, seq=3, ts_ms=101_500, reason="gap"
    )
    assert harness.live[0] == device.truth()


def test_a_hole_in_a_replay_is_asked_for_again(harness: Harness) -> None:
    device = Device()
    for token in range(5):
        device.publish(device.store((token, token), 0))
    harness.send(EngineBatchReceived(key(), 4, device.batches[4]))
    asked = harness.replays.pop()
    for seq in (0, 1, 3):
        harness.send(EngineBatchReceived(asked.key, seq, device.batches[seq], asked.replay))
    harness.send(ReplayDone(asked.key, asked.replay))
    assert [replay.from_seq for replay in harness.replays] == [2]
    harness.answer(device)
    assert harness.live[0] == device.truth()


def test_an_empty_replay_from_before_a_gap_does_not_prove_the_loss() -> None:
    """1. A replay is asked for; the engine, which has nothing yet, ends it at once.
    2. Batch 0 is lost on the way, batch 1 arrives, and only then the end of the replay.
    3. The engine still has batch 0: it is asked for again, and nothing is lost."""
    device, harness = Device(), Harness()
    harness.attach(epoch=False)
    harness.grant()
    asked = harness.replays.pop()
    device.publish(device.store(PROMPT[:2], 0))
    device.publish(device.store(PROMPT, 1))
    harness.send(EngineBatchReceived(key(), 1, device.batches[1]))
    harness.send(ReplayDone(asked.key, asked.replay))
    assert [replay.from_seq for replay in harness.replays] == [0]
    harness.answer(device)
    assert harness.live[0] == device.truth() == set(BLOCKS)


def test_a_silent_replay_is_tried_thrice_then_done_without(harness: Harness) -> None:
    device = Device()
    harness.batch(0, stored(PROMPT))
    harness.batch(5, stored((7, 8)))
    for _ in range(3):
        assert harness.live[0] == set(BLOCKS)
        assert harness.answer(device, fail=True)
        harness.tick(2_000)
        harness.send(BeatReceived("sim-0", INCARNATION, b"peer0"))
    assert harness.core.statistics().drops["replay_failed"] == 3
    assert harness.live[0] == set(chain((7, 8)))
    harness.batch(6, stored((9, 9)))
    assert harness.live[0] == set(chain((7, 8)) + chain((9, 9)))


def test_without_a_replay_endpoint_a_gap_clears() -> None:
    harness = Harness()
    harness.attach(replay=False)
    harness.batch(3, stored(PROMPT))
    harness.batch(5, stored((7, 8)))
    assert kinds(harness) == ["cleared", "stored", "cleared", "stored"]
    assert harness.live[0] == set(chain((7, 8)))
    assert harness.core.statistics().replays == 0


def test_a_silent_stream_is_probed_less_and_less_often() -> None:
    """Goal: the loss of the last batch before a pause is found out."""
    harness = Harness(Limits(lost_after_ms=10**9))
    harness.attach()
    device = Device()
    device.publish(device.store(PROMPT, 0))
    harness.tick(1_000)
    assert harness.replays[0].from_seq == 0
    harness.answer(device)
    assert harness.live[0] == device.truth()
    probed_ms = []
    for _ in range(100):
        harness.tick(1_000)
        if harness.answer(device):
            probed_ms.append(harness.now_ms)
    pauses = [after - before for before, after in pairwise(probed_ms)]
    assert pauses == [4_000, 8_000, 16_000, 16_000, 16_000, 16_000, 16_000]


@pytest.mark.parametrize("replay", [True, False])
def test_a_restarted_publisher_gets_a_new_epoch(replay: bool) -> None:
    """The incarnation is the same, but sequence numbers begin again with later time stamps."""
    harness = Harness()
    harness.attach(replay=replay)
    harness.batch(0, stored(PROMPT), ts=10.0)
    harness.batch(1, stored((9, 9)), ts=11.0)
    device = Device()
    device.publish(device.store((7, 8), 0))
    harness.send(EngineBatchReceived(key(), 0, device.batches[0]))
    harness.grant()
    harness.answer(device)
    assert [(event.epoch, event.seq) for event in harness.events][-2:] == [(2, 1), (2, 2)]
    assert harness.live[0] == device.truth()
    assert harness.core.statistics().drops["restarted"] == 1


def test_a_restart_is_seen_though_the_clock_jumped_back(harness: Harness) -> None:
    harness.batch(0, stored(PROMPT), ts=10.0)
    harness.batch(0, stored(PROMPT), ts=9.0)
    assert harness.core.statistics().drops["restarted"] == 1


def test_answers_to_questions_of_another_life_are_stale(harness: Harness) -> None:
    """A replay asked for before a restart ends after it: it must not end the new one."""
    harness.batch(0, stored(PROMPT), ts=10.0)
    harness.tick(1_000)
    old = harness.replays.pop()
    harness.send(ReplayDone(old.key, old.replay))
    harness.batch(0, stored(PROMPT), ts=20.0)
    new = harness.replays[0]
    harness.send(ReplayDone(old.key, old.replay))
    harness.send(EngineBatchReceived(key(), 0, EngineBatch(20.0, ()), old.replay))
    assert harness.core.statistics().drops["stale_replay"] == 1
    assert harness.core.statistics().drops["stale_batch"] == 1
    assert new.replay != old.replay


def test_waiting_batches_are_bounded() -> None:
    harness = Harness(Limits(pending_batches_max=2))
    harness.attach()
    device = Device()
    for token in range(6):
        device.publish(device.store((token, token), 0))
    for seq in (1, 2, 3, 4):
        harness.send(EngineBatchReceived(key(), seq, device.batches[seq]))
    assert harness.core.statistics().pending_batches == 2
    assert harness.core.statistics().drops["pending_full"] == 2
    harness.answer(device)
    assert harness.live[0] == device.truth()


# ---- names -----------------------------------------------------------------------------------


def test_a_salted_prompt_has_other_names(harness: Harness) -> None:
    harness.batch(0, stored(PROMPT), stored(PROMPT, salt="tenant"))
    assert harness.live[0] == set(BLOCKS) | set(chain(PROMPT, salt="tenant"))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {}),
        ({"extra_keys": (("s",), None)}, {0: [(ExtraTag.SALT, b"s")]}),
        ({"extra_keys": (("s",), None), "parent": 5}, {0: [(ExtraTag.MULTIMODAL, b"s")]}),
        ({"extra_keys": (("l",), ("l",)), "lora_name": "l"}, {0: [(ExtraTag.LORA, b"l")]}),
        (
            {"extra_keys": (("l", "l"), ("l",)), "lora_name": "l"},
            {0: [(ExtraTag.SALT, b"l"), (ExtraTag.LORA, b"l")]},
        ),
        (
            {"extra_keys": ((("img", 3), "s"), ("img2",))},
            {
                0: [(ExtraTag.MULTIMODAL, b"img:3"), (ExtraTag.SALT, b"s")],
                1: [(ExtraTag.MULTIMODAL, b"img2")],
            },
        ),
        ({"extra_keys": (None, (7,))}, {1: [(ExtraTag.OTHER, b"\x07")]}),
        ({"cache_salt": "s"}, {0: [(ExtraTag.SALT, b"s")]}),
        ({"cache_salt": "s", "extra_keys": (("i",), None)},
         {0: [(ExtraTag.MULTIMODAL, b"i"), (ExtraTag.SALT, b"s")]}),
        ({"lora_id": 4}, {0: [(ExtraTag.LORA, b"#4")]}),
        ({"lora_name": "l", "parent": 5, "extra_keys": (("l",), ("l",))}, {}),
    ],
)  # fmt: skip
def test_extras_are_tagged(fields: dict[str, Any], expected: dict[int, Any]) -> None:
    event = BlockStored(block_hashes=(1, 2), token_ids=(1, 2, 3, 4), block_size=2)
    assert extras_of(msgspec.structs.replace(event, **fields)) == expected


def test_lora_and_salt_agree_with_the_request_s_own_name(harness: Harness) -> None:
    event = msgspec.structs.replace(
        stored(PROMPT), lora_name="poet", extra_keys=(("poet", "tenant"), ("poet",), ("poet",))
    )
    harness.batch(0, event)
    named = Hasher(NAMESPACE).chain(PROMPT, extras=request_extras(lora="poet", salt="tenant"))
    assert harness.live[0] == set(named)


def test_groups_have_namespaces_of_their_own(harness: Harness) -> None:
    harness.batch(0, stored(PROMPT), msgspec.structs.replace(stored(PROMPT), group_idx=1))
    first, second = harness.events[1:]
    assert isinstance(first, Stored)
    assert isinstance(second, Stored)
    assert (first.group, second.group) == (0, 1)
    assert first.namespace == NAMESPACE.digest.hex()
    assert second.namespace == msgspec.structs.replace(NAMESPACE, group=1).digest.hex()
    assert {run.hashes[0] for run in first.runs}.isdisjoint(second.runs[0].hashes)


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (stored(PROMPT, size=3), "block_size"),
        (msgspec.structs.replace(stored(PROMPT), medium="CPU"), "other_medium"),
        (msgspec.structs.replace(stored(PROMPT), locality="REMOTE"), "other_medium"),
        (msgspec.structs.replace(stored(PROMPT), token_ids=(1, 2, 3)), "short_tokens"),
        (msgspec.structs.replace(stored(PROMPT), token_ids=(*PROMPT, 7, 8)), "masked_blocks"),
        (msgspec.structs.replace(stored(PROMPT), token_ids=(1, 2, 3, 4, 5, -6)), "bad_tokens"),
        (msgspec.structs.replace(stored(PROMPT), block_hashes=(1, 1, 2)), "name_conflict"),
        (removed(12345), "removed_unknown"),
        (OtherEvent(type="New", reason="unknown_type"), "unknown_type"),
    ],
)
def test_what_cannot_be_named_is_dropped_and_counted(
    harness: Harness, event: BlockStored | BlockRemoved, reason: str
) -> None:
    harness.batch(0, event)
    harness.batch(1, stored((7, 8)))
    assert harness.core.statistics().drops[reason] > 0
    assert harness.live[0] == set(chain((7, 8)))


def test_one_engine_hash_for_two_contents_is_not_believed(harness: Harness) -> None:
    other = msgspec.structs.replace(stored((7, 8)), block_hashes=(engine_hash(PROMPT[:2]),))
    harness.batch(0, stored(PROMPT), other)
    assert harness.live[0] == set(BLOCKS)
    assert harness.core.statistics().drops["name_conflict"] == 1


# ---- counting and merging --------------------------------------------------------------------


def test_two_copies_are_one_block_until_both_are_gone(harness: Harness) -> None:
    last = engine_hash(PROMPT)
    harness.batch(0, stored(PROMPT))
    harness.batch(1, stored(PROMPT, start=2))
    harness.batch(2, removed(last))
    assert kinds(harness) == ["cleared", "stored"]
    harness.batch(3, removed(last))
    assert kinds(harness) == ["cleared", "stored", "removed"]
    assert harness.live[0] == set(BLOCKS[:2])


def test_a_batch_becomes_one_removal_and_one_store(harness: Harness) -> None:
    harness.batch(0, stored((7, 7)), stored((8, 8)))
    harness.batch(
        1,
        removed(engine_hash((7, 7))),
        stored(PROMPT[:4]),
        removed(engine_hash((8, 8))),
        stored(PROMPT, start=2),
    )
    assert kinds(harness) == ["cleared", "stored", "removed", "stored"]
    event = harness.events[-1]
    assert isinstance(event, Stored)
    assert [run.hashes for run in event.runs] == [[block.hex() for block in BLOCKS]]
    assert event.runs[0].parent == NAMESPACE.root.hex()


def test_batches_that_come_together_are_announced_together(harness: Harness) -> None:
    device = Device()
    for event in (device.store(PROMPT, 0), device.evict(0), device.store((7, 8), 0)):
        device.publish(event)
    together = tuple(enumerate(device.batches))
    harness.send(EngineBatchesReceived(key(), together))
    assert kinds(harness) == ["cleared", "stored", "removed", "stored"]
    assert harness.live[0] == device.truth()
    harness.send(EngineBatchesReceived(key(), together))
    assert harness.core.statistics().drops["duplicate"] == 3


def test_a_restart_among_batches_that_come_together(harness: Harness) -> None:
    """What came before it is of the old life, what comes after it waits for the replay."""
    old, device = Device(clock=1.0), Device(clock=50.0)
    old.publish(old.store(PROMPT, 0))
    old.publish(old.store((9, 9), 0))
    device.publish(device.store((7, 8), 0))
    device.publish(device.store((5, 5), 0))
    batches = (*enumerate(old.batches), *enumerate(device.batches))
    harness.send(EngineBatchesReceived(key(), batches))
    harness.grant()
    harness.answer(device)
    assert kinds(harness)[:3] == ["cleared", "cleared", "cleared"]
    assert harness.live[0] == device.truth()


def test_a_block_that_comes_and_goes_keeps_its_order(harness: Harness) -> None:
    short = stored((7, 7))
    gone = removed(engine_hash((7, 7)))
    harness.batch(0, short, gone, short, gone, short)
    assert kinds(harness) == ["cleared", "stored", "removed", "stored", "removed", "stored"]
    assert harness.live[0] == set(chain((7, 7)))


def test_a_clear_in_a_batch_swallows_what_came_before_it(harness: Harness) -> None:
    harness.batch(0, stored(PROMPT), AllBlocksCleared(), stored((7, 7)))
    assert kinds(harness) == ["cleared", "cleared", "stored"]
    assert harness.live[0] == set(chain((7, 7)))


def test_long_events_are_cut() -> None:
    tokens = tuple(range(10_000))
    harness = Harness()
    harness.attach()
    harness.batch(0, stored(tokens))
    sizes = [
        sum(len(run.hashes) for run in event.runs)
        for event in harness.events
        if isinstance(event, Stored)
    ]
    assert sizes == [4096, 904]
    runs = [run for event in harness.events if isinstance(event, Stored) for run in event.runs]
    assert all(before.hashes[-1] == after.parent for before, after in pairwise(runs))
    harness.batch(1, removed(*stored(tokens).block_hashes))  # type: ignore[arg-type]
    assert harness.live[0] == set()


def test_ranks_are_apart_and_are_cleared_apart(harness: Harness) -> None:
    harness.send(StreamAttached(attach(rank=1), b"peer1"))
    assert [type(effect) for effect in harness.other][-2:] == [Subscribe, Describe]
    harness.answer(Device())
    for rank in (0, 1):
        harness.batch(0, stored(PROMPT), rank=rank)
    harness.batch(1, AllBlocksCleared(), rank=1)
    event = harness.events[-1]
    assert isinstance(event, Cleared)
    assert (event.rank, event.rank_only) == (1, True)
    assert harness.live == {0: set(BLOCKS), 1: set()}


# ---- orphans ---------------------------------------------------------------------------------


def test_an_orphan_waits_for_its_parent(harness: Harness) -> None:
    harness.batch(0, stored(PROMPT, start=2))
    harness.batch(1, stored(PROMPT[:4], start=1))
    assert harness.core.statistics().orphan_blocks == 2
    assert kinds(harness) == ["cleared"]
    harness.batch(2, stored(PROMPT[:2]))
    assert harness.live[0] == set(BLOCKS)
    assert harness.core.statistics().orphan_blocks == 0


def test_an_orphan_that_was_removed_meanwhile_does_not_stay(harness: Harness) -> None:
    harness.batch(0, stored(PROMPT, start=1))
    harness.batch(1, removed(engine_hash(PROMPT)))
    harness.batch(2, stored(PROMPT[:2]))
    assert harness.live[0] == set(BLOCKS[:2])


def test_an_old_orphan_asks_for_a_replay_and_is_then_dropped(harness: Harness) -> None:
    harness.batch(0, stored(PROMPT, start=1))
    harness.tick(500)
    assert harness.replays == []
    harness.tick(2_000)
    assert [replay.from_seq for replay in harness.replays] == [1]
    harness.answer(Device())
    assert harness.core.statistics().orphan_blocks == 0
    assert harness.core.statistics().drops["orphan"] == 2
    assert kinds(harness) == ["cleared"]


def test_an_old_orphan_finds_its_parent_in_the_replay(harness: Harness) -> None:
    device = Device()
    device.publish(stored(PROMPT, start=1))
    device.publish(stored(PROMPT[:2]))
    harness.send(EngineBatchReceived(key(), 0, device.batches[0]))
    harness.tick(2_000)
    harness.answer(device)
    assert harness.live[0] == set(BLOCKS)


def test_orphans_are_bounded() -> None:
    harness = Harness(Limits(orphan_blocks_max=2))
    harness.attach()
    harness.batch(0, stored(PROMPT, start=1), stored((*PROMPT, 7, 8), start=3))
    assert harness.core.statistics().orphan_blocks == 2
    assert harness.core.statistics().drops["orphans_full"] == 1


def test_a_removed_parent_is_still_a_parent(harness: Harness) -> None:
    """A sliding window may drop a block and then store the one after it."""
    harness.batch(0, stored(PROMPT[:4]), removed(engine_hash(PROMPT[:4])))
    harness.batch(1, stored(PROMPT, start=2))
    assert harness.live[0] == {BLOCKS[0], BLOCKS[2]}


# ---- questions -------------------------------------------------------------------------------


def test_a_snapshot_says_what_the_events_said(harness: Harness) -> None:
    harness.send(StreamAttached(attach(rank=1), b"peer1"))
    harness.answer(Device())
    harness.batch(0, stored(PROMPT), stored((7, 7)))
    harness.batch(0, stored((1, 2, 9, 9)), rank=1)
    snapshot = harness.core.snapshot("sim-0")
    assert snapshot is not None
    assert (snapshot.epoch, snapshot.seq) == (1, 3)
    assert {part.rank: {text for run in part.runs for text in run.hashes}
            for part in snapshot.parts} == {
        rank: {block.hex() for block in blocks} for rank, blocks in harness.live.items()
    }  # fmt: skip
    assert harness.core.snapshot("nobody") is None


def test_a_story_names_the_events_of_a_block(harness: Harness) -> None:
    harness.batch(0, stored(PROMPT))
    harness.batch(1, removed(engine_hash(PROMPT)))
    assert harness.core.story(BLOCKS[2]) == [
        "0 ms cleared sim-0 rank 0 epoch 1 seq 1",
        "0 ms stored sim-0 rank 0 epoch 1 seq 2",
        "0 ms removed sim-0 rank 0 epoch 1 seq 3",
    ]


# ---- a real engine and random ones -------------------------------------------------------------


def test_the_capture_agrees_with_its_ground_truth() -> None:
    """Goal: from a real vLLM's frames to our events, everything is explained.

    1. The core follows the capture; at no time does it hold more than 64 blocks.
    2. What was ever announced is exactly the full blocks of the 240 requests, salts and all.
    3. What vLLM says it found in its cache for a request was announced live around that time.
    """
    harness = Harness()
    engine = msgspec.structs.replace(attach(), namespace=capture.NAMESPACE)
    harness.send(StreamAttached(engine, b"peer0"))
    harness.grant()
    harness.answer(Device())
    ever: set[SequenceHash] = set()
    history: list[tuple[int, set[SequenceHash]]] = [(0, set())]
    for received_ns, frames in capture.load_messages():
        frame = split_published(frames)
        harness.send(EngineBatchReceived(key(), frame.seq, decode_batch(frame.payload)))
        assert len(harness.live[0]) <= capture.DEVICE_BLOCKS
        ever |= harness.live[0]
        history.append((received_ns, set(harness.live[0])))
    hasher = Hasher(capture.NAMESPACE)
    truth: set[SequenceHash] = set()
    slack_ns = 1_000_000_000  # The capture's recorder lags the engine by up to this.
    for request in capture.load_requests():
        blocks = hasher.chain(request.computed, extras=request_extras(salt=request.cache_salt))
        truth.update(blocks)
        cached = set(blocks[: request.cached_blocks])
        assert any(
            cached <= live
            for (from_ns, live), (to_ns, _) in pairwise([*history, (2**63, set())])
            if from_ns <= request.end_ns + slack_ns and to_ns >= request.start_ns
        ), f"request {request.n}"
    assert ever == truth
    assert harness.core.statistics().drops["orphan"] == 0


Action = tuple[str, int, int]
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["store", "store", "store", "evict", "evict", "copy", "clear", "lose", "repeat",
             "answer", "fail", "tick"]
        ),
        st.integers(0, 7),
        st.integers(1, 3),
    ),
    max_size=60,
)  # fmt: skip


def act(device: Device, harness: Harness, action: Action, lost: set[int]) -> None:
    """One thing happens in the engine, on the way, or to time."""
    name, a, b = action
    held = sorted(+device.copies)
    match name:
        case "store":
            base = held[a % len(held)] if held and a % 3 else ()
            tokens = base + tuple(x for i in range(b) for x in (a, i))
            if tokens[: len(base) + 2] not in device.copies:
                deliver(device, harness, device.publish(device.store(tokens, len(base) // 2)))
        case "copy" if held:
            prefix = held[a % len(held)]
            deliver(device, harness, device.publish(device.store(prefix, len(prefix) // 2 - 1)))
        case "evict" if held:
            events = [device.evict(a) for _ in range(min(b, sum(device.copies.values())))]
            deliver(device, harness, device.publish(*events))
        case "clear" if a == 0:
            deliver(device, harness, device.publish(device.clear()))
        case "lose":
            lost.update(range(len(device.batches), len(device.batches) + b))
        case "repeat" if device.batches:
            deliver(device, harness, a % len(device.batches))
        case "answer":
            harness.answer(device)
        case "fail":
            harness.answer(device, fail=True)
        case "tick":
            harness.tick(b * 300)


def deliver(device: Device, harness: Harness, seq: int) -> None:
    """A live batch arrives."""
    harness.send(EngineBatchReceived(key(), seq, device.batches[seq]))


class LossyHarness(Harness):
    """Loses live batches whose number is in `lost`."""

    lost: set[int]

    def send(self, event: Any) -> Any:
        """As Harness, unless the batch is lost."""
        if isinstance(event, EngineBatchReceived) and not event.replay and event.seq in self.lost:
            return []
        return super().send(event)


@settings(max_examples=100, deadline=None)
@given(ACTIONS)
def test_the_published_set_is_the_engine_s_true_set(actions: list[Action]) -> None:
    """Goal: duplicates, gaps, replays and silence never make a wrong or a missing entry.

    1. Random stores, copies, evictions and clears; random losses and repetitions on the way.
       The harness checks with every event that stored and removed alternate.
    2. In the end the engine falls silent, the probe asks, the replay is answered.
    3. What a reader of the events believes is what the engine holds, and so is the snapshot.
    """
    device, harness = Device(), LossyHarness(Limits(replay_attempts_max=100, lost_after_ms=10**9))
    harness.lost = set()
    harness.attach()
    for action in actions:
        act(device, harness, action, harness.lost)
    for _ in range(5):
        harness.tick(10_000)
        while harness.answer(device):
            pass
    assert harness.live.get(0, set()) == device.truth()
    assert {block for _, _, block in harness.core.held("sim-0")} == device.truth()


@settings(max_examples=100, deadline=None)
@given(ACTIONS, st.integers(1, 10))
def test_nothing_untrue_is_published_when_the_buffer_is_short(
    actions: list[Action], buffer: int
) -> None:
    """As above, but the engine's buffer holds only the last batches, and replays fail for good.

    Then blocks may be missing from what we say, and never is there one that the engine lacks.
    """
    device, harness = Device(), LossyHarness(Limits(replay_attempts_max=2, lost_after_ms=10**9))
    harness.lost = set()
    harness.attach()
    for action in actions:
        if action[0] == "answer":
            harness.answer(device, first=max(0, len(device.batches) - buffer))
        else:
            act(device, harness, action, harness.lost)
    for _ in range(8):
        harness.tick(10_000)
        while harness.answer(device, first=max(0, len(device.batches) - buffer)):
            pass
    assert harness.live.get(0, set()) <= device.truth()


def test_removed_events_say_why(harness: Harness) -> None:
    harness.batch(0, stored(PROMPT))
    effects = harness.send(
        EngineBatchReceived(key(), 1, EngineBatch(3.0, (removed(engine_hash(PROMPT)),)))
    )
    assert isinstance(effects[0], Publish)
    event = effects[0].event
    assert isinstance(event, Removed)
    assert (event.reason, event.ts_ms, event.hashes) == ("evicted", 3_000, [BLOCKS[2].hex()])
