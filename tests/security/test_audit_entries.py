"""Entries of the audit: whose word they are, when one host is in foreign hands."""

from __future__ import annotations

import asyncio
import time

import msgspec
from kvbm_common.nats.jetstream import publish_acknowledged
from kvbm_common.nats.streams import AUDIT
from kvbm_common.runtime.metrics import Metrics
from kvbm_common.wire.admin import Audited, audit_codec, audit_subject
from kvbm_metrics.shell.audit_log import AuditLog

from tests.security.guarded_nats import GuardedNats
from tests.waiting import wait_until

OWN = audit_subject("host-tier", "a", "0")


async def test_an_entry_in_the_name_of_another_service_is_not_shown(guarded: GuardedNats) -> None:
    """Goal: what `kvbm audit` shows was written by the service that it names.

    1. A host tier writes entries of another kind, host and instance to its own subject, and one
    that is none. 2. They are counted. 3. Its own entry is shown.
    """
    own = Audited(ts_ms=time.time_ns() // 1_000_000, kind="host-tier", host="a", instance="0",
                  verb="reset", actor="alice", request="{}", outcome="ok")  # fmt: skip
    forged = [
        msgspec.structs.replace(own, kind="disk-tier"),
        msgspec.structs.replace(own, host="b"),
        msgspec.structs.replace(own, instance="1"),
        msgspec.structs.replace(own, host="a.0", instance=""),
    ]
    counters = Metrics()
    async with guarded.bus("host-tier") as attacker, guarded.bus("metrics") as reader:
        log = AuditLog(counters)
        following = asyncio.create_task(log.run(reader))
        for payload in (*map(audit_codec.encode, forged), b"none", audit_codec.encode(own)):
            await publish_acknowledged(attacker, AUDIT, OWN, payload)
        await wait_until(lambda: own in log.newest(9))
        assert log.newest(9) == [own]
        dropped = "kvbm_audit_dropped_total"
        assert counters.value(dropped, reason="forged") == 3
        assert counters.value(dropped, reason="malformed") == 2
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
