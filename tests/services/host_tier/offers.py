"""What is seen of an offer from outside."""

from __future__ import annotations

from kvbm_common.wire.events import Stored
from kvbm_common.wire.local import Pulled
from kvbm_host_tier.core.messages import Effect, StartPull

from tests.services.host_tier.helpers import Host, numbers, of


def one_pull(effects: list[Effect]) -> StartPull:
    """The one pull that was started."""
    [pull] = of(effects, StartPull)
    return pull


def told_pulled(host: Host, effects: list[Effect]) -> Pulled:
    """What the engine is told of its offer."""
    [pulled] = of(host.told(effects), Pulled)
    return pulled


def stored_blocks(host: Host) -> list[int]:
    """Everything that was announced as stored, in order."""
    runs = [run for event in host.events if isinstance(event, Stored) for run in event.runs]
    return [number for run in runs for number in numbers(run.hashes)]
