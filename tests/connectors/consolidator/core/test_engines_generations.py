"""The consolidator's core, without IO: what a connector says its blocks are named by, and when."""

from __future__ import annotations

import pytest
from kvbm_common.identity import SequenceHash, lora_extra, request_extras
from kvbm_common.wire.consolidator import Attached
from kvbm_common.wire.engine_events import (
    AllBlocksCleared,
    BlockStored,
    EngineBatch,
    EngineEvent,
)
from kvbm_common.wire.local_fields import Adapter
from kvbm_connectors.consolidator.core import sequencer
from kvbm_connectors.consolidator.core.messages import ConsolidatorLimits, StreamAttached
from msgspec.structs import replace

from tests.connectors.consolidator.model import (
    BLOCKS,
    HASHER,
    PROMPT,
    Device,
    Harness,
    attach,
    batch_received,
    key,
    kinds,
    removed,
    stored,
)

NEW = "00000000000000f1"
NEWER = "00000000000000f2"
POET = Adapter(id=7, name="poet", content="aa")


def said(
    *,
    generation: str = "",
    since: float = 0.0,
    adapters: tuple[Adapter, ...] | None = None,
    replay: bool = True,
) -> StreamAttached:
    """What the connector says. A batch of the harness has the time 100 + its number."""
    attached = replace(
        attach(replay=replay), generation=generation, generation_us=int(since * 1e6),
        adapters=None if adapters is None else list(adapters),
    )  # fmt: skip
    return StreamAttached(attached, b"peer0")


def say(
    harness: Harness, *, generation: str = "", since: float = 0.0,
    adapters: tuple[Adapter, ...] | None = None,
) -> None:  # fmt: skip
    """The connector says it again."""
    harness.send(said(generation=generation, since=since, adapters=adapters))


class Played:
    """An engine whose batches are kept, so that its replays are true."""

    def __init__(self, harness: Harness) -> None:
        self.harness, self.device = harness, Device(clock=99.0)

    def batch(self, *events: EngineEvent, heard: bool = True) -> None:
        """Publish a batch, one second after the last one."""
        self.device.clock += 0.5
        seq = self.device.publish(*events)
        if heard:
            self.harness.send(batch_received(key(), seq, self.device.batches[seq]))

    def answer(self, first: int = 0) -> bool:
        """Answer a replay that was asked for, from the batches that are still kept."""
        return self.harness.answer(self.device, first=first)


def names(generation: str = "", lora: str = "") -> set[SequenceHash]:
    """Of the prompt's blocks."""
    return set(HASHER.chain(PROMPT, extras=request_extras(lora=lora, generation=generation)))


def poem(tokens: tuple[int, ...] = PROMPT, start: int = 0) -> BlockStored:
    """The prompt's blocks, computed with the adapter."""
    event = stored(tokens, start=start)
    keys = tuple(("poet",) for _ in event.block_hashes)
    return replace(event, lora_name="poet", lora_id=7, extra_keys=keys)


def adapted() -> Harness:
    """An engine that says what its adapters are, and has none yet."""
    harness = Harness(ConsolidatorLimits(orphan_age_ms=1_000))
    harness.send(StreamAttached(replace(attach(), adapters=[]), b"peer0"))
    harness.grant()
    harness.answer(Device())
    return harness


def test_a_generation_begins_with_the_clear_behind_it(harness: Harness) -> None:
    """What was published before the clear has the old names, whatever comes first."""
    harness.batch(0, stored(PROMPT))
    say(harness, generation=NEW)
    assert harness.live[0] == set(BLOCKS)
    harness.batch(1, AllBlocksCleared(), stored(PROMPT))
    assert harness.live[0] == names(NEW)
    assert "cleared" in kinds(harness)[2:]
    harness.batch(2, removed(*stored(PROMPT).block_hashes))
    assert not harness.live[0]


def test_a_generation_said_again_goes_on_with_the_stream(harness: Harness) -> None:
    """The engine lives on: its epoch stays, and it hears that we know."""
    harness.batch(0, stored(PROMPT))
    say(harness, generation=NEW)
    assert harness.epoch == 1
    assert harness.live[0] == set(BLOCKS)
    answer = harness.replies[-1][1]
    assert isinstance(answer, Attached)
    assert answer.generation == NEW


def test_two_resets_before_a_clear_leave_the_last_one(harness: Harness) -> None:
    """A reset that the engine refused is tried again."""
    say(harness, generation=NEW)
    say(harness, generation=NEWER)
    harness.batch(0, AllBlocksCleared(), stored(PROMPT))
    assert harness.live[0] == names(NEWER)


def test_a_clear_without_a_reset_keeps_the_generation(harness: Harness) -> None:
    """The engine has emptied its own cache alone."""
    say(harness, generation=NEW)
    harness.batch(0, AllBlocksCleared(), stored(PROMPT))
    harness.batch(1, AllBlocksCleared(), stored(PROMPT))
    assert harness.live[0] == names(NEW)


