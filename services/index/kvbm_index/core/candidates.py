"""Candidates: which engines may take a prompt, and why others are left out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvbm_common.identity import Namespace
from kvbm_common.tier.follow import FollowState
from kvbm_common.wire.routes import EngineLoad, LeftOut, RouteRequest

from kvbm_index.core.messages import SourceKey
from kvbm_index.core.requests import BadRequest


@dataclass(frozen=True, slots=True)
class Candidate:
    """One rank of an engine that may take the prompt, with its load."""

    key: SourceKey
    rank: int
    load: EngineLoad


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """An engine's entry in the registry: data-parallel ranks, digests of its namespaces."""

    ranks: Sequence[int] = ()
    """Empty: its entry lists none. Then any rank that is named counts, else rank 0."""
    namespaces: Sequence[str] = ()


NO_FACTS = EngineFacts()


def candidates(
    request: RouteRequest,
    known: Mapping[SourceKey, FollowState],
    facts: Mapping[SourceKey, EngineFacts],
) -> tuple[list[Candidate], list[LeftOut]]:
    """Return the candidates for a prompt, and the engines that are left out, each with its reason.

    `known` has the engines that are registered. Raises BadRequest where one is named twice.
    """
    hosts: dict[str, list[str]] = defaultdict(list)
    for host, source in known:
        hosts[source].append(host)
    found: dict[tuple[SourceKey, int], Candidate] = {}
    left_out: list[LeftOut] = []
    everyone = [EngineLoad(source=key.source, host=key.host) for key in known]
    for load in request.engines or everyone:
        there = [host for host in hosts.get(load.source, ()) if load.host in ("", host)]
        if not there:
            left_out.append(LeftOut(host=load.host, source=load.source, reason="unknown"))
        for key in [SourceKey(host, load.source) for host in there]:
            entry = facts.get(key, NO_FACTS)
            if known[key] is not FollowState.CURRENT:
                left_out.append(LeftOut(host=key.host, source=key.source, reason="behind"))
            elif not _serves(entry, request.namespace):
                left_out.append(LeftOut(host=key.host, source=key.source, reason="namespace"))
            else:
                ranks = _ranks_of(load, entry)
                if not ranks:
                    left_out.append(LeftOut(host=key.host, source=key.source, reason="unknown"))
                for one in [Candidate(key, rank, load) for rank in ranks]:
                    if (one.key, one.rank) in found:
                        raise BadRequest(f"the engine {key.source} is named twice", "engines")
                    found[one.key, one.rank] = one
    assert all(known[one.key] is FollowState.CURRENT for one in found.values()), known
    return list(found.values()), left_out


def _serves(entry: EngineFacts, namespace: Namespace | None) -> bool:
    """Tell whether an engine may have this namespace; the registry has those of first groups."""
    if namespace is None or namespace.group > 0 or not entry.namespaces:
        return True
    return namespace.digest.hex() in entry.namespaces


def _ranks_of(load: EngineLoad, entry: EngineFacts) -> Sequence[int]:
    """Return the ranks of an engine that are meant; none if it does not have the one."""
    if load.rank is None:
        return entry.ranks or (0,)
    return (load.rank,) if not entry.ranks or load.rank in entry.ranks else ()
