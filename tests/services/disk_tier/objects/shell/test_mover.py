"""The object tier's mover: arenas that cannot be used."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

import pytest
from kvbm_common.runtime.metrics import Metrics

from tests.services.disk_tier.mediums import Place, arena
from tests.services.disk_tier.objects.making import make_medium


def test_an_arena_without_memory_for_lanes_is_not_kept_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The core asks again each second: each try kept a mapping and its descriptor."""

    def refuse(*_: object) -> NoReturn:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("kvbm_disk_tier.objects.shell.mover.LaneMemory", refuse)
    medium = make_medium(tmp_path, Metrics())
    with arena() as made:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            with pytest.raises(OSError, match="Cannot allocate"):
                Place(made, medium)
        assert len(os.listdir("/proc/self/fd")) == before
    medium.close()
