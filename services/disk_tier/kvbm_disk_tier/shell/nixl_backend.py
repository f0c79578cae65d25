"""The back end of NIXL between memory and the file: POSIX, or GDS where that works."""

from __future__ import annotations

import logging
import mmap
import os
from pathlib import Path

import numpy as np
from kvbm_common.errors import KvbmError
from kvbm_common.nixl.mover_thread import MoverThread, TransferFailed, probe_posix
from kvbm_common.nixl.spans import Spans

AUTO = "auto"
TRIAL_BYTES = 4096
TRIAL_DEADLINE_S = 5.0
CLOSE_S = 1.0

log = logging.getLogger(__name__)


def file_mover(name: str, wanted: str, directory: Path, *, direct: bool = True) -> MoverThread:
    """Start a mover for files in `directory`; raises MoverUnavailable.

    A `wanted` back end other than AUTO is tried on a file there first: a plug-in may load, and its
    driver, or the file system, may still not do. If the trial fails or the plug-in is missing,
    POSIX is used.
    """
    if wanted != AUTO:
        backend = wanted.upper()
        try:
            mover = _tried(name, backend, directory, direct=direct)
        except (KvbmError, OSError) as error:
            log.warning("NIXL %s does not work here, POSIX is used instead: %s", backend, error)
        else:
            log.info("files over NIXL %s", backend)
            return mover
    mover = MoverThread(name, backends=("POSIX",))
    log.info("files over NIXL POSIX, %s", probe_posix())
    return mover


def _tried(name: str, backend: str, directory: Path, *, direct: bool) -> MoverThread:
    """Return a mover that has written a page and read it again; raises KvbmError or OSError."""
    mover = MoverThread(name, backends=(backend,))
    path = directory / "trial"
    try:
        fd = os.open(
            path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_DIRECT if direct else 0), 0o600
        )
        try:
            os.ftruncate(fd, TRIAL_BYTES)
            _there_and_back(mover, fd)
        finally:
            os.close(fd)
    except BaseException:
        mover.close(CLOSE_S)
        raise
    finally:
        path.unlink(missing_ok=True)
    return mover


def _there_and_back(mover: MoverThread, fd: int) -> None:
    memory = np.frombuffer(mmap.mmap(-1, 2 * TRIAL_BYTES), dtype=np.uint8)
    memory[:TRIAL_BYTES] = np.frombuffer(os.urandom(TRIAL_BYTES), dtype=np.uint8)
    address = int(memory.ctypes.data)
    page = Spans.of([0], TRIAL_BYTES)
    known = [
        mover.register_memory(address, 2 * TRIAL_BYTES).result(TRIAL_DEADLINE_S),
        mover.register_file(fd, TRIAL_BYTES).result(TRIAL_DEADLINE_S),
    ]
    source, target = (Spans.of([address + at], TRIAL_BYTES) for at in (0, TRIAL_BYTES))
    for move, side in ((mover.write_file, source), (mover.read_file, target)):
        move(fd, side, page, deadline_s=TRIAL_DEADLINE_S).result(2 * TRIAL_DEADLINE_S)
    for registration in known:
        mover.deregister(registration).result(TRIAL_DEADLINE_S)
    if not np.array_equal(memory[:TRIAL_BYTES], memory[TRIAL_BYTES:]):
        raise TransferFailed("what was written and read again was something else")
