"""A followed source, move by move; and a property: what is applied is what its log says."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvbm_common.tier.follow import Followed, FollowLimits, FollowState, Verdict
from kvbm_common.tier.machine import InvalidTransition

CURRENT, BEHIND, GONE = FollowState.CURRENT, FollowState.BEHIND, FollowState.GONE
LIMITS = FollowLimits(retry_ms=10, retry_max_ms=75, waiting_max=2)
Kind = Literal["stored", "removed", "cleared", "malformed"]


@dataclass(frozen=True)
class Word:
    """An event: what it says of one block."""

    seq: int
    epoch: int = 1
    kind: Kind = "stored"
    block: int = 0


def source(
    *waiting: int, limits: FollowLimits = LIMITS, seq: int = 0, epoch: int = 1, attempts: int = 0,
    state: FollowState = CURRENT, needs_snapshot: bool = False, requested_at_ms: int | None = None,
) -> Followed[Word]:  # fmt: skip
    """Return a source in its first life, with events that wait."""
    return Followed(
        limits=limits, seq=seq, epoch=epoch, state=state, attempts=attempts,
        needs_snapshot=needs_snapshot, requested_at_ms=requested_at_ms,
        waiting={number: Word(number) for number in waiting},
    )  # fmt: skip


def ready(one: Followed[Word]) -> list[int]:
    """Apply what is next; returns the numbers."""
    found = [event.seq for event in one.ready()]
    one.check()
    return found


# ---- move by move ----------------------------------------------------------------------------


def test_events_in_order_are_next_one_by_one() -> None:
    one: Followed[Word] = Followed()
    assert one.begin(1)
    for seq in (1, 2, 3):
        assert one.take(Word(seq), 0) is Verdict.NEXT
        assert ready(one) == [seq]
    assert (one.state, one.epoch, one.seq) == (CURRENT, 1, 3)


def test_an_event_after_a_hole_waits_until_the_hole_is_closed() -> None:
    """3 and 4 wait for 2: none is applied before it, and the source is current with the last."""
    one = source(seq=1)
    assert [one.take(Word(seq), 0) for seq in (3, 4)] == [Verdict.WAITS] * 2
    assert (ready(one), one.state) == ([], BEHIND)
    assert one.take(Word(2), 0) is Verdict.NEXT
    applied = []
    for event in one.ready():
        assert one.state is BEHIND
        applied.append(event.seq)
    assert (applied, one.state) == ([2, 3, 4], CURRENT)


def test_the_old_and_the_known_are_dropped() -> None:
    """An old event of a source that is behind does not make it current."""
    one = source(4, seq=2, epoch=1, state=BEHIND)
    assert [one.take(Word(seq), 0) for seq in (1, 2, 4)] == [Verdict.DUPLICATE] * 3
    assert one.begin(2)
    assert one.take(Word(9, epoch=1), 0) is Verdict.OLD_EPOCH
    one.fall_behind(0)
    one.take(Word(9, epoch=1), 0)
    assert (ready(one), one.state) == ([], BEHIND)


def test_what_waits_is_bounded() -> None:
    """3 and 4 wait; 5 is left out; 2 is next and needs no room."""
    one = source(seq=1)
    verdicts = [one.take(Word(seq), 0) for seq in (3, 4, 5, 2)]
    assert verdicts == [Verdict.WAITS, Verdict.WAITS, Verdict.FULL, Verdict.NEXT]
    assert ready(one) == [2, 3, 4]
    assert one.take(Word(6), 0) is Verdict.WAITS, "another hole"


def test_what_found_no_room_is_missing_though_the_source_falls_silent() -> None:
    """2 is lost, 3 and 4 wait, 5 finds no room. A snapshot that was made at 2 brings back all but
    5, and the next one is asked for by itself."""
    one = source(seq=1)
    for seq in (3, 4, 5):
        one.take(Word(seq), 0)
    one.begin_request(0)
    assert one.end_request()
    one.restore(1, 2, 0)
    assert (ready(one), one.state) == ([3, 4], BEHIND)
    assert one.should_request(LIMITS.retry_ms)
    one.restore(1, 5, 20)
    assert (ready(one), one.state) == ([], CURRENT)


def test_what_waited_when_a_source_left_is_missing_when_it_is_back() -> None:
    """A snapshot that was asked for before is older than what had been heard."""
    one = source(seq=1)
    one.take(Word(3), 0)
    one.begin_request(0)
    one.leave()
    one.fall_behind(5)
    assert one.end_request()
    one.restore(1, 2, 5)
    assert (ready(one), one.state) == ([], BEHIND)
    one.restore(1, 3, 20)
    assert one.state is CURRENT


def test_a_clear_that_is_late_does_not_hide_what_was_left_out() -> None:
    """4 and 5 wait, 6 finds no room, and then 3 clears."""
    one = source(seq=1)
    for seq in (4, 5, 6):
        one.take(Word(seq), 0)
    assert one.take(Word(3), 0, clears=True) is Verdict.NEXT
    assert (ready(one), one.state) == ([3, 4, 5], BEHIND)


def test_a_clear_needs_no_history() -> None:
    """What waited before it is void, what waited behind it is next."""
    one = source(3, 6, seq=1, state=BEHIND, needs_snapshot=True)
    assert one.take(Word(5), 0, clears=True) is Verdict.NEXT
    assert (ready(one), one.state) == ([5, 6], CURRENT)


def test_a_clear_does_not_bring_back_what_is_gone_and_the_next_event_does() -> None:
    """The last word of a life that ends is a clear, and may come after the registry's."""
    one = source(seq=1)
    one.leave()
    assert one.take(Word(3), 0, clears=True) is Verdict.NEXT
    assert (ready(one), one.state) == ([3], GONE)
    assert one.take(Word(4), 0) is Verdict.NEXT
    assert (ready(one), one.state) == ([4], CURRENT)


