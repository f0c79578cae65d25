"""Deletes that fail: they are tried again, and no listing brings their objects back meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager

import pytest
from kvbm_disk_tier.core.messages import DeletesAnswered, DeletesRefused
from kvbm_disk_tier.objects.core.answers import FolderList, Page
from kvbm_disk_tier.objects.shell import deletes as deletes_module
from kvbm_disk_tier.objects.shell.deletes import Deletes
from kvbm_disk_tier.objects.shell.object_store import BucketError, BucketRefused

from tests.waiting import wait_until


class Store:
    """A store that deletes nothing while it has a `failure`, nor before `may_answer` is set."""

    def __init__(self) -> None:
        self.where = "test"
        self.check_s: float | None = None
        self.failure: BucketError | None = None
        self.left: dict[str, str] = {}
        """Names that it does not delete, and why; "*": all others."""
        self.deletes_none_and_names: dict[str, str] = {}
        """Names, and why, that it tells instead of those that it was asked for."""
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.asked: list[list[str]] = []
        self.deleted: list[str] = []

    async def delete(self, names: Sequence[str]) -> dict[str, str]:
        """Fail, or delete these."""
        self.asked.append(list(names))
        await self.may_answer.wait()
        if self.failure is not None:
            raise self.failure
        if self.deletes_none_and_names:
            return self.deletes_none_and_names
        left = {name: why for name in names if (why := self.left.get(name, self.left.get("*")))}
        self.deleted += [name for name in names if name not in left]
        return left

    async def folders(self, prefix: str) -> FolderList:
        """Is not asked."""
        raise NotImplementedError

    async def page(self, prefix: str, after: str) -> Page:
        """Is not asked."""
        raise NotImplementedError

    async def size(self, name: str) -> int | None:
        """Is not asked."""
        raise NotImplementedError

    async def probe(self, prefix: str, *, write: bool) -> None:
        """Is not asked."""
        raise NotImplementedError


@pytest.fixture
async def store() -> Store:
    """The store of one test."""
    return Store()


@asynccontextmanager
async def running(deletes: Deletes) -> AsyncIterator[list[DeletesRefused]]:
    """The task that empties the queue, and what it tells of refusals and failures."""
    told: list[DeletesRefused] = []

    def tell(message: DeletesRefused | DeletesAnswered) -> None:
        if isinstance(message, DeletesRefused):
            told.append(message)

    task = asyncio.create_task(deletes.run(tell))
    try:
        yield told
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.mark.parametrize("failure", [BucketRefused("ExpiredToken"), BucketError("SlowDown")])
async def test_names_whose_delete_has_failed_are_tried_again(
    store: Store, failure: BucketError
) -> None:
    """1. Deletes fail. 2. A listing begins, and names the objects. 3. The store deletes again."""
    names = [f"kv/{number}" for number in range(500)]
    ended: list[tuple[str, int]] = []
    deletes = Deletes(store, lambda outcome, count: ended.append((outcome, count)))
    store.failure = failure
    deletes.add(names)
    async with running(deletes):
        await wait_until(lambda: ended)
        assert ended[0] == ("failed", 500)
        deletes.forget()
        assert all(map(deletes.concerns, names)), "a listing would bring them back"
        store.failure = None
        await wait_until(lambda: not len(deletes))
    assert store.deleted == names
    assert ended[-1] == ("deleted", 500)
    deletes.forget()
    assert not any(map(deletes.concerns, names))


async def test_an_object_that_is_written_again_is_not_deleted_by_a_delete_that_failed(
    store: Store,
) -> None:
    """The write waits for the delete under way, which would be tried again after it."""
    deletes = Deletes(store, lambda outcome, count: None)
    store.failure = BucketRefused("ExpiredToken")
    store.may_answer.clear()
    deletes.add(["kv/a", "kv/b"])
    async with running(deletes):
        await wait_until(lambda: store.asked)
        writable = asyncio.create_task(deletes.wait_writable("kv/a"))
        store.may_answer.set()  # The write waits by then: its task is the first to go on.
        await writable
        assert not deletes.concerns("kv/a")
        store.failure = None
        await wait_until(lambda: store.deleted)
    assert store.deleted == ["kv/b"]


async def test_every_name_in_a_long_queue_is_kept_from_a_listing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue takes more names than are known once they are deleted."""
    monkeypatch.setattr(deletes_module, "LATELY_MAX", 2)
    deletes = Deletes(store, lambda outcome, count: None)
    names = ["kv/a", "kv/b", "kv/c", "kv/d"]
    deletes.add(names)
    assert len(deletes.lately) == 2
    assert all(map(deletes.concerns, names))