def test_a_stream_that_is_first_attached_after_a_reset(harness: Harness) -> None:
    """A consolidator that starts late names everything by the present generation."""
    late = Harness()
    late.send(StreamAttached(replace(attach(), generation=NEW), b"p"))
    late.grant()
    late.answer(Device())
    late.batch(0, stored(PROMPT))
    assert late.live[0] == names(NEW)


def test_a_generation_that_is_announced_late_names_its_blocks_again(harness: Harness) -> None:
    """The clear and its blocks came before the announcement: they are read again."""
    engine = Played(harness)
    engine.batch(stored(PROMPT[:2]))
    engine.batch(AllBlocksCleared(), stored(PROMPT))
    engine.batch(stored((9, 9)))
    say(harness, generation=NEW, since=100.5)
    assert not harness.live.get(0)
    assert harness.replays[-1].from_seq == 1
    engine.batch(removed(*stored((9, 9)).block_hashes))
    assert not harness.live.get(0)
    assert engine.answer()
    assert harness.live[0] == names(NEW)
    assert not harness.core.statistics().drops.get("generation_late")


def test_a_late_generation_of_an_engine_that_keeps_nothing() -> None:
    """It has no replays, or has dropped those batches: the blocks are left out, and counted."""
    harness = Harness()
    harness.send(said(replay=False))
    harness.grant()
    harness.batch(0, AllBlocksCleared(), stored(PROMPT))
    harness.send(said(replay=False, generation=NEW, since=99.5))
    assert not harness.live.get(0)
    assert harness.core.statistics().drops["generation_late"] == 3
    harness.batch(1, stored(PROMPT, start=2))
    harness.batch(2, stored((7, 8)))
    assert len(harness.live[0]) == 1
    assert harness.live[0].isdisjoint(HASHER.chain((7, 8)))
    engine = Played(Harness())
    engine.harness.attach()
    engine.batch(AllBlocksCleared(), stored(PROMPT))
    engine.batch(stored((7, 8)))
    say(engine.harness, generation=NEW, since=99.5)
    assert engine.answer(first=1)
    assert len(engine.harness.live[0]) == 1
    assert engine.harness.live[0].isdisjoint(HASHER.chain((7, 8)))