def test_a_refused_event_stops_the_rest_until_a_snapshot() -> None:
    """2 is malformed: 3 waits on, and no later event is applied on top of what is missing."""
    one = source(3, seq=1, state=BEHIND)
    one.take(Word(2), 0)
    for event in one.ready():
        one.refuse(7)
        assert event.seq == 2
    assert (one.seq, one.state, one.needs_snapshot) == (1, BEHIND, True)
    assert one.take(Word(2), 0) is Verdict.WAITS
    assert one.accepts(1, 2)
    one.restore(1, 2, 0)
    assert (ready(one), one.state) == ([3], CURRENT)


def test_a_source_that_falls_behind_asks_when_it_is_time_and_once() -> None:
    """Not at 9, at 10; not while a question is in flight; a second hole does not put it off."""
    behind = source(attempts=3)
    assert not behind.should_request(10)
    behind.fall_behind(10)
    assert (behind.state, behind.attempts) == (BEHIND, 0)
    assert not behind.should_request(9)
    assert behind.should_request(10)
    behind.attempts = 2
    behind.fall_behind(50)
    assert (behind.next_request_ms, behind.attempts) == (10, 2)
    behind.begin_request(0)
    assert not behind.should_request(10)
    assert behind.end_request()
    assert not behind.end_request()
    assert behind.should_request(10)


def test_pauses_between_questions_double_up_to_a_bound() -> None:
    """10, 20, 40, then 75 for good, also after very many."""
    behind = source(state=BEHIND)
    pauses = []
    for attempt in range(1, 6):
        behind.retry_later(100)
        assert behind.attempts == attempt
        pauses.append(behind.next_request_ms - 100)
    assert pauses == [10, 20, 40, 75, 75]
    behind.limits = FollowLimits(retry_ms=1, retry_max_ms=1 << 40)
    for attempts, pause in ((15, 1 << 15), (16, 1 << 16), (17, 1 << 16), (99, 1 << 16)):
        behind.attempts = attempts
        behind.retry_later(100)
        assert behind.next_request_ms - 100 == pause


