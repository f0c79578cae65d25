"""What a core runs: modules and functions of ours within the steps of one small task.

A reader who follows the task has to open that many. Each function counts once; helpers of tests,
which play the outside world, do not count.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from unittest.mock import patch

from kvbm_disk_tier.core.core import DiskTierCore
from kvbm_host_tier.core.core import HostTierCore

from benchmarks.harness import Row, time_row
from tests.services.disk_tier.helpers import Disk
from tests.services.host_tier.helpers import Host

MODULES_MAX = 10
FUNCTIONS_MAX = 60
SLOTS = 64
"""Enough for slabs of several slots."""
ROOT = Path(__file__).resolve().parents[1]
PRODUCT = tuple(f"{ROOT / folder}/" for folder in ("libs", "services", "connectors"))


class Anatomy:
    """The functions of ours that ran, each as its file and qualified name."""

    def __init__(self) -> None:
        self.functions: set[tuple[str, str]] = set()

    @property
    def modules(self) -> set[str]:
        """The files of the functions."""
        return {file for file, _ in self.functions}

    @contextmanager
    def of(self, core: type) -> Iterator[None]:
        """Note what runs inside the steps of all instances of `core`."""
        step: Callable[..., object] = vars(core)["step"]

        def watched(*arguments: object, **more: object) -> object:
            sys.setprofile(self._note)
            try:
                return step(*arguments, **more)
            finally:
                sys.setprofile(None)

        with patch.object(core, "step", watched):
            yield

    def _note(self, frame: FrameType, event: str, _argument: object) -> None:
        file = frame.f_code.co_filename
        name = frame.f_code.co_qualname
        if event == "call" and file.startswith(PRODUCT) and not name.endswith(">"):
            self.functions.add((file, name))  # No comprehension, no lambda: they open no page.


def run() -> list[Row]:
    """Return modules and functions of an offload, a lookup and a disk write of two blocks each."""
    host, disk = Host(slots=SLOTS), Disk(slots=SLOTS)
    host.store(3, 4)  # A first block has a slab cut for its size: that is for thousands of blocks.
    disk.store(3, 4)
    return [
        *_rows("offload of two blocks", HostTierCore, lambda: host.store(1, 2)),
        *_rows("lookup of two blocks", HostTierCore, lambda: host.found(host.look_up(1, 2))),
        *_rows("disk write of two blocks", DiskTierCore, lambda: disk.store(1, 2)),
    ]


def _rows(what: str, core: type, task: Callable[[], object]) -> list[Row]:
    anatomy = Anatomy()
    with anatomy.of(core):
        task()
    return [
        time_row(f"{what}: modules", len(anatomy.modules), unit="modules", target=MODULES_MAX),
        time_row(
            f"{what}: functions", len(anatomy.functions), unit="functions", target=FUNCTIONS_MAX
        ),
    ]