def test_a_late_generation_whose_beginning_is_not_remembered(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is asked for everything; what is older is left out again."""
    monkeypatch.setattr(sequencer, "RECENT_MAX", 2)
    engine = Played(harness)
    engine.batch(stored((7, 8)))
    engine.batch(AllBlocksCleared(), stored(PROMPT))
    for tokens in ((1, 1), (2, 2), (3, 3)):
        engine.batch(stored(tokens))
    say(harness, generation=NEW, since=100.5)
    before = len(harness.events)
    assert harness.replays[-1].from_seq == 0
    assert engine.answer()
    assert len(harness.live[0]) == 6
    assert names(NEW) <= harness.live[0]
    assert HASHER.chain((7, 8))[0].hex() not in str(harness.events[before:])


def test_a_late_generation_takes_nothing_of_before(harness: Harness) -> None:
    """An old block that was stored before the clear keeps the old generation until then."""
    engine = Played(harness)
    engine.batch(stored(PROMPT))
    engine.batch(stored((7, 8)), heard=False)
    say(harness, generation=NEW, since=101.5)
    engine.batch(AllBlocksCleared(), stored(PROMPT), heard=False)
    assert harness.live[0] == set(BLOCKS)
    for seq in (1, 2):
        harness.send(batch_received(key(), seq, engine.device.batches[seq]))
        expected = names(NEW) if seq == 2 else {*BLOCKS, *HASHER.chain((7, 8))}
        assert harness.live[0] == expected


def test_a_clear_of_before_the_generation_begins_nothing(harness: Harness) -> None:
    """A plain reset whose event is under way when the announcement overtakes it."""
    harness.batch(0, stored(PROMPT))
    say(harness, generation=NEW, since=102.5)
    harness.batch(1, AllBlocksCleared())
    harness.batch(2, stored(PROMPT))
    assert harness.live[0] == set(BLOCKS)
    harness.batch(3, AllBlocksCleared(), stored(PROMPT))
    assert harness.live[0] == names(NEW)


@pytest.mark.parametrize("is_late", [False, True], ids=["before", "after"])
def test_a_generation_is_announced_again_after_the_clock_was_set_back(
    harness: Harness, is_late: bool
) -> None:
    """Its first announcement has a time that no event reaches for long. The second one counts."""
    engine = Played(harness)
    engine.batch(stored(PROMPT))
    say(harness, generation=NEW, since=3_700.5)
    if not is_late:
        say(harness, generation=NEW, since=100.5)
    engine.batch(AllBlocksCleared(), stored(PROMPT))
    if is_late:
        say(harness, generation=NEW, since=100.5)
        assert not harness.live.get(0)
        assert engine.answer()
    assert harness.live[0] == names(NEW)


def test_a_generation_begins_in_an_empty_cache(harness: Harness) -> None:
    """The clear was published before anybody noticed it; nothing was stored between the two."""
    harness.batch(0, stored(PROMPT))
    harness.batch(1, AllBlocksCleared())
    say(harness, generation=NEW, since=101.5)
    harness.batch(2, stored(PROMPT))
    assert harness.live[0] == names(NEW)


def test_a_consolidator_that_starts_late_leaves_out_what_is_older() -> None:
    """Its first announcement is of the present generation: it knows no name of an older one."""
    harness = Harness()
    harness.send(said(generation=NEW, since=101.5))
    harness.grant()
    engine = Played(harness)
    engine.batch(stored(PROMPT), heard=False)
    engine.batch(stored((7, 8)), heard=False)
    assert engine.answer()
    assert not harness.live.get(0)
    assert harness.core.statistics().drops["generation_unknown"] == 4
    engine.batch(removed(*stored((7, 8)).block_hashes), AllBlocksCleared(), stored(PROMPT))
    assert harness.live[0] == names(NEW)


def test_a_gap_is_named_by_the_time_behind_it(harness: Harness) -> None:
    """Whether the clear was in the gap, the next batch's time says."""
    harness.batch(0, stored(PROMPT))
    say(harness, generation=NEW, since=105.5)
    for seq, expected in ((5, HASHER.chain((7, 8))), (9, None)):
        harness.batch(seq, stored((7, 8)))
        assert harness.answer(Device())
        harness.tick()
        while harness.answer(Device(), fail=True):
            harness.tick(5_000)
        assert len(harness.live[0]) == 1
        assert (harness.live[0] == set(expected or ())) == (expected is not None)


def test_an_adapter_counts_from_its_generation_on() -> None:
    """What is stored of before has the content that the adapter had then."""
    harness = adapted()
    say(harness, adapters=(POET,))
    say(harness, generation=NEW, since=100.5, adapters=())
    say(harness, generation=NEW, since=100.5, adapters=(replace(POET, content="bb"),))
    harness.batch(0, poem())
    assert harness.live[0] == names(lora=lora_extra("poet", "aa"))
    harness.batch(1, AllBlocksCleared(), poem())
    assert harness.live[0] == names(NEW, lora_extra("poet", "bb"))


def test_each_rank_has_its_own_generation() -> None:
    """Data-parallel ranks reset each for itself."""
    harness = Harness()
    for rank in (0, 1):
        harness.attach(rank=rank)
    for rank in (0, 1):
        harness.batch(0, AllBlocksCleared(), stored(PROMPT), rank=rank)
    late = replace(attach(rank=1), generation=NEW, generation_us=99_500_000)
    harness.send(StreamAttached(late, b"peer1"))
    device = Device()
    device.batches.append(EngineBatch(100.0, (AllBlocksCleared(), stored(PROMPT)), 0))
    harness.replays = [one for one in harness.replays if one.key.rank == 1]
    assert harness.answer(device)
    assert harness.live == {0: set(BLOCKS), 1: names(NEW)}


def test_an_adapter_is_named_by_its_content() -> None:
    """As the connector names it."""
    harness = adapted()
    say(harness, adapters=(POET,))
    harness.batch(0, poem())
    assert harness.live[0] == names(lora=lora_extra("poet", "aa"))


def test_blocks_wait_until_their_adapter_is_known() -> None:
    """Events may overtake the connector's word; what follows them waits with them."""
    harness = adapted()
    harness.batch(0, poem(PROMPT[:4]))
    harness.batch(1, poem(PROMPT, start=2))
    assert not harness.live.get(0)
    say(harness, adapters=(POET,))
    assert harness.live[0] == names(lora=lora_extra("poet", "aa"))


def test_blocks_that_wait_and_are_removed_do_not_come() -> None:
    """What the engine has dropped meanwhile is not held."""
    harness = adapted()
    event = poem()
    harness.batch(0, event)
    harness.batch(1, removed(event.block_hashes[-1]))
    say(harness, adapters=(POET,))
    assert len(harness.live[0]) == 2


def test_blocks_of_an_adapter_that_nobody_explains_are_left_out() -> None:
    """Better no name than a wrong one; they are counted."""
    harness = adapted()
    harness.batch(0, poem())
    for _ in range(4):
        harness.tick(1_000)
        harness.answer(Device(), first=1)
    assert harness.core.statistics().drops["orphan"] == 3
    assert not harness.core.statistics().orphan_blocks
    say(harness, adapters=(POET,))
    assert not harness.live.get(0)


def test_another_number_is_another_adapter() -> None:
    """The same name may stand for two adapters at once: numbers tell them apart."""
    harness = adapted()
    say(harness, adapters=(replace(POET, id=8, content="bb"), POET))
    harness.batch(0, poem())
    assert harness.live[0] == names(lora=lora_extra("poet", "aa"))