def test_a_snapshot_that_closes_the_hole_ends_the_pauses() -> None:
    """At 5 the events 4 and 5 are in it already, and 6 is next. At 2 it would be too old."""
    behind = source(4, 5, 6, seq=3, needs_snapshot=True, state=BEHIND, attempts=4)
    assert [behind.accepts(1, seq) for seq in (2, 3)] == [False, True]
    behind.restore(1, 5, 100)
    assert (behind.seq, behind.needs_snapshot, [*behind.waiting]) == (5, False, [6])
    assert (ready(behind), behind.state, behind.attempts) == ([6], CURRENT, 0)
    with pytest.raises(AssertionError, match="misses nothing"):
        behind.restore(1, 7, 100)


def test_a_snapshot_that_leaves_a_hole_is_asked_for_again_after_a_pause() -> None:
    behind = source(9, seq=3, state=BEHIND, attempts=1)
    behind.restore(1, 5, 100)
    assert (ready(behind), behind.state, behind.attempts) == ([], BEHIND, 2)
    assert [behind.should_request(at_ms) for at_ms in (119, 120)] == [False, True]
    with pytest.raises(AssertionError, match="back to 4"):
        behind.restore(1, 4, 100)


def test_a_snapshot_without_anything_after_it_is_enough() -> None:
    """Of this life, and of one that nothing else has named yet."""
    for epoch in (1, 2):
        behind = source(seq=3, state=BEHIND, attempts=2)
        behind.restore(epoch, 5, 100)
        assert (behind.state, behind.epoch, behind.seq, behind.attempts) == (CURRENT, epoch, 5, 0)


def test_another_life_begins_at_nothing() -> None:
    """What waited, what was missing and what was tried belonged to the life before."""
    gone = source(9, seq=7, state=BEHIND, needs_snapshot=True, attempts=3)
    assert not gone.begin(0)
    assert not gone.begin(1)
    assert gone.begin(2)
    assert gone == source(epoch=2)


@pytest.mark.parametrize("registered_epoch", [0, 1, 2])
def test_a_lower_epoch_is_a_life_if_the_registry_names_it(registered_epoch: int) -> None:
    """Epoch 1 after epoch 3, by an event and by a snapshot. Epoch 0 is none, and names none."""
    is_life = registered_epoch == 1
    one, behind = source(seq=7, epoch=3), source(seq=7, epoch=3, state=BEHIND)
    for each in (one, behind):
        each.registered_epoch = registered_epoch
        assert not each.begin(0)
    assert behind.accepts(1, 2) is is_life
    assert one.begin(1) is is_life
    assert (one.epoch, one.seq) == ((1, 0) if is_life else (3, 7))
    if is_life:
        behind.restore(1, 2, 5)
        assert (behind.state, behind.epoch, behind.seq) == (CURRENT, 1, 2)


def test_events_under_way_when_a_source_left_are_late() -> None:
    left = source(seq=7, epoch=2)
    assert not left.is_late(2)
    left.leave()
    assert [left.is_late(epoch) for epoch in (1, 2, 3)] == [True, True, False]


def test_a_source_that_leaves_keeps_its_position_and_nothing_else() -> None:
    left = source(9, seq=7, state=BEHIND)
    left.leave()
    assert left == source(seq=7, state=GONE, needs_snapshot=True)
    left.check()
    assert left.take(Word(8), 5) is Verdict.WAITS
    assert (left.state, left.next_request_ms) == (BEHIND, 5)


def test_after_lost_events_the_next_one_proves_that_none_is_missing() -> None:
    """4 is what was lost, if anything. A clear needs no proof."""
    one = source(seq=3)
    one.stream_lost(7)
    assert (one.state, one.next_request_ms, one.needs_snapshot) == (BEHIND, 7, False)
    assert one.take(Word(4), 8) is Verdict.NEXT
    assert (ready(one), one.state) == ([4], CURRENT)
    one.stream_lost(9)
    assert one.take(Word(6), 9, clears=True) is Verdict.NEXT
    assert (ready(one), one.state) == ([6], CURRENT)


