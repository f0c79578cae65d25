"""The thread of a store: everything happens in the order in which it is asked for.

It synchronises once for all records that wait together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from kvbm_disk_tier.core.journal import Record
from kvbm_disk_tier.shell.store import Store

T = TypeVar("T")


@dataclass(slots=True)
class _Append:
    records: tuple[Record, ...]
    write: int | None
    done: Future[tuple[int, ...]] = field(default_factory=Future)


class StoreThread:
    """The one thread that uses a store. Everything happens in the order in which it is asked for.

    Appends that wait together become one: a synchronisation costs the same for one batch as for
    sixteen, and while it lasts the next ones gather.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._waiting: deque[_Append | Callable[[], None]] = deque()

    def close(self) -> None:
        """Finish what was asked for, and end."""
        self._thread.shutdown(wait=True)

    def append(self, records: tuple[Record, ...], *, write: int | None) -> Future[tuple[int, ...]]:
        """Queue a `Store.append`, done together with others that wait; fails with OSError.

        `write`: the batch that these records commit, if they do. The first of those appended
        together learns of all, the others of none.
        """
        append = _Append(records, write)
        self._add(append)
        return append.done

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Queue any other function that uses the store, and return its future."""
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(function())
            except BaseException as error:
                done.set_exception(error)

        self._add(run)
        return done

    def _add(self, job: _Append | Callable[[], None]) -> None:
        self._waiting.append(job)
        self._thread.submit(self._take_turn)

    def _take_turn(self) -> None:
        """Run the next job; appends that wait next to each other run as one.

        One turn per job is submitted; a turn that finds nothing was spared by a group.
        """
        if not self._waiting:
            return
        job = self._waiting.popleft()
        if not isinstance(job, _Append):
            job()
            return
        group = [job]
        while self._waiting and isinstance(self._waiting[0], _Append):
            following = self._waiting.popleft()
            assert isinstance(following, _Append)
            group.append(following)
        self._append_group(group)

    def _append_group(self, group: list[_Append]) -> None:
        records = tuple(record for append in group for record in append.records)
        writes = tuple(append.write for append in group if append.write is not None)
        try:
            self.store.append(records, commit=bool(writes))
        except BaseException as error:
            for append in group:
                append.done.set_exception(error)
            return
        first, *others = group
        first.done.set_result(writes)
        for append in others:
            append.done.set_result(())
