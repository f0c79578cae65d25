"""Lookups that engines have answered themselves, by the miss filter, and report later in bulk.

Each is counted and explained as if it had been asked: it would have found nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from kvbm_common.identity import SequenceHash, unpack_hashes
from kvbm_common.wire.explain import REQUEST_CHARS_MAX
from kvbm_common.wire.local import MissedLookup, Misses

from kvbm_host_tier.core.answers import Answers
from kvbm_host_tier.core.engines import Engine
from kvbm_host_tier.core.group_plan import GroupPlan
from kvbm_host_tier.core.limits import Means
from kvbm_host_tier.core.miss_reason import Looked


class FilteredLookups:
    """Counts and explains the lookups that engines report; nothing is answered."""

    def __init__(self, answers: Answers, *, keep: Callable[[Looked], None], means: Means) -> None:
        """Count by `answers`; `keep` keeps a lookup until its misses are explained."""
        self._answers = answers
        self._keep = keep
        self._counts = means.counts

    def take_in(self, misses: Misses, engine: Engine, now_ms: int) -> None:
        """Count and explain lookups. Raises IdentityError before anything is counted."""
        assert engine.id.incarnation == misses.incarnation, engine.label
        if misses.namespace not in engine.namespaces:
            self._counts["refused.lookup_namespace"] += len(misses.lookups)
            return
        found = [_missed(one) for one in misses.lookups]
        for one, names in zip(misses.lookups, found, strict=True):
            self._answers.count(len(names), 0, 0, 0, 0)
            self._keep(
                Looked(
                    one.request[:REQUEST_CHARS_MAX], misses.engine, now_ms,
                    names, 0, {}, "not_stored",
                    content=one.content, namespace=misses.namespace, avoided=one.avoided,
                    trace=one.trace, told_later=True,
                )
            )  # fmt: skip
        self._counts["lookups_at_once"] += len(found)
        self._counts["lookups_in_vain"] += misses.in_vain


def _missed(one: MissedLookup) -> list[SequenceHash]:
    """Return the blocks that a lookup misses. Raises IdentityError."""
    names = unpack_hashes(one.hashes)
    if not one.groups:
        return names
    plan = GroupPlan.of(one.groups, names)
    assert not plan.reach.tokens, f"a plan that reaches {plan.reach} without blocks"
    return plan.missed()