@pytest.mark.parametrize("why", ["InternalError", "SlowDown", "AccessDenied"])
async def test_names_that_a_store_leaves_are_tried_again_when_it_deletes_none(
    store: Store, why: str
) -> None:
    """S3 answers 200, with an error for each name."""
    deletes = Deletes(store, lambda outcome, count: None)
    names = ["kv/a", "kv/b"]
    store.left = {"*": why}
    deletes.add(names)
    async with running(deletes):
        await wait_until(lambda: len(store.asked) > 1)
        deletes.forget()
        assert all(map(deletes.concerns, names)), "a listing would bring them back"
        store.left = {}
        await wait_until(lambda: not len(deletes))
    assert sorted(store.deleted) == names


async def test_a_name_that_a_store_leaves_for_now_is_tried_again_and_a_refused_one_is_not(
    store: Store,
) -> None:
    """One object is locked for a year: the next listing may find it."""
    ended: list[tuple[str, int]] = []
    deletes = Deletes(store, lambda outcome, count: ended.append((outcome, count)))
    store.left = {"kv/b": "InternalError", "kv/c": "AccessDenied"}
    deletes.add(["kv/a", "kv/b", "kv/c"])
    async with running(deletes) as told:
        await wait_until(lambda: len(store.asked) > 1)
        store.left = {}
        await wait_until(lambda: not len(deletes))
    assert (store.deleted, store.asked[1]) == (["kv/a", "kv/b"], ["kv/b"])
    assert ended[:2] == [("failed", 2), ("deleted", 1)]
    assert told[0] == DeletesRefused("", "objects wait to be deleted: 2 (AccessDenied)")
    assert told[-1] == DeletesRefused("", "objects wait to be deleted: 1 (AccessDenied)")
    assert not any(one.reason for one in told), "it deletes"


@pytest.mark.parametrize("failure", [None, BucketRefused("no access (AccessDenied)")])
async def test_a_store_that_refuses_to_delete_is_told_once_and_that_it_deletes_again(
    store: Store, failure: BucketRefused | None
) -> None:
    """For each name, or as a whole."""
    deletes = Deletes(store, lambda outcome, count: None)
    store.failure, store.left = failure, {"*": "AccessDenied"}
    deletes.add(["kv/a", "kv/b", "kv/c"])
    async with running(deletes) as told:
        await wait_until(lambda: len(store.asked) > 1)
        [refused] = told
        assert "AccessDenied" in refused.reason
        store.failure, store.left = None, {}
        await wait_until(lambda: not len(deletes))
        await wait_until(lambda: len(told) > 1)
    assert told == [refused, DeletesRefused("")]


@pytest.mark.parametrize("failure", [None, BucketError("503")])
async def test_deletes_that_fail_for_now_are_told_as_waiting(
    store: Store, failure: BucketError | None
) -> None:
    """A reset that says done meanwhile would be taken for an empty bucket."""
    deletes = Deletes(store, lambda outcome, count: None)
    store.failure, store.left = failure, {"*": "503"}
    deletes.add(["kv/a", "kv/b"])
    async with running(deletes) as told:
        await wait_until(lambda: told)
        [waiting] = told
        store.failure, store.left = None, {}
        await wait_until(lambda: len(told) > 1)
    assert waiting.waiting.startswith("objects wait to be deleted: 2 (")
    assert told[1:] == [DeletesRefused("")]


