"""Mistakes to be planted into the SGLang storage of a rank, each to be found by the fuzzer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvbm_common.identity import SequenceHash
from kvbm_connectors.client.worker import WorkerHalf
from kvbm_connectors.core.messages import OfferRun
from kvbm_connectors.sglang.storage import Storage
from kvbm_connectors.sglang.store import Store


def ignore_clear() -> None:
    """What was stored under the old weights is found after `clear`."""
    Storage.clear = lambda self: None  # type: ignore[method-assign]


def load_unverified() -> None:
    """Rotten bytes are handed over."""
    made = WorkerHalf.__init__

    def init(self: WorkerHalf, **options: Any) -> None:
        made(self, **(options | {"verify_every": 0}))

    WorkerHalf.__init__ = init  # type: ignore[method-assign]


def free_pages_early() -> None:
    """`set` returns before the host tier has pulled, and says that it held the pages."""

    def store(
        self: Store, parent: SequenceHash, names: Sequence[SequenceHash], blocks: Sequence[int]
    ) -> bool:
        with self._changed:
            return (
                self._scheduler.offer([OfferRun(parent, tuple(names), tuple(blocks))]) is not None
            )

    Store.store = store  # type: ignore[method-assign]


def shift_pages() -> None:
    """A load that begins with a miss fills the pages from the first one on."""
    load = Store.load

    def shifted(self: Store, names: Sequence[SequenceHash], blocks: Sequence[int]) -> list[bool]:
        return load(self, names, [*blocks[1:], blocks[0]])

    Store.load = shifted  # type: ignore[method-assign]


PLANTS: dict[str, Callable[[], None]] = {
    "ignored-clear": ignore_clear,
    "unverified": load_unverified,
    "early-pages": free_pages_early,
    "shifted-pages": shift_pages,
}