def test_what_waited_when_events_were_lost_proves_nothing() -> None:
    """2 is late, and 3 waited for it. 4 would be proof."""
    one = source(3, seq=1, state=BEHIND)
    one.seq_max = 3
    one.stream_lost(7)
    one.take(Word(2), 8)
    assert (ready(one), one.state) == ([2, 3], BEHIND)
    one.take(Word(4), 8)
    assert (ready(one), one.state) == ([4], CURRENT)


def test_where_the_loss_overtakes_events_only_a_snapshot_is_proof() -> None:
    one = source(seq=3)
    one.loss_overtakes = True
    one.stream_lost(7)
    assert one.take(Word(4), 8) is Verdict.WAITS
    assert (ready(one), one.state) == ([], BEHIND)
    one.begin_request(8)
    assert one.end_request()
    one.restore(1, 4, 9)
    assert (ready(one), one.state) == ([], CURRENT)


@pytest.mark.parametrize("life", [1, 2])
@pytest.mark.parametrize("is_gone", [False, True])
def test_where_the_loss_overtakes_events_a_clear_is_no_proof(life: int, is_gone: bool) -> None:
    """It is applied, in the same life or as the first word of the next. What follows it waits for a
    snapshot, which a source that has left is asked for when it is back."""
    one = source(seq=3)
    one.loss_overtakes = True
    if is_gone:
        one.leave()
    one.stream_lost(7)
    assert one.begin(life) is (life == 2)
    seq = 4 if life == 1 else 1
    assert one.take(Word(seq, life), 8, clears=True) is Verdict.NEXT
    assert ready(one) == [seq]
    assert one.state is (GONE if is_gone and life == 1 else BEHIND)
    assert one.take(Word(seq + 1, life), 8) is Verdict.WAITS
    assert ready(one) == []
    assert one.should_request(8)
    one.begin_request(8)
    assert one.end_request()
    one.restore(life, seq, 9)
    assert (ready(one), one.state) == ([seq + 1], CURRENT)


@pytest.mark.parametrize("epoch", [1, 2])
@pytest.mark.parametrize("overtakes", [False, True])
def test_a_snapshot_in_flight_when_events_were_lost_is_taken_and_another_is_asked_for(
    epoch: int, overtakes: bool
) -> None:
    """It may have been made before. The next one is asked for at once, after it has landed."""
    one = source(seq=3, state=BEHIND, attempts=2)
    one.loss_overtakes = overtakes
    one.begin_request(7)
    one.stream_lost(8)
    assert not one.should_request(8)
    assert one.end_request()
    one.restore(epoch, 5, 8)
    assert (one.epoch, one.seq, one.state, one.needs_snapshot) == (epoch, 5, BEHIND, overtakes)
    assert one.should_request(8)
    one.begin_request(8)
    assert one.end_request()
    one.restore(epoch, 5, 9)
    assert (one.state, one.needs_snapshot, one.suspect_from_seq) == (CURRENT, False, 0)


def test_a_loss_while_a_source_is_gone_makes_the_snapshot_in_flight_stale() -> None:
    one = source(seq=3, state=BEHIND)
    one.begin_request(7)
    one.leave()
    one.stream_lost(8)
    assert (one.state, one.snapshot_may_be_stale) == (GONE, True)
    one.fall_behind(9)
    assert one.end_request()
    one.restore(1, 5, 9)
    assert one.state is BEHIND


def test_a_move_that_is_not_in_the_table_names_the_position() -> None:
    with pytest.raises(InvalidTransition, match=r"CURRENT.*epoch 3, seq 4"):
        source(epoch=3, seq=4)._move("caught up")


@pytest.mark.parametrize(
    "wrong",
    [
        source(3),
        source(3, 4, 5, state=BEHIND),
        source(3, state=BEHIND, seq=3),
        source(4, state=BEHIND, seq=3),
        source(needs_snapshot=True),
        source(3, state=BEHIND, epoch=2),
    ],
    ids=["waits though current", "too many", "not behind the position", "is next",
         "current and needs a snapshot", "another life"],
)  # fmt: skip
def test_what_cannot_be_is_found(wrong: Followed[Word]) -> None:
    """Goal: `check` sees each mistake; two events of this life that wait are none."""
    source(4, 5, state=BEHIND, seq=2).check()
    with pytest.raises(AssertionError):
        wrong.check()


