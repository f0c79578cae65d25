"""Asking lower tiers what became of blocks: a question on NATS that no request waits for."""

from __future__ import annotations

import logging

import msgspec
from kvbm_common.errors import KvbmError
from kvbm_common.runtime.logs import OncePerKind
from kvbm_common.service.process import ServiceContext
from kvbm_common.wire.explain import fates_reply
from kvbm_common.wire.verbs import verb_subject

from kvbm_host_tier.core.messages import AskFates, FatesTold

DEADLINE_S = 1.0
"""The lower tier answers from memory; the core stops waiting a little later."""

_limiter = OncePerKind(logging.getLogger(__name__))


async def ask_fates(context: ServiceContext, effect: AskFates) -> FatesTold:
    """Ask a lower tier as AskFates says, and return its answer.

    Without an answer a miss is explained by what is known here.
    """
    subject = verb_subject(
        f"{effect.tier}-tier", "fates", host=context.host, instance=effect.instance
    )
    try:
        payload = await context.bus.request(
            subject, msgspec.json.encode(effect.request), deadline_s=DEADLINE_S
        )
        reply = fates_reply.decode(payload)
    except KvbmError as error:
        _limiter.warning(error.label, f"{subject}: {error}")
        reply = None
    return FatesTold(effect.question, effect.instance, reply, effect.tier)
