"""The scheduler side of vLLM's connector without vLLM: its request is a few numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvbm_common.identity import Hasher
from kvbm_common.wire.local import Attach, Hello, Lookup, Offered, Pulled
from kvbm_connectors.vllm.scheduler_side import SchedulerSide

from tests.connectors.endpoints import attached, consolidator, host_tier, wait_for, welcome
from tests.connectors.helpers import EPOCH, NAMESPACE, answer
from tests.connectors.test_scheduler import Half


@dataclass
class Request:
    """vllm.v1.request.Request, with a prompt of two blocks of four tokens and one token more."""

    request_id: str = "r"
    all_token_ids: Sequence[int] = tuple(range(9))
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    cache_salt: str | None = None
    lora_request: Any = None
    mm_features: Sequence[Any] = ()
    prompt_embeds: Any = None
    skip_reading_prefix_cache: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


@dataclass
class Output:
    """vllm.v1.core.sched.output.SchedulerOutput, of a step that computes nothing."""

    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    preempted_req_ids: Sequence[str] = ()
    kv_connector_block_state: Any = None


def test_workers_are_told_whether_anything_is_on_offer(tmp_path: Path) -> None:
    """Goal: a worker's mover stands ready exactly as long as the host tier may read.

    1. A request is looked up, computed and finished: its blocks are held and on offer.
    2. The host tier has them: they are sent, and nothing is on offer.
    """
    half = Half(tmp_path)
    half.start()
    side, request = SchedulerSide(half, Hasher(NAMESPACE)), Request()
    with host_tier(half.host_endpoint) as host, consolidator(half.consolidator_endpoint) as events:
        host.hear(Hello)
        host.say(welcome(EPOCH))
        events.hear(Attach)
        events.say(attached())
        wait_for(lambda: half.attached and half.streams_attached)
        assert not side.plan(Output()).offering
        assert side.matched(request, 0) == (None, False)
        host.say(answer(host.hear(Lookup).lookup, 0))
        wait_for(lambda: side.matched(request, 0) == (0, False))
        request.num_computed_tokens = 9
        assert side.finished(request, [3, 4, 5])
        assert side.plan(Output()).offering
        offered = events.hear(Offered)
        assert [run.blocks for run in offered.runs] == [[3, 4]]
        host.say(Pulled(offer=offered.offer, pulled=2, skipped=0))
        wait_for(lambda: not side.holding or side.plan(Output()).sent == ("r",))
        assert not side.plan(Output()).offering
        assert side.idle
        half.close()
