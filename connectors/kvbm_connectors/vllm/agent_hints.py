"""Hints that agents give with requests of vLLM, sent on when a request arrives and ends."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from kvbm_common.identity import SequenceHash
from kvbm_common.wire.index_verbs import MATCH_BLOCKS_MAX

from kvbm_connectors.core.agent_hints import AgentHint, BadHint, hints_of
from kvbm_connectors.vllm.engine_types import EngineRequest
from kvbm_connectors.vllm.half import Half
from kvbm_connectors.vllm.kv_groups import KvGroup
from kvbm_connectors.vllm.tracked import Tracked
from kvbm_connectors.vllm.versions import hints_in

log = logging.getLogger(__name__)

LOGGED_MAX = 32
"""Fields whose bad values are logged, each once; all are counted."""


class AgentHints:
    """The hints of all requests of one engine that wait for their request's end."""

    def __init__(self, half: Half, groups: Sequence[KvGroup], counts: Counter[str]) -> None:
        self._half, self._groups, self._counts = half, groups, counts
        self._at_end: dict[str, list[AgentHint]] = {}
        self._seen: set[str] = set()
        """Requests whose hints are read, until they end."""
        self._logged: set[str] = set()

    def begin(self, request: EngineRequest) -> None:
        """Read the hints of a request, once, and send those that are for now."""
        name = request.request_id
        parameters = _parameters_of(request)
        envelope = hints_in(request)
        if (not parameters and envelope is None) or name in self._seen:
            return
        self._seen.add(name)
        hints, bad = hints_of(
            name,
            envelope=envelope,
            session=getattr(request, "session_id", None),
            parameters=parameters,
        )
        for one in bad:
            self._drop(name, one)
        for hint in hints:
            if not hint.at_end:
                self._half.hint(hint.session, hint.action)
        if at_end := [hint for hint in hints if hint.at_end]:
            self._at_end[name] = at_end

    def _drop(self, request: str, bad: BadHint) -> None:
        self._counts["hints_dropped.malformed"] += 1
        if bad.field not in self._logged and len(self._logged) < LOGGED_MAX:
            self._logged.add(bad.field)
            log.warning("a hint of request %s is left out: %s; further ones are counted",
                        request, bad)  # fmt: skip

    def end(self, name: str, tracked: Tracked | None) -> None:
        """Send the hints of a request that has finished; those of a refused request are dropped."""
        self._seen.discard(name)
        hints = self._at_end.pop(name, ())
        if tracked is None or tracked.refused:
            self._counts["hints_dropped.refused_request"] += len(hints)
            return
        for hint in hints:
            names = self._names(tracked, hint.tokens)
            self._half.hint(hint.session, hint.action, names, ttl_ms=hint.ttl_ms)

    def _names(self, tracked: Tracked, tokens: int | None) -> list[SequenceHash]:
        """Return the names of a request's first full blocks that are computed, group after group:
        those of its first `tokens` tokens; None: all."""
        request = tracked.request
        computed = min(request.num_computed_tokens, request.num_tokens)
        end = computed if tokens is None else min(tokens, computed)
        names: list[SequenceHash] = []
        for group in self._groups:
            names += tracked.first_names(group.hasher, max(0, end) // group.block_tokens)
        return names[:MATCH_BLOCKS_MAX]


def _parameters_of(request: EngineRequest) -> Mapping[str, Any]:
    """Return what a request's sender has said to connectors."""
    found = getattr(request, "kv_transfer_params", None)
    return found if isinstance(found, Mapping) else {}
