"""Identity: how many blocks one core names per second."""

from __future__ import annotations

import time

import numpy as np
from kvbm_common.identity import Hasher, Namespace

from benchmarks.harness import Row, median_rate, rate_row

BLOCKS = 100_000
TARGET_PER_S = 2_000_000.0


def run() -> list[Row]:
    """Blocks of 16 tokens, chained; CPU time, so that other processes do not count."""
    hasher = Hasher(Namespace(model="bench", block_tokens=16))
    tokens = np.arange(16 * BLOCKS, dtype=np.uint32)

    def measure() -> float:
        started = time.process_time()
        names = hasher.chain(tokens)
        return len(names) / (time.process_time() - started)

    measure()
    rate = median_rate(measure, 7)
    return [rate_row("blocks named per second and core, 16 tokens", rate, unit="blocks/s",
                     target=TARGET_PER_S)]  # fmt: skip
