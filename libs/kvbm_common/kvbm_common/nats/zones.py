"""Zones: parts of a fleet with a NATS of their own, joined to the fleet's as a leaf node.

```
 hosts of zone a ──► NATS of zone a ── leaf link ──► NATS of the fleet ──► index, metrics, routers
                     domain "a"                      KVBM_ZONES=a,b
                     KVBM_EVENTS ···· is a source of ····► KVBM_EVENTS
```

A zone's streams have the names of any other fleet's. The fleet's NATS reads them as sources, from
where it has stopped: what a zone publishes while the link is down comes later, in order and once.
What is in a stream therefore never crosses the link as a message: the fleet would store it twice,
and a zone would store what is the fleet's. Verbs and their answers cross.

A zone's index knows one zone, and answers there. Questions to an index do not cross either:
nats-server (2.15.1) can keep those of a queue group from a link in both directions only.
"""

from __future__ import annotations

from kvbm_common.nats.streams import AUDIT, CONSOLIDATED, EVENTS, PARTITION_PREFIX
from kvbm_common.wire.partitions import INDEX_GROUP
from kvbm_common.wire.verbs import verb_subject

NEVER_CROSS = (
    *EVENTS.subjects,
    f"{PARTITION_PREFIX}.>",
    *CONSOLIDATED.subjects,
    *AUDIT.subjects,
    "$KV.>",
    "$O.>",
    verb_subject("index", "*"),
    f"kvbm.v1.{INDEX_GROUP}.>",
)
"""Subjects that stay on their side of a link: of streams, and questions that any index answers."""

SENT_BY_ZONES = ("kvbm.v1.>", "$SRV.>", "_INBOX.>", "$JS.S.>", "$JSC.R.>")
"""Subjects that the fleet takes from a zone: verbs, answers, and what its sources deliver."""


def sent_to_zone(zone: str) -> tuple[str, ...]:
    """Return what the fleet sends to a zone: verbs, answers, and how sources are read."""
    return ("kvbm.v1.>", "$SRV.>", "_INBOX.>", f"$JS.{zone}.API.>", "$JS.FC.>")
