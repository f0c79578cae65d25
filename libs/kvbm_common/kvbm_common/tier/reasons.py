"""Miss reasons: why a block of a lookup was missed, each with what it means in one line.

What to do about each is in docs/operating.md; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping

MEANINGS: Mapping[str, str] = {
    "never_stored": "no tier of this host has had it since we remember",
    "not_remembered": "was here; so much has left since that when and why it left is forgotten",
    "evicted": "left the tier to make room",
    "filtered": "was wanted once only when it left host memory: the disk's filter kept it off",
    "not_written": "left host memory before a lower tier had written it",
    "removed": "an operator has evicted or reset it",
    "lost": "its store was created again, or has lost it",
    "corrupt": "its bytes did not have their checksum",
    "arriving": "was on its way into host memory just then",
    "offload_failed": "was offered by an engine and did not come in",
    "behind": "was there, behind a block that was missing",
    "deadline": "did not come by the lookup's deadline",
    "no_room": "no slot was free to bring it to",
    "recompute_cheaper": "the engine computes it sooner than it would come",
    "fill_failed": "a lower tier refused to read it, or could not",
    "peer_failed": "another host has it, and did not bring it",
    "avoided": "has failed a short while ago, and was not asked for again",
    "tier_away": "is on a disk or in a bucket whose service is away",
    "salt_differs": "its tokens are here under another cache salt or LoRA",
    "namespace_differs": "its tokens are here under another namespace (model, layout, precision)",
    "other_namespace": "is here under this name, but not in a namespace of the engine",
    "too_long": "the answer has no room for so many blocks",
    "busy": "too many lookups were waiting for an answer",
    "draining": "the tier takes and brings nothing while it drains",
    "engine_lost": "the engine went away before the answer",
    "unknown": "no tier remembers why",
}
"""The reasons why a lookup did not find a block."""

UNEXPLAINED = frozenset({"unknown"})
"""Miss reasons that count as not explained."""

OUTCOMES: Mapping[str, str] = {
    "corrupt": "what the worker had read did not have its checksum",
    "load_failed": "the worker could not read it",
    "lease_ended": "the lease ended before the engine had used it",
    "no_answer": "the connector had given up before the answer came",
    "malformed": "the connector did not believe the answer",
    "avoided": "the connector did not ask: a load of it has failed a short while ago",
    "too_long": "the connector did not ask: a lookup has no room for so many blocks",
}
"""The outcomes that a connector reports after the answer, for blocks that it was promised or did
not ask for."""
