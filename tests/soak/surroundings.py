"""What the stack of a soak stands on: a small disk, a bucket or a shared directory, and a clock."""

from __future__ import annotations

import contextlib
import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from kvbm_common.runtime.processes import free_port

from tests.services.disk_tier.s3_server import S3Server
from tests.small_tmpfs import small_tmpfs
from tests.soak.clock import VARIABLE, WallClock

DISK_ROOM_BYTES = 320_000_000
SITE = Path(__file__).parent / "site"


@dataclass(frozen=True)
class Surroundings:
    """What faults reach beside the stack."""

    clock: WallClock
    small_disk: Path | None
    """A file system that can be filled; None where mounting is not permitted."""
    s3: S3Server | None
    """The bucket's server; None where hosts share a directory."""
    object_settings: dict[str, object]


def enter(directory: Path, seed: int, cleanup: ExitStack) -> Surroundings:
    """Make what a stack in this directory needs; processes that begin from now on follow the clock.
    Half of the seeds have a bucket."""
    clock = WallClock(directory / "clock")
    environ = cleanup.enter_context(pytest.MonkeyPatch.context())
    environ.setenv(VARIABLE, str(directory / "clock"))
    paths = [str(SITE), str(SITE.parents[2]), os.environ.get("PYTHONPATH", "")]
    environ.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    disk = _small_disk(directory / "disk", cleanup)
    if seed % 2:
        (directory / "shared").mkdir(mode=0o700)
        return Surroundings(clock, disk, None, {"object_url": f"file://{directory / 'shared'}"})
    s3 = S3Server(free_port(), directory / "s3.log")
    cleanup.callback(s3.kill)
    s3.start()
    return Surroundings(clock, disk, s3, {
        "object_url": f"s3://{s3.make_bucket()}", "object_endpoint": s3.endpoint,
        "object_access_key": s3.access_key, "object_secret_key": "secret",
    })  # fmt: skip


def _small_disk(where: Path, cleanup: ExitStack) -> Path | None:
    with contextlib.suppress(pytest.skip.Exception):
        return cleanup.enter_context(small_tmpfs(where, DISK_ROOM_BYTES))
    return None
