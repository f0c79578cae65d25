"""Event streams of an engine, as its connector describes them and the consolidator confirms."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import msgspec
from kvbm_common.wire.consolidator import Attach


class DescribedStreams:
    """The latest `Attach` of each stream, which its link sends whenever it connects.

    Described by the engine's thread; the link thread notes what the consolidator has taken in.
    """

    def __init__(self, streams: Sequence[Attach]) -> None:
        self._streams = list(streams)
        self._has_changed = threading.Condition()
        self._generations = {stream.rank: "" for stream in streams if stream.endpoint}
        """Rank → the generation that the consolidator has said last of its stream."""

    def __getitem__(self, index: int) -> Attach:
        return self._streams[index]

    @property
    def has_events(self) -> bool:
        """Tell whether there are events on any of the streams."""
        return bool(self._generations)

    def describe(self, **said: Any) -> None:
        """Change these fields in every stream; None: a field stays as it is."""
        changes = {name: value for name, value in said.items() if value is not None}
        self._streams = [msgspec.structs.replace(one, **changes) for one in self._streams]

    def taken(self, rank: int, generation: str) -> None:
        """Note which generation the consolidator names the blocks of a rank by."""
        with self._has_changed:
            if rank in self._generations:
                self._generations[rank] = generation
                self._has_changed.notify_all()

    def wait_taken(self, timeout_s: float) -> bool:
        """Wait until the consolidator has taken in every generation; False where it has not."""
        wanted = {one.rank: one.generation for one in self._streams if one.endpoint}
        with self._has_changed:
            return self._has_changed.wait_for(lambda: self._generations == wanted, timeout_s)