# ---- a property ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Snapshot:
    """What a source holds, as of its last event."""

    epoch: int
    seq: int
    held: frozenset[int]


@dataclass(frozen=True)
class Joined:
    """The registry's word: this life is there."""

    epoch: int


@dataclass(frozen=True)
class Left:
    """The registry's word: this life is over."""

    epoch: int


Message = Word | Snapshot | Joined | Left


class Log:
    """The truth: every event that a source has ever published, in several lives."""

    def __init__(self) -> None:
        self.epoch, self.seq, self.held = 0, 0, frozenset[int]()
        self.states: dict[tuple[int, int], frozenset[int]] = {(0, 0): self.held}
        self.begin()

    def begin(self) -> Joined:
        """Begin the next life, which holds nothing. Its number is not always the next one."""
        self.epoch, self.seq, self.held = 3 * self.epoch + 1, 0, frozenset()
        self.states[self.epoch, 0] = self.held
        return Joined(self.epoch)

    def say(self, kind: Kind, block: int) -> Word:
        """Publish an event; a malformed one stores its block all the same."""
        self.seq += 1
        match kind:
            case "stored" | "malformed":
                self.held |= {block}
            case "removed":
                self.held -= {block}
            case "cleared":
                self.held = frozenset()
        self.states[self.epoch, self.seq] = self.held
        return Word(self.seq, self.epoch, kind, block)

    def snapshot(self) -> Snapshot:
        """Answer what is held now."""
        return Snapshot(self.epoch, self.seq, self.held)


@dataclass
class Reader:
    """An owner: a set of blocks that follows a source, compared with the truth at each step.

    An eager one, as the host tier is, applies what waits at once, and again when it is next.
    """

    log: Log
    eager: bool
    source: Followed[Word] = field(
        default_factory=lambda: Followed(limits=FollowLimits(waiting_max=3, retry_ms=10))
    )
    held: set[int] = field(default_factory=set)
    now_ms: int = 0
    current_count: int = 0
    latest: tuple[int, int] = (0, 0)

    def hear(self, message: Message) -> None:
        """Take one message, and compare."""
        self.now_ms += 1
        match message:
            case Word():
                self.hear_event(message)
            case Snapshot():
                self.hear_snapshot(message)
            case Joined(epoch):
                if self.source.begin(epoch):
                    self.held.clear()
                    self.source.fall_behind(self.now_ms + 5)
                elif epoch == self.source.epoch and self.source.state is GONE:
                    self.source.fall_behind(self.now_ms)
            case Left(epoch) if epoch >= self.source.epoch:
                self.source.leave()
                self.held.clear()
        if self.source.should_request(self.now_ms):
            self.source.begin_request(self.now_ms)
        self.compare()

    def hear_event(self, event: Word) -> None:
        """Take an event as every owner does."""
        self.latest = max(self.latest, (event.epoch, event.seq))
        if self.source.begin(event.epoch):
            self.held.clear()
        verdict = self.source.take(event, self.now_ms, clears=event.kind == "cleared")
        if self.eager and verdict in (Verdict.WAITS, Verdict.FULL):
            self.apply(event)
            if verdict is Verdict.FULL:
                self.source.refuse(self.now_ms)  # What is held is beyond what the position says.
        self.apply_ready()

    def hear_snapshot(self, snapshot: Snapshot) -> None:
        """Take an answer as every owner does."""
        if not self.source.end_request() or self.source.state is not BEHIND:
            return
        if not self.source.accepts(snapshot.epoch, snapshot.seq):
            self.source.retry_later(self.now_ms)
            return
        self.held = set(snapshot.held)
        self.source.restore(snapshot.epoch, snapshot.seq, self.now_ms)
        self.apply_ready()

    def apply_ready(self) -> None:
        """Apply what is next, unless it is malformed."""
        for event in self.source.ready():
            if not self.apply(event):
                self.source.refuse(self.now_ms)

    def apply(self, event: Word) -> bool:
        """Do what an event says. False: nothing can be read from it."""
        match event.kind:
            case "stored":
                self.held.add(event.block)
            case "removed":
                self.held.discard(event.block)
            case "cleared":
                self.held.clear()
        return event.kind != "malformed"

    def compare(self) -> None:
        """Require that what is held is the log's truth, at least while the source is current."""
        self.source.check()
        certain = not self.source.needs_snapshot if not self.eager else self.source.state is CURRENT
        if certain:
            truth = self.log.states[self.source.epoch, self.source.seq]
            assert self.held == truth, (self.source, self.held, truth)
        if self.source.state is CURRENT:
            assert (self.source.epoch, self.source.seq) >= self.latest, self.source
            self.current_count += 1


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(
            [*["stored"] * 8, *["removed"] * 4, *["snapshot"] * 2, "cleared", "malformed",
             "restart", "leave"]
        ),
        st.integers(0, 5),
    ),
    min_size=6, max_size=40,
)  # fmt: skip
FATES = st.lists(st.sampled_from([*[0] * 9, 1, 2, 6, 15, None]), min_size=3, max_size=25)
"""How many messages later one arrives; None: never. Drawn again and again over the stream."""
TWICE = st.lists(st.sampled_from([0, 0, 0, 3, 12]), min_size=1, max_size=7)
"""How much later it arrives a second time; 0: it does not."""


