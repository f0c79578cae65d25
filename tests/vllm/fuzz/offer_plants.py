"""Plants among the offers: blocks that are read before they are there, or when they are others'."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.vllm.fuzz.patches import original, replace

PREFIX = "kvbm_connectors."


def computed_by_this_request(self: Any) -> int:
    """Tokens, also those that a request shares with another one that still computes them."""
    request = self.request
    if self.lease is not None:
        return 0
    return int(min(request.num_computed_tokens - request.num_in_flight_tokens, request.num_tokens))


def offer_unfinished() -> None:
    """Blocks are offered while another request computes them."""
    replace(f"{PREFIX}vllm.tracked", "Tracked", "computed", computed_by_this_request)


def offer_everything_early() -> None:
    """Blocks are offered with the step that computes them: before they are there."""

    def computed(self: Any) -> int:
        return int(self.request.num_prompt_tokens)

    replace(f"{PREFIX}vllm.tracked", "Tracked", "computed", computed)


def keep_offers_of_preempted() -> None:
    """Offers of preempted requests are not revoked: their blocks are overwritten while read."""
    replace(f"{PREFIX}vllm.scheduler_side", "SchedulerSide", "_preempted", lambda self, name: None)


def offer_before_marks() -> None:
    """Blocks are offered while a draft model's pass still writes them."""

    def send(self: Any, *, hurry: bool = True) -> None:
        unsent, self._unsent = self._unsent, []
        self._send_all(unsent, hurry=hurry)

    replace(f"{PREFIX}vllm.device_offers", "DeviceOffers", "send", send)


def keep_offers_of_a_reset() -> None:
    """A request that a reset has preempted, and that is aborted, leaves its offers out."""
    finished = original(f"{PREFIX}vllm.scheduler_side", "SchedulerSide", "finished")

    def finish(self: Any, request: Any, tables: Sequence[Sequence[int]]) -> bool:
        return bool(finished(self, request, tables if any(tables) else [[0]]))

    replace(f"{PREFIX}vllm.scheduler_side", "SchedulerSide", "finished", finish)
