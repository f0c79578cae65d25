"""What the stack of a soak stands on: a small disk, a bucket or a shared directory, and a clock."""

from __future__ import annotations

import contextlib
import json
import os
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from kvbm_common.runtime.processes import free_port

from tests.services.disk_tier.s3_server import S3Server
from tests.small_tmpfs import small_tmpfs
from tests.soak import census
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


def enter(directory: Path, seed: int, cleanup: ExitStack, *, seconds: float) -> Surroundings:
    """Make what a stack in this directory needs; processes that begin from now on follow the clock
    and take a census, but in the first two tenths and the last of these seconds. Half of the seeds
    have a bucket."""
    clock = WallClock(directory / "clock")
    environ = cleanup.enter_context(pytest.MonkeyPatch.context())
    environ.setenv(VARIABLE, str(directory / "clock"))
    (directory / "census").mkdir()
    now_s = time.monotonic()
    planned = census.Plan(
        spacing_s=max(4.0, seconds / 60), from_s=now_s + 0.2 * seconds,
        until_s=now_s + 0.9 * seconds, directory=str(directory / "census"),
    )  # fmt: skip
    environ.setenv(census.VARIABLE, json.dumps(planned))
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