def messages(log: Log, actions: list[tuple[str, int]]) -> list[Message]:
    """Return all that a source sends in its lives."""
    sent: list[Message] = [Joined(log.epoch), log.say("cleared", 0)]
    for action, block in actions:
        match action:
            case "restart":
                sent += [log.begin(), log.say("cleared", 0)]
            case "leave":
                sent.append(Left(log.epoch))
            case "snapshot":
                sent.append(log.snapshot())
            case "stored" | "removed" | "cleared" | "malformed":
                sent.append(log.say(action, block))
    return sent


def arrivals(sent: list[Message], fates: list[int | None], twice: list[int]) -> list[Message]:
    """Return the messages as they arrive: late, lost, twice, in another order."""
    timed: list[tuple[int, int, Message]] = []
    for at, message in enumerate(sent):
        late = fates[at % len(fates)]
        if late is None:
            continue
        timed.append((at + late, at, message))
        if again := twice[at % len(twice)]:
            timed.append((at + late + again, at, message))
    return [message for *_, message in sorted(timed, key=lambda one: one[:2])]


@pytest.mark.slow
@settings(max_examples=500, deadline=None)
@given(ACTIONS, FATES, TWICE, st.booleans())
def test_what_is_applied_is_what_the_log_says(
    actions: list[tuple[str, int]], fates: list[int | None], twice: list[int], eager: bool
) -> None:
    """Goal: whatever is lost, late, doubled or of another life, a source that is current has
    exactly what its log says at that position, which is no older than what was heard. An answer to
    the next question makes it current at the end of the log."""
    log = Log()
    sent = messages(log, actions)
    reader = Reader(log, eager)
    for message in arrivals(sent, fates, twice):
        reader.hear(message)
    for _ in range(4):
        reader.now_ms += 1_000
        reader.hear(Joined(log.epoch))
        reader.hear(log.snapshot())
        reader.hear(log.say("stored", 1))
    assert reader.source.state is CURRENT
    assert (reader.source.epoch, reader.source.seq) == (log.epoch, log.seq)
    assert reader.held == log.held


def test_the_drawn_streams_lead_through_every_state() -> None:
    """Goal: the property above is not about sources that are never current."""
    log = Log()
    sent = messages(log, [("stored", n % 4) for n in range(30)])
    reader = Reader(log, eager=False)
    seen = set()
    for message in [*arrivals(sent, [0, 0, 2], [0, 3]), Left(log.epoch)]:
        reader.hear(message)
        seen.add(reader.source.state)
    assert seen == {CURRENT, BEHIND, GONE}
    assert reader.current_count > 5
