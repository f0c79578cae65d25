"""The origin of a lookup: what it says of itself only so that it can be explained and traced."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from kvbm_common.identity import content_digest
from kvbm_common.runtime import trace_context
from kvbm_common.wire.local import Welcome

from kvbm_connectors.core.messages import UNSAID, Origin


def origin_of(
    welcome: Welcome | None, first_tokens: Sequence[int] | np.ndarray | None, trace: str
) -> Origin:
    """Return as much as the host tier wants to know of a lookup."""
    if welcome is None or not (welcome.explains or welcome.traces):
        return UNSAID
    content = b"" if first_tokens is None else content_digest(first_tokens)
    if not welcome.traces:
        return Origin(content)
    outer = trace_context.parse(trace)
    span = outer.child() if outer is not None else trace_context.new_trace()
    return Origin(content, str(span), time.time_ns() // 1_000, trace if outer else "")
