"""The verbs with which lower tiers and other hosts read the arena, and operators change the tier.

Some only read the core's view; the others are inputs of the core, whose answer is waited for.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from kvbm_common.errors import KvbmError
from kvbm_common.nats.bus import VerbHandler
from kvbm_common.nats.snapshots import SnapshotPages
from kvbm_common.runtime.loop import CoreLoop
from kvbm_common.service.admin_verbs import CoreAnswers
from kvbm_common.wire.admin import PrefetchRequest, TierRequest
from kvbm_common.wire.codec import JsonCodec
from kvbm_common.wire.verbs import (
    ArenaRequest,
    DoorReply,
    DoorRequest,
    LeaseRequest,
    ReleaseRequest,
)

from kvbm_host_tier.core.messages import AdminAsked, Effect, Input, LeaseAsked, ReleaseAsked
from kvbm_host_tier.core.view import HostTierView
from kvbm_host_tier.shell.peer_reader import DoorClosed, PeerReader
from kvbm_host_tier.shell.spans import OnboardSpans

VERB_DEADLINE_S = 5.0
"""The longest wait for room in the inbox of the core, and then for its answer."""

_arena_request: JsonCodec[ArenaRequest] = JsonCodec(ArenaRequest)
_door_request: JsonCodec[DoorRequest] = JsonCodec(DoorRequest)
_lease_request: JsonCodec[LeaseRequest] = JsonCodec(LeaseRequest)
_release_request: JsonCodec[ReleaseRequest] = JsonCodec(ReleaseRequest)


class OneSizeOnly(KvbmError):
    """The asker is of a release whose arenas have slots of one size."""

    code = "one_size"


class HostTierVerbs:
    """Answers requests on NATS, other than those for explanations."""

    def __init__(
        self,
        view: HostTierView,
        loop: CoreLoop[Input, Effect],
        answers: CoreAnswers,
        spans: OnboardSpans,
        peer_reader: PeerReader,
    ) -> None:
        self._view, self._loop, self._answers = view, loop, answers
        self._spans, self._peer_reader = spans, peer_reader
        self._snapshots = SnapshotPages(lambda _: view.snapshot_pages())

    def handlers(self) -> dict[str, VerbHandler]:
        """Return the verbs, but those of operators: see `admin`."""
        return {
            "arena": self._arena,
            "door": self._door,
            "lease": self._lease,
            "release": self._release,
            "snapshot": self._snapshot,
        }

    async def admin(self, verb: str, request: TierRequest | PrefetchRequest) -> bytes:
        """Have the core carry out an operator's verb, and return its reply."""
        return await self._ask_core(lambda reply_to: AdminAsked(reply_to, verb, request))

    async def _arena(self, payload: bytes) -> bytes:
        _require_any_size(_arena_request.decode(payload or b"{}"))
        return msgspec.json.encode(self._view.arena_reply())

    async def _door(self, payload: bytes) -> bytes:
        _require_any_size(_door_request.decode(payload or b"{}"))
        opened, arena = self._peer_reader.opened, self._view.arena_reply()
        if opened is None or not arena.slot_bytes:
            raise DoorClosed("the peer reader is not running")
        self._peer_reader.expect_peer()
        reply = DoorReply(
            epoch=arena.epoch,
            slot_bytes=arena.slot_bytes,
            slot_count=arena.slot_count,
            address=opened.address,
            agent=opened.agent,
        )
        return msgspec.json.encode(reply)

    async def _snapshot(self, payload: bytes) -> bytes:
        return self._snapshots.answer(payload)

    async def _lease(self, payload: bytes) -> bytes:
        request = _lease_request.decode(payload)
        return await self._spans.lease(
            request, self._ask_core(lambda reply_to: LeaseAsked(reply_to, request))
        )

    async def _release(self, payload: bytes) -> bytes:
        request = _release_request.decode(payload)
        return await self._ask_core(lambda reply_to: ReleaseAsked(reply_to, request))

    async def _ask_core(self, make: Callable[[int], Input]) -> bytes:
        return await self._answers.ask(
            lambda reply_to: self._loop.offer(make(reply_to), deadline_s=VERB_DEADLINE_S),
            deadline_s=VERB_DEADLINE_S,
        )


def _require_any_size(request: ArenaRequest | DoorRequest) -> None:
    """Raise OneSizeOnly for an asker that would look for blocks in wrong places."""
    if not request.any_size:
        raise OneSizeOnly(
            "the slots of this arena have several sizes, and the asker is of a release that knows "
            "one: upgrade it"
        )