async def test_deletes_without_room_are_told_as_waiting(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbm_disk_tier.objects.shell.deletes.QUEUE_MAX", 2)
    counts: Counter[str] = Counter()
    deletes = Deletes(store, lambda outcome, count: counts.update({outcome: count}))
    async with running(deletes) as told:
        deletes.add(["kv/a", "kv/b", "kv/c"])
        await wait_until(lambda: counts["deleted"] == 2)
    assert (counts["dropped"], [one.waiting for one in told]) == (
        1, ["objects wait to be deleted: 1 (there are too many)"],
    )  # fmt: skip


async def test_a_refusal_does_not_end_because_one_block_is_written_again(store: Store) -> None:
    """The store has deleted nothing. With the last block, and a listing, nothing tells of it."""
    deletes = Deletes(store, lambda outcome, count: None)
    store.left = {"*": "AccessDenied"}
    names = ["kv/a", "kv/b", "kv/c", "kv/d"]
    deletes.add(names)
    async with running(deletes) as told:
        await wait_until(lambda: told)
        for name in names:
            assert told[-1].reason
            await deletes.wait_writable(name)
        assert told[-1].reason
        deletes.forget()
    assert told[-1] == DeletesRefused("")


async def test_a_store_that_says_slow_down_is_not_asked_at_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It deletes one name of each batch, and says so of all others: the pauses grow."""
    pauses: list[float] = []

    def counted_pauses() -> Iterator[float]:
        for pause in itertools.count():
            pauses.append(pause)
            yield 0.0

    async def delete(names: Sequence[str]) -> dict[str, str]:
        store.asked.append(list(names))
        return dict.fromkeys(names[1:], "SlowDown")

    monkeypatch.setattr(deletes_module, "backoff", counted_pauses)
    monkeypatch.setattr(store, "delete", delete)
    deletes = Deletes(store, lambda outcome, count: None)
    deletes.add(["kv/a", "kv/b", "kv/c"])
    async with running(deletes):
        await wait_until(lambda: not len(deletes))
    assert [len(names) for names in store.asked] == [3, 2, 1]
    assert pauses == [0, 1]


async def test_an_answer_that_names_other_objects_is_counted_as_a_failure(store: Store) -> None:
    """A counter takes no negative number: the task would end."""
    ended: list[tuple[str, int]] = []
    deletes = Deletes(store, lambda outcome, count: ended.append((outcome, count)))
    store.deletes_none_and_names = {"other/1": "AccessDenied", "other/2": "AccessDenied"}
    deletes.add(["kv/a"])
    async with running(deletes):
        await wait_until(lambda: ended)
        assert deletes.concerns("kv/a")
    assert ended[:2] == [("failed", 1), ("deleted", 0)]


async def test_a_removal_is_answered_when_the_store_has_answered_for_each_of_its_objects(
    store: Store,
) -> None:
    """Goal: a reset does not say done while the first delete is under way.

    1. Two removals, the second while the first is under way. 2. The store deletes. 3. It fails:
    that is told before the removal counts as answered. 4. It deletes again.
    """
    told: list[DeletesRefused | DeletesAnswered] = []
    deletes = Deletes(store, lambda outcome, count: None)
    task = asyncio.create_task(deletes.run(told.append))
    try:
        store.may_answer.clear()
        deletes.add(["kv/a"], order=7)
        await wait_until(lambda: store.asked)
        deletes.add(["kv/b"], order=9)
        assert told == []
        store.may_answer.set()
        await wait_until(lambda: len(told) == 2)
        assert told == [DeletesAnswered(8), DeletesAnswered(9)]
        store.left = {"*": "SlowDown"}
        deletes.add(["kv/c"], order=12)
        await wait_until(lambda: len(told) == 4)
        waiting = "objects wait to be deleted: 1 (SlowDown)"
        assert told[2:] == [DeletesRefused("", waiting), DeletesAnswered(12)]
        deletes.add(["kv/wrong-size"])
        store.left = {}
        await wait_until(lambda: told[-1] == DeletesRefused(""))
        await wait_until(lambda: not len(deletes))
        assert len(told) == 5
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
