"""Sources of a fleet's streams: how long each zone was silent, and a new try where one hangs.

nats-server asks a zone that did not answer again after half a minute, and then less and less often,
up to 150 s. A source that is taken away and given back is asked at once. It goes on after the last
message that the fleet's stream has of it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from kvbm_common.errors import KvbmError
from kvbm_common.nats.jetstream import Link, Source, call_api, raise_for_error
from kvbm_common.nats.streams import StreamSpec, source_of

PATIENCE_S = 2.0
"""A source that was just set up is not heard for a second."""
AGAIN_S = 30.0
"""Between two tries of ours with one source."""
ANSWER_S = 1.0
"""The time that a zone may take to say that it has the stream, in seconds."""

_log = logging.getLogger(__name__)


class _Described(msgspec.Struct, frozen=True):
    config: dict[str, Any]
    sources: list[Source] = []


class HangingSources:
    """Tries sources again as soon as their zones answer; an operator's process calls `wake`."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.absent: set[tuple[str, str]] = set()
        """Streams and zones that were due at the last look, and did not answer."""
        self._silent_since_s: dict[tuple[str, str], float] = {}
        self._tried_s: dict[tuple[str, str], float] = {}

    async def wake(self) -> list[str]:
        """Try each silent source whose zone answers; returns them as STREAM@ZONE.

        Raises JetStreamError, BusUnavailable, DeadlineExceeded.
        """
        woken: list[str] = []
        self.absent.clear()
        for spec in self._link.limits.partitioned.streams:
            zones = self._link.limits.fit(spec).zones
            if not zones:
                continue
            told = await call_api(self._link, f"STREAM.INFO.{spec.name}")
            described = msgspec.json.decode(told, type=_Described)
            silent = [one.zone for one in described.sources if self._is_silent(spec, one)]
            ready = [zone for zone in silent if zone in zones and await self._is_due(spec, zone)]
            if ready:
                await self._try_again(described.config, spec, ready)
                woken += [f"{spec.name}@{zone}" for zone in ready]
        return woken

    def _is_silent(self, spec: StreamSpec, source: Source) -> bool:
        """Tell whether a source was silent at this look, and at one some time before."""
        key, now_s = (spec.name, source.zone), time.monotonic()
        if not source.is_silent:
            self._silent_since_s.pop(key, None)
            return False
        return now_s - self._silent_since_s.setdefault(key, now_s) > PATIENCE_S

    async def _is_due(self, spec: StreamSpec, zone: str) -> bool:
        """Tell whether a zone has the stream and answers, and was not tried a moment ago."""
        now_s = time.monotonic()
        if now_s - self._tried_s.get((spec.name, zone), -AGAIN_S) < AGAIN_S:
            return False
        subject = f"$JS.{zone}.API.STREAM.INFO.{spec.name}"
        try:
            reply = await self._link.request_raw(subject, b"", deadline_s=ANSWER_S)
            raise_for_error(reply.payload)
        except KvbmError as error:
            _log.debug("%s of zone %s: %s", spec.name, zone, error)
            self.absent.add((spec.name, zone))
            return False
        self._tried_s[spec.name, zone] = now_s
        return True

    async def _try_again(
        self, config: dict[str, Any], spec: StreamSpec, zones: Sequence[str]
    ) -> None:
        """Take sources away and give them back.

        A process that dies in between leaves them to the next `set_up_streams`.
        """
        hanging = [source_of(spec.name, zone)["external"]["api"] for zone in zones]
        before = config.get("sources", [])
        rest = [one for one in before if one.get("external", {}).get("api") not in hanging]
        _log.info("%s: the sources in zones %s are tried again", spec.name, ", ".join(zones))
        for sources in (rest, before):
            await call_api(self._link, f"STREAM.UPDATE.{spec.name}", config | {"sources": sources})
