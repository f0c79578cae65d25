"""Intake of offers: why one is refused, and the blocks that it names."""

from __future__ import annotations

from kvbm_common.identity import hash_from_hex, hashes_from_hex
from kvbm_common.wire.verbs import OFFER_BLOCKS_MAX, Offer

from kvbm_host_tier.core.engines import Engine
from kvbm_host_tier.core.offers import Wanted


def refusal_of(offer: Offer, engine: Engine | None, *, is_busy: bool, is_draining: bool) -> str:
    """Return the reason why an offer is refused; empty: it is taken.

    `engine` is who offers, if it is attached. `is_busy`: as many offers as may be are open.
    """
    if engine is None:
        return "unknown_engine"
    count = sum(len(run.hashes) for run in offer.runs)
    if count > OFFER_BLOCKS_MAX or any(len(r.hashes) != len(r.blocks) for r in offer.runs):
        return "malformed"  # First: the other refusals name the blocks.
    if not engine.complete:
        return "incomplete_engine"
    assert engine.workers, f"{engine.label} is complete without workers"
    if bytes.fromhex(offer.namespace) not in engine.namespaces:
        return "namespace"
    if is_busy:
        return "busy"
    if is_draining:
        return "draining"
    block_count = engine.block_count
    if any(block >= block_count for run in offer.runs for block in run.blocks):
        return "block_id"
    return ""


def blocks_of(offer: Offer) -> list[Wanted]:
    """Return the blocks of an offer with their parents; raises IdentityError."""
    wanted: list[Wanted] = []
    for run in offer.runs:
        parent = hash_from_hex(run.parent)
        for name, block in zip(hashes_from_hex(run.hashes), run.blocks, strict=True):
            wanted.append(Wanted(name, parent, block))
            parent = name
    return wanted
