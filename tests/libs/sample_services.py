"""Small services that child processes find as if they were installed."""

from __future__ import annotations

from pathlib import Path

SAMPLE = """
import asyncio
import sys
from kvbm_common.service.context import ServiceContext
from kvbm_common.service.process import run
from kvbm_common.wire.verbs import StatsReply

def stats(context):
    return StatsReply(kind=context.kind, host=context.host, instance=context.instance,
                      epoch=context.epoch, ready=True)

async def serve(context: ServiceContext) -> None:
    context.counters.counter("kvbm_samples_total", "Samples.").inc(3)
    context.set_stats(lambda: stats(context))
    context.ready(f"epoch {context.epoch}")
    await context.stopping.wait()

async def stubborn(context: ServiceContext) -> None:
    context.ready("for ever")
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pass

async def silent(context: ServiceContext) -> None:
    context.ready("without stats")
    await context.stopping.wait()

async def failing(context: ServiceContext) -> None:
    raise ZeroDivisionError("this is the reason")

def sample() -> None: run("sample", serve)
def other() -> None: run("other", silent)
def stubborn_main() -> None: run("stubborn", stubborn)
def failing_main() -> None: run("failing", failing)
"""
ENTRY_POINTS = """
[kvbm.services]
sample = kvbm_sample:sample
other = kvbm_sample:other
stubborn = kvbm_sample:stubborn_main
failing = kvbm_sample:failing_main
"""


def install(directory: Path) -> None:
    """Put them into a directory, which then belongs on PYTHONPATH."""
    (directory / "kvbm_sample.py").write_text(SAMPLE)
    information = directory / "kvbm_sample-0.1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: kvbm-sample\nVersion: 0.1")
    (information / "entry_points.txt").write_text(ENTRY_POINTS)
