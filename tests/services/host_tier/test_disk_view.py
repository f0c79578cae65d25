"""The disk view: a hint that follows events, heals by snapshots, and forgets with its disk tier."""

from __future__ import annotations

from kvbm_common.announcer import Announcer
from kvbm_common.wire.events import Event
from kvbm_common.wire.verbs import SnapshotReply
from kvbm_host_tier.disk_view import AVOID_MAX, AVOID_MS, DiskView
from kvbm_host_tier.messages import AskDiskSnapshot

from tests.services.host_tier.helpers import name, on_disk


def disk(*, epoch: int = 1, instance: str = "0") -> Announcer:
    """A disk tier's voice; its first event, `cleared`, has been said."""
    source = Announcer(host="h", source=f"disk-tier-{instance}", tier="disk", epoch=epoch)
    source.cleared("start")
    return source


def stored(source: Announcer, *wanted: int) -> Event:
    """Its next event."""
    [event] = source.stored([on_disk(number) for number in wanted])
    return event


def removed(source: Announcer, *wanted: int) -> Event:
    """Its next event."""
    [event] = source.removed([on_disk(number) for number in wanted], "evicted")
    return event


def snapshot(source: Announcer, *wanted: int) -> SnapshotReply:
    """What it says it holds, as of its last event."""
    return source.snapshot([on_disk(number) for number in wanted])


def following(source: Announcer, *wanted: int) -> DiskView:
    """A view that has followed a disk tier from its first event on."""
    view = DiskView()
    first = Announcer(host="h", source=source.source, tier="disk", epoch=source.epoch)
    assert view.apply("0", first.cleared("start")) == (0, [])
    if wanted:
        view.apply("0", stored(source, *wanted))
    return view


def content(view: DiskView) -> set[int]:
    """Which of blocks 1 to 9 it believes to be on disk."""
    return {number for number in range(1, 10) if name(number) in view}


def test_it_follows_events() -> None:
    """Stored, stored again, removed, cleared. New blocks are counted once."""
    source = disk()
    view = following(source)
    assert view.apply("0", stored(source, 1, 2)) == (2, [])
    assert view.apply("0", stored(source, 2, 3)) == (1, [])
    assert view.apply("0", removed(source, 1)) == (0, [])
    assert content(view) == {2, 3}
    assert view.source(name(2), 0) == "0"
    assert view.apply("0", source.cleared("reformatted")) == (0, [])
    assert content(view) == set()


def test_a_repeated_event_changes_nothing() -> None:
    """The bus delivers `stored 1` again after `removed 1`."""
    source = disk()
    view = following(source)
    again = stored(source, 1)
    view.apply("0", again)
    view.apply("0", removed(source, 1))
    assert view.apply("0", again) == (0, [])
    assert content(view) == set()


def test_a_gap_asks_for_a_snapshot_once() -> None:
    """Event 3 is missed. 4 is applied and asks; 6, after another gap, does not ask again."""
    source = disk()
    view = following(source, 1)
    stored(source, 2)
    assert view.apply("0", stored(source, 3)) == (1, [AskDiskSnapshot("0")])
    stored(source, 4)
    assert view.apply("0", stored(source, 5)) == (1, [])
    view.snapshot("0", snapshot(source, 1, 2, 3, 4, 5))
    assert content(view) == {1, 2, 3, 4, 5}
    assert view.apply("0", stored(source, 6)) == (1, []), "the gap is healed"


def test_who_comes_late_asks_for_what_was_before() -> None:
    """The host tier was restarted beside a disk tier that is at event 3."""
    source = disk()
    stored(source, 1)
    view = DiskView()
    assert view.seen("0") == [AskDiskSnapshot("0")]
    assert view.seen("0") == [], "one question at a time"
    view.snapshot("0", snapshot(source, 1))
    assert content(view) == {1}
    assert view.apply("0", stored(source, 2)) == (1, [])


def test_a_snapshot_that_events_have_overtaken_still_counts() -> None:
    """1. A snapshot of 1, 2 leaves the disk tier. 2. `stored 3` is faster. 3. Nothing is lost.

    Otherwise a busy disk tier would never be known: every snapshot is overtaken.
    """
    source = disk()
    stored(source, 1, 2)
    view = DiskView()
    view.seen("0")
    reply = snapshot(source, 1, 2)
    view.apply("0", stored(source, 3))
    view.snapshot("0", reply)
    assert content(view) == {1, 2, 3}
    assert view.apply("0", stored(source, 4)) == (1, []), "the position did not go back"


def test_a_newer_snapshot_is_the_whole_truth() -> None:
    """What it does not list is gone; an event that it covers is old."""
    source = disk()
    view = following(source, 1, 2)
    late = removed(source, 1)
    view.snapshot("0", snapshot(source, 2, 3))
    assert content(view) == {2, 3}
    assert view.apply("0", late) == (0, [])


def test_a_snapshot_of_a_former_life_is_ignored() -> None:
    """It was on its way when the disk tier restarted."""
    old, new = disk(), disk(epoch=2)
    view = following(old)
    view.seen("0")
    view.apply("0", stored(new, 5))
    view.snapshot("0", snapshot(old, 1))
    assert content(view) == {5}


def test_no_snapshot_changes_nothing_and_may_be_asked_again() -> None:
    """The disk tier did not answer."""
    view = following(disk(), 1)
    view.seen("0")
    view.snapshot("0", None)
    assert content(view) == {1}
    assert view.seen("0") == [AskDiskSnapshot("0")]


def test_a_new_life_begins_empty() -> None:
    """`cleared` with a higher epoch; after that, events of the old life are old."""
    old, new = disk(), Announcer(host="h", source="disk-tier-0", tier="disk", epoch=2)
    view = following(old, 1)
    assert view.epoch("0") == 1
    assert view.apply("0", new.cleared("start")) == (0, [])
    assert view.apply("0", stored(old, 2)) == (0, [])
    assert content(view) == set()
    assert view.epoch("0") == 2


def test_a_lost_disk_tier_takes_its_blocks_only() -> None:
    """Instances 0 and 1; 0 leaves. What both had belongs to who said it last."""
    zero, one = disk(), disk(instance="1")
    view = following(zero, 1, 2)
    view.apply("1", stored(one, 2, 3))
    assert view.apply("0", removed(zero, 2)) == (0, [])
    assert content(view) == {1, 2, 3}, "instance 1 has it still"
    view.lost("0")
    assert content(view) == {2, 3}
    assert view.epoch("0") == 0


def test_forgotten_until_it_is_announced_anew() -> None:
    """The disk tier said that it does not have it."""
    source = disk()
    view = following(source, 1)
    view.forget(name(1))
    view.forget(name(1))
    assert not view.usable(name(1), 0)
    view.apply("0", stored(source, 1))
    assert view.usable(name(1), 0)


def test_avoided_for_a_while_or_until_it_is_announced_anew() -> None:
    """A fill of 1 failed at 100."""
    source = disk()
    view = following(source, 1)
    view.avoid(name(1), 100)
    assert name(1) in view, "it is there, most likely"
    assert not view.usable(name(1), 99 + AVOID_MS)
    assert view.usable(name(1), 100 + AVOID_MS)
    view.avoid(name(1), 100)
    view.apply("0", stored(source, 1))
    assert view.usable(name(1), 100)


def test_what_is_avoided_is_bounded() -> None:
    """The oldest failure is forgiven first."""
    view = following(disk(), 1)
    view.avoid(name(1), 0)
    for number in range(10, AVOID_MAX + 10):
        view.avoid(name(number), 0)
    assert view.usable(name(1), 0)
