"""Objects that are left tell of the store only where it refuses several, one after another."""

from __future__ import annotations

import errno
import os

import pytest
from kvbm_disk_tier.objects.core.undeleted import REFUSED_MIN, Undeleted
from kvbm_disk_tier.objects.shell.object_store import PASSING

DENIED = "AccessDenied"


def refuse(undeleted: Undeleted, *names: str, of: tuple[str, ...] = ()) -> list[str]:
    """Have these refused, of a batch of these and others; return those to be tried again."""
    return list(undeleted.answered([*names, *of], dict.fromkeys(names, DENIED), "here").again)


def test_one_locked_object_makes_no_refusal_however_often_it_is_met() -> None:
    """It comes alone, then another is deleted; every listing brings it back."""
    undeleted = Undeleted(PASSING)
    for number in range(2 * REFUSED_MIN):
        assert refuse(undeleted, "locked") == (["locked"] if not number else [])
        assert undeleted.refusal == ""
        assert undeleted.waiting == "objects wait to be deleted: 1 (AccessDenied)"
        assert undeleted.answered([f"{number}"], {}, "here").may_go_on


def test_locked_objects_are_taken_for_a_refusal_once() -> None:
    """They come together and alone: until one is deleted, nothing tells that others are."""
    undeleted = Undeleted(PASSING)
    locked = [f"locked/{number}" for number in range(REFUSED_MIN)]
    assert refuse(undeleted, *locked) == locked
    assert undeleted.refusal == "here: objects cannot be deleted (AccessDenied)"
    undeleted.answered(["other"], {}, "here")
    assert undeleted.refusal == ""
    assert refuse(undeleted, *locked) == []
    assert undeleted.refusal == ""


def test_a_store_that_refuses_one_object_after_another_refuses_to_delete() -> None:
    undeleted = Undeleted(PASSING)
    for number in range(REFUSED_MIN):
        assert undeleted.refusal == ""
        assert refuse(undeleted, f"{number}")
    assert undeleted.refusal
    assert not undeleted.answered(["0"], {"0": "SlowDown"}, "here").gone
    assert undeleted.refusal, "it has deleted nothing since"
    assert undeleted.answered(["0", "1", "2"], {}, "here").gone == ["0", "1", "2"]
    assert (undeleted.refusal, undeleted.waiting) == ("", "")


def test_an_object_that_is_left_counts_until_a_listing_has_ended() -> None:
    """The next listing to begin brings its block back; the one after it knows."""
    undeleted = Undeleted(PASSING)
    refuse(undeleted, "locked", of=("other",))
    undeleted.begin_listing(lambda name: False)
    assert undeleted.waiting == "objects wait to be deleted: 1 (AccessDenied)"
    refuse(undeleted, "again", of=("more",))
    undeleted.begin_listing(lambda name: False)
    assert undeleted.waiting == "objects wait to be deleted: 1 (AccessDenied)"
    undeleted.begin_listing(lambda name: False)
    assert len(undeleted) == 0


def test_an_object_that_is_tried_again_counts_however_many_listings_begin() -> None:
    undeleted = Undeleted(PASSING)
    undeleted.failed(["a", "b"], "503", refused=False)
    for _ in range(3):
        undeleted.begin_listing(lambda name: True)
    assert undeleted.waiting == "objects wait to be deleted: 2 (503)"
    undeleted.written("a")
    assert undeleted.answered(["b"], {}, "here").gone == ["b"]
    assert undeleted.waiting == ""


def test_objects_that_the_queue_has_no_room_for_wait_until_a_listing_has_passed() -> None:
    """A reset would be done, and the next listing would bring its blocks back."""
    undeleted = Undeleted(PASSING)
    undeleted.dropped(3)
    undeleted.begin_listing(lambda name: False)
    undeleted.dropped(1)
    assert undeleted.waiting == "objects wait to be deleted: 4 (there are too many)"
    undeleted.begin_listing(lambda name: False)
    assert undeleted.waiting == "objects wait to be deleted: 1 (there are too many)"
    undeleted.begin_listing(lambda name: False)
    assert undeleted.waiting == ""


@pytest.mark.parametrize("names", [[""], ["", "other"], ["other/1", "other/2", "other/3"]])
def test_an_answer_that_names_other_objects_deletes_none(names: list[str]) -> None:
    """An error without a key may be that of any object."""
    undeleted = Undeleted(PASSING)
    answer = undeleted.answered(["a", "b"], dict.fromkeys(names, DENIED), "here")
    assert (answer.gone, answer.again) == ([], ["a", "b"])
    assert answer.left == {"a": DENIED, "b": DENIED}
    assert not answer.may_go_on


@pytest.mark.parametrize("why", ["SlowDown", os.strerror(errno.EIO), os.strerror(errno.ESTALE)])
def test_a_reason_that_passes_is_no_refusal_and_asks_for_a_pause(why: str) -> None:
    """S3's, and a file server's."""
    assert why in PASSING
    undeleted = Undeleted(PASSING)
    names = [f"{number}" for number in range(2 * REFUSED_MIN)]
    answer = undeleted.answered(["gone", *names], dict.fromkeys(names, why), "here")
    assert (answer.gone, answer.again) == (["gone"], names)
    assert not answer.may_go_on
    assert not undeleted.answered(names, dict.fromkeys(names, why), "here").may_go_on
    assert undeleted.refusal == ""
