"""Runs that were looked up before: what is said of them again, and when it is not believed."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvbm_common.identity import IdentityError, pack_hashes
from kvbm_common.tier.slots import Block
from kvbm_common.wire.bounds import Usage
from kvbm_common.wire.local import Refused
from kvbm_host_tier.core import known_runs
from kvbm_host_tier.core.known_runs import Columns, KnownRuns

from tests.libs.helpers import block, name, names, plain_table
from tests.services.host_tier.helpers import Host, of

STRETCH = 2
"""Blocks of a stretch, here."""
PARTS_CODE = 7


def packed(*numbers: int) -> bytes:
    """The names of these blocks as a lookup has them."""
    return pack_hashes(names(*numbers))


class Known:
    """A table with blocks, and what is known of it."""

    def __init__(self, *numbers: int, slots: int = 8) -> None:
        self.table = plain_table(slots)
        for number in numbers:
            self.commit(number)
        self.runs = KnownRuns(self.table, STRETCH)

    def commit(self, number: int) -> int:
        slot = self.table.stage(name(number))
        assert slot is not None
        self.table.register(slot, block(number))
        return slot

    def answer(self, *numbers: int) -> None:
        """Answer a lookup with all of these, and settle."""
        slots = self.table.pin_prefix(names(*numbers))
        self.runs.answered(packed(*numbers), slots, self.table.blocks_in(slots))
        self.runs.settle()
        self.table.unpin(slots)
        self.runs.check()

    def known(self, *numbers: int) -> int:
        """How many of these are known; what is said of them is what the table says."""
        run = self.runs.run_of(packed(*numbers))
        assert run.names == names(*numbers)
        assert run.slots == [self.table.find(one) for one in run.names[: len(run.slots)]]
        assert run.blocks == self.table.blocks_in(run.slots)
        assert run.columns == Columns.of(self.table, run.slots, run.blocks)
        assert run.namespaces == {one.namespace for one in run.blocks}
        return len(run.slots)


def test_leading_stretches_of_a_run_are_known_again() -> None:
    """1 to 5 were answered: whole stretches are known, of whatever begins like them."""
    known = Known(1, 2, 3, 4, 5, 6)
    known.answer(1, 2, 3, 4, 5)
    assert known.known(1, 2, 3, 4, 5) == 4
    assert known.known(1, 2, 3, 4) == 4
    assert known.known(1, 2, 3, 6) == 2
    assert known.known(1, 2, 9, 9, 9) == 2
    assert known.known(1) == known.known(2, 1) == known.known(3, 4) - 2 == 0


def test_answer_is_remembered_when_it_is_settled() -> None:
    """The engine waits for the answer, not for that."""
    known = Known(1, 2)
    slots = known.table.pin_prefix(names(1, 2))
    known.runs.answered(packed(1, 2), slots, known.table.blocks_in(slots))
    assert known.known(1, 2) == 0
    known.runs.settle()
    assert known.known(1, 2) == 2


def test_stretch_whose_block_has_left_is_not_believed() -> None:
    """2 leaves and comes back, to another slot or to its own, after whom it is known again."""
    known = Known(1, 2, 3, 4)
    known.answer(1, 2, 3, 4)
    known.table.evict(name(2))
    assert known.known(1, 2, 3, 4) == 0
    known.commit(2)
    assert known.known(1, 2, 3, 4) == 0, "it is another block, perhaps at another place"
    known.answer(1, 2, 3, 4)
    assert known.known(1, 2, 3, 4) == 4


def test_stretch_with_a_discarded_block_is_not_believed() -> None:
    """4 was found to be wrong, and a lease still pins its slot."""
    known = Known(1, 2, 3, 4)
    slots = known.table.pin_prefix(names(1, 2, 3, 4))
    known.answer(1, 2, 3, 4)
    known.table.discard(name(4))
    assert known.known(1, 2, 3, 4) == 2
    known.table.unpin(slots)
    assert known.known(1, 2, 3, 4) == 2


def test_block_discarded_before_the_answer_is_settled_is_not_remembered() -> None:
    """Nothing is said of a slot whose block no lookup may find."""
    known = Known(1, 2)
    slots = known.table.pin_prefix(names(1, 2))
    known.runs.answered(packed(1, 2), slots, known.table.blocks_in(slots))
    known.table.discard(name(1))
    known.runs.settle()
    assert known.known(1, 2) == 0
    known.runs.check()


def test_oldest_stretch_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two are remembered: the third takes the place of the first."""
    monkeypatch.setattr(known_runs, "STRETCHES_MAX", 2)
    known = Known(1, 2, 3, 4, 5, 6)
    for run in ((1, 2), (3, 4), (5, 6)):
        known.answer(*run)
    assert [known.known(*run) for run in ((1, 2), (3, 4), (5, 6))] == [0, 2, 2]
    assert known.runs.usage() == Usage(used=2, size=2, dropped=1)


