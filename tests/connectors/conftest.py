"""Fixtures: a worker on an arena that both can map, and a process that lends the same bytes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvbm_common.memory.arena import Arena

from tests.connectors.endpoints import host_tier
from tests.connectors.ranks import SIZE, THEIRS, Host, Rank
from tests.libs.nixl_owner import Owner, content


@pytest.fixture(scope="module")
def owner() -> Iterator[Owner]:
    """A process that holds an arena's bytes, and lends them over NIXL."""
    with Owner(SIZE, os.environ) as owner:
        yield owner


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    """The same bytes in a file that can be mapped."""
    with Arena.create(tmp_path, "arena", SIZE) as arena:
        arena.array[:] = content(SIZE)
        yield arena


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    rank = Rank(tmp_path)
    yield rank
    rank.close()


@pytest.fixture
def host(rank: Rank, arena: Arena, owner: Owner) -> Iterator[Host]:
    """A host tier that has welcomed the worker."""
    with host_tier(rank.endpoint) as host:
        rank.meet(host, arena_path=str(arena.path), arena_address=THEIRS, agent=owner.metadata)
        yield host
