"""Orphans: compared with a list that is searched from its front to its end."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st
from kvbm_common.wire.engine_events import BlockStored
from kvbm_connectors.consolidator.core.orphans import Orphan, Orphans

BLOCKS = st.integers(1, 6)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), BLOCKS, st.lists(BLOCKS, min_size=1, max_size=4)),
        st.tuples(st.just("remove"), BLOCKS),
        st.tuples(st.just("adopt"), BLOCKS),
        st.tuples(st.just("drop"), st.integers(0, 40)),
        st.tuples(st.just("clear")),
    ),
    max_size=40,
)


def event(parent: int, blocks: list[int]) -> BlockStored:
    """Blocks of one token each, after a parent."""
    return BlockStored(
        block_hashes=tuple(blocks), parent=parent, token_ids=(0,) * len(blocks), block_size=1
    )


def held(waiting: list[Orphan]) -> list[int]:
    """Return all blocks that wait, those of one name as often as they do."""
    return sorted(int(block) for one in waiting for block in one.left())


@given(STEPS)
def test_it_is_a_list_of_events_that_wait(steps: list[tuple[object, ...]]) -> None:
    orphans, waiting = Orphans(blocks_max=30), list[Orphan]()
    for at_ms, step in enumerate(steps):
        match step:
            case ("add", int(parent), list(blocks)):
                fits = sum(len(one.event.block_hashes) for one in waiting) + len(blocks) <= 30
                assert orphans.add(0, event(parent, blocks), at_ms) == fits
                if fits:
                    waiting.append(Orphan(0, event(parent, blocks), at_ms))
            case ("remove", int(block)):
                holder = next((one for one in reversed(waiting) if block in one.left()), None)
                assert orphans.remove(0, block) == (holder is not None)
                assert not orphans.remove(1, block)
                if holder is not None:
                    holder.removed.append(block)
            case ("adopt", int(block)):
                adopted = [one for one in waiting if one.event.parent == block]
                waiting = [one for one in waiting if one.event.parent != block]
                assert held(orphans.adopt(0, (block,))) == held(adopted)
            case ("drop", int(before_ms)):
                assert orphans.condemn(before_ms) == any(o.since_ms <= before_ms for o in waiting)
                dropped = [one for one in waiting if one.since_ms <= before_ms]
                waiting = [one for one in waiting if one.since_ms > before_ms]
                count = sum(len(one.event.block_hashes) for one in dropped)
                assert orphans.drop_condemned() == count
            case _:
                orphans.clear()
                waiting = []
        orphans.check()
    assert held(orphans.adopt(0, tuple(range(1, 7)))) == held(waiting)


def test_a_removal_costs_the_same_whatever_waits() -> None:
    """A thousand removals of unknown blocks looked through 16,000 that waited: four seconds."""

    def per_removal(waiting: int) -> float:
        orphans = Orphans(blocks_max=waiting)
        for number in range(waiting):
            orphans.add(0, event(1_000_000 + number, [number]), 0)
        began_s = time.thread_time()
        for number in range(1_000):
            orphans.remove(0, 2_000_000 + number)
        return time.thread_time() - began_s

    assert min(per_removal(8_000) for _ in range(5)) < 10 * min(per_removal(8) for _ in range(5))
