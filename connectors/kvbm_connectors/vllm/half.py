"""The scheduler half as the scheduler side sees it: lookups, loads, offers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.kv_groups import GroupRun
from kvbm_common.tier.prefill_cost import PrefillCost
from kvbm_common.wire.session_hint import Action

from kvbm_connectors.core.messages import Hit, Load, LoadResult, OfferEnded, OfferRun


class OffersTaken(Protocol):
    """SchedulerHalf, as far as offers go."""

    @property
    def epoch(self) -> int: ...
    def offer(
        self, runs: Sequence[OfferRun], *, priority: int = 0, namespace: bytes = b"",
        hurry: bool = True,
    ) -> int | None: ...  # fmt: skip
    def revoke(self, offer: int) -> None: ...
    def drain_ended(self) -> list[OfferEnded]: ...


class Half(OffersTaken, Protocol):
    """SchedulerHalf, as far as vLLM's scheduler side uses it."""

    def lookup(
        self,
        request: str,
        hashes: Sequence[SequenceHash],
        *,
        first_tokens: Sequence[int] | None = None,
        trace: str = "",
        groups: Sequence[GroupRun] = (),
        prefill: PrefillCost | None = None,
    ) -> Hit | None: ...
    def take(self, request: str, blocks: Sequence[int]) -> Load: ...
    def load_ended(self, result: LoadResult) -> None: ...
    def forget(self, request: str) -> None: ...
    def hint(
        self, session: str, action: Action, names: Sequence[SequenceHash] = (), *, ttl_ms: int = 0
    ) -> None: ...
