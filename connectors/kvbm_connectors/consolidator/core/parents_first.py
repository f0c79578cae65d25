"""The order in which blocks are announced: Dynamo's router refuses a block before its parent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

Key = TypeVar("Key")


def parents_first(held: Mapping[Key, Any], parent_of: Callable[[Key], Key | None]) -> Iterator[Key]:
    """Yield every key once, each behind its parent if that is held; else in the order of `held`.

    A parent that went and came back stands behind its child there.
    """
    done: set[Key] = set()
    for key in held:
        chain: list[Key] = []
        at: Key | None = key
        while at is not None and at in held and at not in done:
            done.add(at)
            chain.append(at)
            at = parent_of(at)
        yield from reversed(chain)
