"""The consolidator's core, without IO: lives of engines, and questions."""

from __future__ import annotations

import msgspec
import pytest
from kvbm_common.wire.consolidator import Attached
from kvbm_common.wire.events import Cleared
from kvbm_common.wire.local import Refused
from kvbm_connectors.consolidator.core.engines import EnginesCore
from kvbm_connectors.consolidator.core.messages import (
    AskEpoch,
    BeatReceived,
    ConsolidatorLimits,
    EngineDetached,
    EngineLeft,
    EpochFailed,
    EpochGranted,
    RequestReplay,
    RevokeEpoch,
    StreamAttached,
    Subscribe,
    Tick,
    Unsubscribe,
)

from tests.connectors.consolidator.model import (
    BLOCKS,
    INCARNATION,
    NAMESPACE,
    PROMPT,
    Device,
    Harness,
    attach,
    engine_hash,
    key,
    kinds,
    removed,
    stored,
    whole_of,
)

OTHER_INCARNATION = "00000000000000bb"


def test_an_attach_subscribes_replays_and_asks_for_an_epoch() -> None:
    harness = Harness()
    effects = harness.send(StreamAttached(attach(), b"peer"))
    digest = NAMESPACE.digest.hex()
    assert effects == [
        Subscribe(key(), "ipc://pub0", ""),
        RequestReplay(key(), "ipc://replay0", 0, 1),
        AskEpoch(1, "sim-0", INCARNATION, (0,), (digest,), ((0, digest),)),
    ]
    harness.send(EpochGranted("sim-0", 1, 7))
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
    assert whole_of(harness.core.snapshot_pages("sim-0")) is None
    harness.grant()
    assert kinds(harness) == ["cleared", "stored"]
    assert harness.live[0] == set(BLOCKS)


def test_a_refused_epoch_is_asked_for_again() -> None:
    harness = Harness()
    harness.attach(epoch=False)
    harness.other.clear()
    harness.send(EpochFailed("sim-0", 1))
    harness.tick(100)
    assert harness.other == []
    harness.tick(500)
    assert [type(effect) for effect in harness.other] == [AskEpoch]


def test_an_epoch_for_a_life_that_was_left_is_not_the_next_one_s() -> None:
    """Goal: the registry and the stream say one epoch, also of an engine that comes again at once.

    1. An engine leaves and attaches again, in the same life, while its epoch is asked for.
    2. The first answer comes, then its entry is revoked: it counts for nothing, granted or failed.
    3. The answer to the second question is taken.
    """
    harness = Harness()
    harness.send(StreamAttached(attach(), b"peer"))
    harness.send(EngineDetached("sim-0", INCARNATION))
    harness.send(StreamAttached(attach(), b"peer"))
    harness.send(EpochGranted("sim-0", 1, 7))
    harness.send(EpochFailed("sim-0", 1))
    assert harness.core.positions() == {"sim-0": (0, 0)}
    assert harness.core.statistics().drops["stale_epoch"] == 1
    assert [harness.core.awaits("sim-0", ask) for ask in (1, 2)] == [False, True]
    harness.send(EpochGranted("sim-0", 2, 8))
    assert harness.core.positions()["sim-0"][0] == 8


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
    harness.grant()
    assert kinds(harness) == ["cleared", "stored", "cleared", "cleared"]
    harness.batch(1, stored((9, 9)))
    assert harness.core.statistics().drops["stale_batch"] == 1


def test_an_engine_taken_over_elsewhere_is_let_go(harness: Harness) -> None:
    harness.send(EngineLeft("sim-0", epoch=99, reason="superseded"))
    assert harness.core.knows("sim-0", INCARNATION)
    harness.send(EngineLeft("sim-0", epoch=1, reason="superseded"))
    assert not harness.core.knows("sim-0", INCARNATION)


@pytest.mark.parametrize("name", ["host-tier-0", "disk-tier-7"])
def test_an_engine_with_the_name_of_a_tier_is_refused(name: str) -> None:
    harness = Harness()
    harness.send(StreamAttached(attach(engine=name), b"peer"))
    assert isinstance(harness.replies[0][1], Refused)
    assert harness.replies[0][1].code == "bad_engine"


def test_streams_are_bounded() -> None:
    harness = Harness(ConsolidatorLimits(streams_max=1))
    harness.attach()
    harness.send(StreamAttached(attach(rank=1), b"peer"))
    assert isinstance(harness.replies[-1][1], Refused)
    assert harness.replies[-1][1].code == "too_many_streams"


def test_a_snapshot_says_what_the_events_said(harness: Harness) -> None:
    harness.send(StreamAttached(attach(rank=1), b"peer1"))
    harness.answer(Device())
    harness.batch(0, stored(PROMPT), stored((7, 7)))
    harness.batch(0, stored((1, 2, 9, 9)), rank=1)
    snapshot = whole_of(harness.core.snapshot_pages("sim-0"))
    assert snapshot is not None
    assert (snapshot.epoch, snapshot.seq) == (1, 3)
    assert {part.rank: {text for run in part.runs for text in run.hashes}
            for part in snapshot.parts} == {
        rank: {block.hex() for block in blocks} for rank, blocks in harness.live.items()
    }  # fmt: skip
    assert whole_of(harness.core.snapshot_pages("nobody")) is None


def test_a_story_names_the_events_of_a_block(harness: Harness) -> None:
    harness.batch(0, stored(PROMPT))
    harness.batch(1, removed(engine_hash(PROMPT)))
    assert harness.core.story(BLOCKS[2]) == [
        "0 ms cleared sim-0 rank 0 epoch 1 seq 1",
        "0 ms stored sim-0 rank 0 epoch 1 seq 2",
        "0 ms removed sim-0 rank 0 epoch 1 seq 3",
    ]


def passing(core: EnginesCore) -> list[tuple[str, str]]:
    """The engines without a cache, and why."""
    return [(one.engine, one.passes_through) for one in core.passing_through()]


def test_an_engine_without_a_cache_is_listed_with_its_reason() -> None:
    """1. It attaches, without a stream. 2. It is listed and counted. 3. It leaves."""
    harness = Harness()
    said = msgspec.structs.replace(attach(), endpoint="", replay_endpoint="", passes_through="why")
    harness.send(StreamAttached(said, b"peer"))
    harness.grant()
    assert passing(harness.core) == [("sim-0", "why")]
    assert harness.core.statistics().passing_through == 1
    assert whole_of(harness.core.snapshot_pages("sim-0")) is not None
    harness.send(EngineDetached("sim-0", INCARNATION))
    assert passing(harness.core) == []
    assert harness.core.statistics().passing_through == 0


def test_an_engine_that_loses_its_cache_says_why_later(harness: Harness) -> None:
    """Goal: the stream goes on, and its blocks stay."""
    harness.batch(0, stored(PROMPT))
    assert passing(harness.core) == []
    harness.send(StreamAttached(msgspec.structs.replace(attach(), passes_through="why"), b"peer"))
    assert passing(harness.core) == [("sim-0", "why")]
    assert harness.live[0] == set(BLOCKS)
