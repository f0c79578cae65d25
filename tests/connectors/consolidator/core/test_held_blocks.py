"""What one KV group of a rank holds, in the engine's names and in ours."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st
from kvbm_common.identity import Hasher, Namespace
from kvbm_connectors.consolidator.core.held_blocks import HeldBlocks

from tests.connectors.consolidator.model import NAMESPACE

TOKENS = {1: (1, 1), 2: (1, 1), 3: (3, 3)}
"""Engine hashes and what is in them: 1 and 2 are the same content."""


def a_view() -> HeldBlocks:
    return HeldBlocks(Hasher(NAMESPACE), retired_max=2)


def store(view: HeldBlocks, engine_hash: int) -> bool:
    """Store one block after the root: whether it was new."""
    runs = view.store((engine_hash,), view.hasher.chain(TOKENS[engine_hash]), None)
    assert runs is not None
    return bool(runs)


def test_two_names_of_a_block_are_counted_each() -> None:
    view = a_view()
    assert store(view, 1)
    assert not store(view, 2)
    assert view.remove(1) == (None, True)
    assert view.remove(1) == (None, False), "that name holds nothing any more"
    assert len(view) == 1
    block, held = view.remove(2)
    assert (block is not None, held, len(view)) == (True, True, 0)
    view.check()


def test_a_name_holds_as_often_as_it_was_stored() -> None:
    view = a_view()
    assert [store(view, 1), store(view, 1), store(view, 1)] == [True, False, False]
    assert view.remove(1) == (None, True)
    assert store(view, 2) is False
    assert view.remove(2) == (None, True)
    assert view.remove(2) == (None, False)
    assert view.remove(1) == (None, True)
    block, held = view.remove(1)
    assert (block is not None, held) == (True, True)
    view.check()


def test_a_parent_that_came_back_stands_before_its_child() -> None:
    """An engine may evict a parent first, and store it again: the beginning of an epoch has it
    first."""
    view = a_view()
    chain = view.hasher.chain((1, 1, 3, 3))
    assert view.store((1, 3), chain, None) is not None
    assert view.remove(1) == (chain[0], True)
    assert view.store((1,), chain[:1], None) is not None
    assert [run for _, run in view.block_runs()] == [chain[:1], chain[1:]]


def test_a_name_for_two_contents_changes_nothing() -> None:
    """1. Known for another content. 2. Twice in one event."""
    view = a_view()
    chain = view.hasher.chain((1, 1, 2, 2))
    assert view.store((1, 2), chain, None) == [(view.hasher.root, chain)]
    for engine_hashes in ((7, 2, 8), (7, 8, 7)):
        assert view.store(engine_hashes, view.hasher.chain((3, 3, 4, 4, 5, 5)), None) is None
        assert [view.name_of(name) for name in (7, 8)] == [None, None]
    assert list(view.held) == chain
    view.check()


def test_what_is_new_is_cut_by_what_is_held() -> None:
    """Of 0 1 2 3 4, one name and one block are known: 2 under its name, 3 under another."""
    view = a_view()
    chain = view.hasher.chain((0, 0, 1, 1, 2, 2, 3, 3, 4, 4))
    assert view.store((12, 33), chain[2:4], chain[1]) == [(chain[1], chain[2:4])]
    runs = view.store((10, 11, 12, 13, 14), chain, None)
    assert runs == [(view.hasher.root, chain[:2]), (chain[3], chain[4:])]
    assert [view.remove(name) for name in (12, 13)] == [(None, True)] * 2
    assert [view.remove(name) for name in (33, 12)] == [(chain[3], True), (chain[2], True)]
    view.check()


Step = tuple[str, int]


@given(
    st.lists(st.tuples(st.sampled_from(["store", "remove", "clear"]), st.sampled_from([1, 2, 3])))
)
def test_any_order_keeps_the_counts(steps: list[Step]) -> None:
    view = a_view()
    copies = dict.fromkeys(TOKENS, 0)
    for what, engine_hash in steps:
        alike = {1, 2} if engine_hash < 3 else {3}
        held = sum(copies[other] for other in alike)
        match what:
            case "store":
                assert store(view, engine_hash) == (held == 0)
                copies[engine_hash] += 1
            case "remove":
                block, was_held = view.remove(engine_hash)
                assert was_held == (copies[engine_hash] > 0)
                assert (block is not None) == (was_held and held == 1)
                copies[engine_hash] -= was_held
            case _:
                view.clear()
                copies = dict.fromkeys(TOKENS, 0)
        view.check()


def test_a_name_is_forgotten_as_fast_when_many_were() -> None:
    """Goal: an eviction costs the same after a week. 1. 120,000 blocks come and go, of which 32,768
    keep their names. 2. The last ones take no more than some cache misses longer than the first."""
    count, part = 120_000, 30_000
    view = HeldBlocks(Hasher(Namespace(model="m", block_tokens=1)), retired_max=32_768)
    names = view.hasher.chain(range(count))
    numbers = tuple((number * 0x9E3779B97F4A7C15) % 2**64 for number in range(count))
    view.store(numbers, names, None)
    seconds: list[float] = []
    for start in range(0, count, part):
        began = time.process_time()
        for number in numbers[start : start + part]:
            view.remove(number)
        seconds.append(time.process_time() - began)
    assert max(seconds) < 6 * seconds[0], seconds


def test_a_clear_keeps_the_last_names_and_takes_less_than_the_stores() -> None:
    """Goal: an engine that resets its cache holds nobody up. It took twice as long as stores."""
    count, took_s = 200_000, []
    for _ in range(3):  # The collector, or another process, may come into one of them.
        view = HeldBlocks(Hasher(Namespace(model="m", block_tokens=1)), retired_max=1_000)
        names = view.hasher.chain(range(count))
        numbers = tuple((number * 0x9E3779B97F4A7C15) % 2**64 for number in range(count))
        began = time.process_time()
        view.store(numbers, names, None)
        stored = time.process_time()
        view.clear()
        took_s.append((stored - began, time.process_time() - stored))
        view.check()
        assert [view.name_of(number) for number in numbers[-1_000:]] == names[-1_000:]
        assert view.name_of(numbers[-1_001]) is None
    store_s, clear_s = map(min, zip(*took_s, strict=True))
    assert clear_s < store_s