def test_names_that_are_cut_off_are_refused() -> None:
    """After what is known as without it."""
    known = Known(1, 2)
    known.answer(1, 2)
    for malformed in (packed(1, 2) + b"x", b"x"):
        with pytest.raises(IdentityError):
            known.runs.run_of(malformed)


def test_columns_tell_of_parts() -> None:
    """Of blocks of several parts the checksums of each are told: they are looked at anew."""
    table = plain_table(2)
    slots = table.stage_all(names(1, 2))
    cut = Block(name(2), name(1), b"n" * 32, 5, 64, PARTS_CODE)
    table.register_all([(slots[0], block(1)), (slots[1], cut)])
    assert Columns.of(table, slots[:1], [block(1)]).are_plain
    assert not Columns.of(table, slots, [block(1), cut]).are_plain


# --- through the core ---------------------------------------------------------------------------


def test_lookup_answers_the_same_when_the_run_is_known() -> None:
    """The second answer is said from memory; policy, counters and explanations do not see it."""
    host = Host(slots=8, stretch_blocks=STRETCH)
    host.store(1, 2, 3, 4, 5)
    first = host.found(host.look_up(1, 2, 3, 4, 5, request="first"))
    counts = dict(host.core.view.counts)
    again = host.found(host.look_up(1, 2, 3, 4, 5, request="again"))
    assert (first.slots, first.checksums) == (again.slots, again.checksums)
    assert first.block_bytes == again.block_bytes
    after = host.core.view.counts
    for counter in ("lookups", "lookup_blocks.host", "matched_tokens", "bytes.h2d"):
        assert after[counter] == 2 * counts[counter], counter
    told = [host.core.view.explanations(request)[0] for request in ("first", "again")]
    assert [one.hit_blocks for one in told] == [5, 5]


def test_known_run_with_a_block_twice_is_refused() -> None:
    """Two stretches are known, and a lookup asks for one of them twice."""
    host = Host(slots=8, stretch_blocks=STRETCH)
    host.store(1, 2, 3, 4)
    host.found(host.look_up(1, 2, 3, 4))
    [refused] = of(host.told(host.look_up(1, 2, 1, 2)), Refused)
    assert refused.code == "bad_identity"


@settings(max_examples=30, deadline=None)
@given(steps=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 7)), max_size=25))
def test_whatever_happens_answers_are_those_of_the_table(steps: list[tuple[int, int]]) -> None:
    """Method: blocks come, are looked up, leave; `found` compares each answer with the table."""
    host = Host(slots=5, stretch_blocks=STRETCH)
    host.settles = False
    for kind, count in steps:
        run = range(1, count + 1)
        if kind == 0:
            store(host, run)
        elif kind == 1:
            host.release(host.found(host.look_up(*run)).lease)
        elif kind == 2:
            host.found(host.look_up(*run))
        else:
            host.settles = not host.settles
            host.wait(600)
            host.beat()
            host.beat(half="0")


def store(host: Host, run: Iterable[int]) -> None:
    """Store those that are not here, as far as there is room."""
    for number in run:
        if number not in host.announced and host.core.view.statistics(0).leases == 0:
            host.store(number)
