"""One example of every message, in full; `tests/golden/wire` holds their bytes.

`python -m tests.libs.wire_examples` writes missing golden files. It never changes one that is
there: bytes that were once on the wire stay readable, so a change is made by hand and on purpose.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from kvbm_common.checksum import pack_sums
from kvbm_common.identity import Hasher, Namespace, pack_hashes
from kvbm_common.tier.kv_groups import GroupRun
from kvbm_common.tier.parts import Grid, Share
from kvbm_common.tier.prefill_cost import PrefillCost
from kvbm_common.wire import (
    admin,
    consolidator,
    events,
    index_verbs,
    local,
    packed_events,
    routes,
    scores,
    slot_entries,
    verbs,
)
from kvbm_common.wire.codec import JsonCodec, MsgpackCodec
from kvbm_common.wire.local_fields import Adapter
from kvbm_common.wire.session_hint import SessionHint
from kvbm_common.wire.tier_stats import SizeStats, TenantStats, WorkerStats
from msgspec.structs import replace

GOLDEN = Path(__file__).parent.parent / "golden" / "wire"

NAMESPACE = Namespace(model="meta-llama/Llama-3.1-8B", block_tokens=16, layers=32, heads=8)
DIGEST = NAMESPACE.digest
PARENT = NAMESPACE.root
HASHES = Hasher(NAMESPACE).chain(range(48))
HEX = [one.hex() for one in HASHES]
PACKED = pack_hashes(HASHES)
INCARNATION = "00c0ffee00c0ffee"
EPOCH = 1_760_000_000_000_017
RUN = events.Run(parent=PARENT.hex(), hashes=HEX)


def _source(**fields: Any) -> dict[str, Any]:
    return {"host": "gpu-a", "source": "host-tier-0", "tier": "host", "epoch": EPOCH} | fields


def _engine(**fields: Any) -> dict[str, Any]:
    return {"engine": "sim-0", "incarnation": INCARNATION} | fields


STORED = events.Stored(
    **_source(seq=2, ts_ms=1_760_000_000_123), namespace=DIGEST.hex(), runs=[RUN]
)
REMOVED = events.Removed(
    **_source(seq=3, ts_ms=1_760_000_001_123),
    namespace=DIGEST.hex(),
    hashes=HEX[2:],
    reason="evicted",
)
CLEARED = events.Cleared(**_source(seq=1, ts_ms=1_760_000_000_000), reason="start")

EVENTS: Mapping[str, events.Event] = {
    "stored": STORED,
    "stored_sized": replace(STORED, block_bytes=2_097_152),
    "removed": REMOVED,
    "cleared": CLEARED,
}

_PART: dict[str, Any] = {"tier": "device", "ts_ms": 1_760_000_000_123, "namespace": DIGEST}
PACKED_EVENTS = {
    "packed_events": packed_events.PackedEvents(
        epoch=EPOCH,
        seq=2,
        parts=[
            packed_events.StoredPart(
                **_PART,
                rank=1,
                sizes=[1, 2],
                runs=[packed_events.PackedRun(parent=PARENT, hashes=PACKED)],
            ),
            packed_events.RemovedPart(
                **_PART, rank=1, sizes=[1], hashes=HASHES[2], reason="evicted"
            ),
        ],
    ),
}

WORKER = WorkerStats(
    engine="sim-0",
    incarnation=INCARNATION,
    rank=0,
    world_size=1,
    namespace=NAMESPACE,
    block_bytes=2_097_152,
    seen_ms_ago=40,
)
LEASED = slot_entries.LeasedSlot(
    hash=HEX[0],
    parent=PARENT.hex(),
    namespace=DIGEST.hex(),
    slot=7,
    checksum=0xFEED_FACE_CAFE_BEEF,
    bytes=2_097_152,
)
FILLED = slot_entries.FilledSlot(
    hash=HEX[0],
    slot=7,
    ok=True,
    parent=PARENT.hex(),
    namespace=DIGEST.hex(),
    checksum=0xFEED_FACE_CAFE_BEEF,
    bytes=2_097_152,
)
GRID = Grid(ranges=2, layers=16, heads=2)
PARTS: dict[str, Any] = {"checksum": 0x11, "parts": GRID.code}
"""Of a block that is cut by layers and heads."""
SUMS = pack_sums([2**64 - 1, 0, 1, 2])
HOLDER: dict[str, Any] = {"host": "gpu-a", "source": "disk-tier-0", "tier": "disk"}
MATCH = index_verbs.HolderMatch(**HOLDER, blocks=2)
MATCH_ALL = index_verbs.MatchRequest(hashes=HEX)
OFFER_RUN = verbs.OfferRun(parent=PARENT.hex(), hashes=HEX, blocks=[4, 9, 2])

VERBS: dict[str, msgspec.Struct] = {
    "offer": verbs.Offer(
        **_engine(host="gpu-a", offer=3, namespace=DIGEST.hex()),
        deadline_ms=5_000,
        runs=[OFFER_RUN],
    ),
    "hits": verbs.Hits(namespace=DIGEST.hex(), hashes=HEX),
    "arena_request": verbs.ArenaRequest(),
    "door_request": verbs.DoorRequest(),
    "door_reply": verbs.DoorReply(
        epoch=EPOCH,
        slot_bytes=2_097_152,
        slot_count=512,
        address=140_000_000_000_000,
        agent=b"NIXL metadata",
    ),
    "arena_reply": verbs.ArenaReply(
        path="/dev/shm/kvbm-gpu-a-1760000000000017-arena",
        bytes=1_073_741_824,
        slot_bytes=2_097_152,
        slot_count=512,
        epoch=EPOCH,
        instance="0",
    ),
    "lease_request": verbs.LeaseRequest(
        owner="disk-tier-0", epoch=EPOCH, hashes=HEX, lease_ms=10_000
    ),
    "lease_reply": verbs.LeaseReply(lease=12, slots=[LEASED]),
    "lease_reply_parts": verbs.LeaseReply(lease=12, slots=[replace(LEASED, **PARTS)]),
    "lease_reply_over_share": verbs.LeaseReply(lease=12, slots=[], over_share=HEX),
    "release_request": verbs.ReleaseRequest(lease=12),
    "release_reply": verbs.ReleaseReply(valid=True),
    "fill_request": verbs.FillRequest(
        epoch=EPOCH, until_ms=86_400_000, slots=[verbs.FillSlot(hash=HEX[0], slot=7)]
    ),
    "fill_reply": verbs.FillReply(
        slots=[FILLED, slot_entries.FilledSlot(hash=HEX[1], slot=8, ok=False, reason="checksum")]
    ),
    "fill_reply_parts": verbs.FillReply(slots=[replace(FILLED, **PARTS, part_sums=SUMS)]),
    "match_request": MATCH_ALL,
    "match_reply": index_verbs.MatchReply(
        asked=3, matches=[index_verbs.HolderMatch(**HOLDER, blocks=2)]
    ),
    "match_batch_request": scores.MatchBatchRequest(
        questions=[MATCH_ALL, index_verbs.MatchRequest(hashes=HEX[:1])]
    ),
    "match_batch_reply": scores.MatchBatchReply(
        replies=[
            index_verbs.MatchReply(asked=3, matches=[MATCH]),
            index_verbs.MatchReply(asked=1, matches=[]),
        ]
    ),
    "score_request": scores.ScoreRequest(hashes=HEX, weights={"device": 1.0, "disk": 0.25}),
    "score_reply": scores.ScoreReply(
        asked=3,
        scores=[scores.PlaceScore(host="gpu-a", source="vllm-0", rank=1, blocks=3, score=2.25)],
    ),
    "route_request": routes.RouteRequest(
        hashes=HEX,
        engines=[routes.EngineLoad(source="vllm-0", host="gpu-a", running=2, waiting_blocks=4.5)],
    ),
    "route_reply": routes.RouteReply(
        asked=3,
        engines=[
            routes.RankedEngine(
                host="gpu-a",
                source="vllm-0",
                cost=5.7,
                compute=0,
                load=0.2,
                queue=5.5,
                found={"device": 2, "host": 1},
            )
        ],
        left_out=[routes.LeftOut(host="gpu-a", source="vllm-1", reason="behind")],
    ),
    "where_request": scores.WhereRequest(hashes=HEX[:1]),
    "where_reply": scores.WhereReply(
        blocks=[scores.BlockHolders(hash=HEX[0], holders=[scores.BlockHolder(**HOLDER)])]
    ),
    "dump_request": index_verbs.DumpRequest(source="disk-tier-0"),
    "dump_reply": index_verbs.DumpReply(
        holders=[index_verbs.HolderDump(**HOLDER, epoch=EPOCH, seq=9, hashes=HEX[:2])]
    ),
    "holders_reply": scores.HoldersReply(
        holders=[scores.HolderSummary(**HOLDER, epoch=EPOCH, seq=9, blocks=2)]
    ),
    "snapshot_request": verbs.SnapshotRequest(source="host-tier-0"),
    "snapshot_reply": verbs.SnapshotReply(
        **_source(seq=3), parts=[verbs.SnapshotPart(namespace=DIGEST.hex(), runs=[RUN])]
    ),
    "stats_request": verbs.StatsRequest(),
    "stats_reply": verbs.StatsReply(
        kind="host-tier",
        host="gpu-a",
        instance="0",
        epoch=EPOCH,
        ready=True,
        seq=3,
        tier="host",
        slots={"reset": 500, "staged": 2, "inactive": 9, "active": 1, "total": 512},
        slot_bytes=2_097_152,
        leases=1,
        figures={"host_cache_hit_rate": 0.75, "lookups_windowed": 400.0},
        workers=[WORKER],
    ),
    "error_reply": verbs.ErrorReply(
        error=verbs.ErrorBody(code="bad_identity", message="16 tokens per block", field="tokens")
    ),
}

SIZED: dict[str, msgspec.Struct] = {
    "hits_sized": verbs.Hits(namespace=DIGEST.hex(), hashes=HEX, block_bytes=2_097_152),
    "arena_request_any_size": verbs.ArenaRequest(any_size=True),
    "door_request_any_size": verbs.DoorRequest(any_size=True),
    "arena_reply_sizes": verbs.ArenaReply(
        path="/dev/shm/kvbm-gpu-a-1760000000000017-arena",
        bytes=1_073_741_824,
        slot_bytes=4_096,
        slot_count=262_144,
        epoch=EPOCH,
        instance="0",
        sizes=[2_097_152, 65_536],
    ),
    "fill_request_sized": verbs.FillRequest(
        epoch=EPOCH,
        until_ms=86_400_000,
        slots=[verbs.FillSlot(hash=HEX[0], slot=512)],
        slot_bytes=2_097_152,
    ),
    "snapshot_reply_sized": verbs.SnapshotReply(
        **_source(seq=3),
        parts=[verbs.SnapshotPart(namespace=DIGEST.hex(), runs=[RUN], block_bytes=2_097_152)],
    ),
    "stats_reply_tenants": verbs.StatsReply(
        kind="disk-tier",
        host="gpu-a",
        instance="0",
        epoch=EPOCH,
        ready=True,
        tier="disk",
        slots={"reset": 0, "inactive": 62, "total": 62},
        slot_bytes=2_097_152,
        capacity_bytes=130_023_424,
        tenants=[
            TenantStats(name="", blocks=12, bytes=25_165_824, share_bytes=32_505_856),
            TenantStats(
                name="gold", blocks=50, bytes=104_857_600, share_bytes=97_517_568, waiting=7
            ),
        ],
    ),
    "stats_reply_sizes": verbs.StatsReply(
        kind="host-tier",
        host="gpu-a",
        instance="0",
        epoch=EPOCH,
        ready=True,
        tier="host",
        slots={"reset": 900, "inactive": 124, "total": 1_024},
        slot_bytes=2_097_152,
        block_bytes=130_023_424,
        capacity_bytes=1_073_741_824,
        slab_bytes=33_554_432,
        slabs={"free": 28, "cut": 4, "leaving": 0},
        sizes=[SizeStats(slot_bytes=2_097_152, slabs=4, slots=64, used=62)],
    ),
}
"""Messages of tiers that hold blocks of several sizes."""

ADMIN: dict[str, msgspec.Struct] = {
    "block_request": admin.BlockRequest(hash=HEX[0]),
    "block_reply": admin.BlockReply(
        held=True, slot=3, bytes=65_536, checksum=2**63, parent=PARENT.hex(),
        namespace=DIGEST.hex(), pins=1,
        leases=[admin.BlockLease(id=7, owner="ada over HTTP", reason="pin", left_ms=60_000)],
        story=[admin.BlockEntry(ago_ms=1_500, what="committed")],
    ),
    "block_reply_parts": admin.BlockReply(
        held=True, slot=3, bytes=65_536, checksum=0x11, part_count=2, part_checksums=[2**64 - 1, 0]
    ),
    "remove_request": admin.RemoveRequest(hashes=HEX, actor="ada"),
    "remove_reply": admin.RemoveReply(removed=2, kept=1, missing=HEX[2:], more=True),
    "pin_request": admin.PinRequest(hashes=HEX[:1], ttl_ms=60_000, actor="ada"),
    "pin_reply": admin.PinReply(pin=7, pinned=1),
    "unpin_request": admin.UnpinRequest(pin=7, actor="ada"),
    "unpin_reply": admin.UnpinReply(ended=True),
    "pins_request": admin.PinsRequest(),
    "pins_reply": admin.PinsReply(
        pins=[admin.PinEntry(pin=7, owner="ada", blocks=1, left_ms=60_000)]
    ),
    "drain_request": admin.DrainRequest(actor="ada"),
    "drain_reply": admin.DrainReply(draining=True, was=False),
    "prefetch_request": admin.PrefetchRequest(hashes=HEX, deadline_ms=4_000, actor="ada"),
    "prefetch_reply": admin.PrefetchReply(blocks=2, filled=1, reason="not_there"),
    "resize_request": admin.ResizeRequest(slots=512, actor="ada"),
    "resize_reply": admin.ResizeReply(slots=600, was=1_024, capacity=1_024, evicted=88, more=True),
    "policy_request": admin.PolicyRequest(policy="lfu", actor="ada"),
    "policy_reply": admin.PolicyReply(policy="lfu", was="lru"),
    "filter_request": admin.FilterRequest(enabled=True, pass_count=4, decay_ms=60_000),
    "filter_reply": admin.FilterReply(enabled=True, pass_count=4, decay_ms=60_000, entries=9),
    "forget_request": admin.ForgetRequest(lost_host="gpu-a", actor="ada"),
    "forget_reply": admin.ForgetReply(forgotten=3),
    "log_level_request": admin.LogLevelRequest(level="debug", actor="ada"),
    "log_level_reply": admin.LogLevelReply(was="info"),
    "audited": admin.Audited(
        ts_ms=1_760_000_000_123, kind="host-tier", host="gpu-a", instance="0", verb="pin",
        actor="ada", request="{}", outcome="ok", reply="{}",
    ),
}  # fmt: skip

TO_HOST_TIER: Mapping[str, local.ToHostTier] = {
    "hello": local.Hello(
        **_engine(role="worker", namespace=NAMESPACE, pid=4_242),
        agent=b"nixl-metadata",
        regions=[local.Region(address=2**46, stride=65_536, piece_bytes=65_536, blocks=1_024)],
    ),
    "hello_verify": local.Hello(
        **_engine(role="worker", namespace=NAMESPACE, pid=4_242),
        agent=b"nixl-metadata",
        regions=[local.Region(address=2**46, stride=65_536, piece_bytes=65_536, blocks=1_024)],
        verify="sampled",
    ),
    "hello_share": local.Hello(
        **_engine(role="worker", namespace=NAMESPACE, pid=4_242),
        rank=3,
        world_size=4,
        agent=b"nixl-metadata",
        regions=[local.Region(address=2**46, stride=65_536, piece_bytes=65_536, blocks=1_024)],
        share=Share(GRID, 1, 2, 0, 1, replica=1),
    ),
    "hello_groups": local.Hello(
        **_engine(role="scheduler", namespace=NAMESPACE),
        group_namespaces=[msgspec.structs.replace(NAMESPACE, group=1)],
    ),
    "beat": local.Beat(**_engine()),
    "bye": local.Bye(**_engine()),
    "lookup": local.Lookup(
        **_engine(lookup=5, namespace=DIGEST, hashes=PACKED), lease_ms=10_000, deadline_ms=2_000
    ),
    "lookup_prefill": local.Lookup(
        **_engine(lookup=5, namespace=DIGEST, hashes=PACKED),
        lease_ms=10_000,
        deadline_ms=2_000,
        prefill=PrefillCost(250_000, 1_500, 48, 300, 120, 8_000, 2_048),
    ),
    "lookup_only_asks": local.Lookup(
        **_engine(lookup=5, namespace=DIGEST, hashes=PACKED),
        lease_ms=10_000,
        deadline_ms=2_000,
        only_asks=True,
    ),
    "lookup_groups": local.Lookup(
        **_engine(lookup=5, namespace=DIGEST, hashes=PACKED + PACKED[::-1]),
        lease_ms=10_000,
        deadline_ms=2_000,
        groups=[GroupRun(16, len(PACKED) // 16), GroupRun(16, len(PACKED) // 16, 1)],
    ),
    "lookup_chunks": local.Lookup(
        **_engine(lookup=5, namespace=DIGEST, hashes=PACKED + PACKED[::-1]),
        lease_ms=10_000,
        deadline_ms=2_000,
        groups=[GroupRun(16, 4, offset=64), GroupRun(32, 2, 0, 8_192, 64)],
    ),
    "outcome": local.Outcome(**_engine(request="cmpl-7", lookup=5, reason="corrupt", blocks=2)),
    "misses": local.Misses(
        **_engine(namespace=DIGEST, in_vain=1),
        lookups=[
            local.MissedLookup(lookup=6, hashes=PACKED, request="cmpl-8", avoided=1),
            local.MissedLookup(lookup=7, hashes=PACKED, groups=[GroupRun(16, len(PACKED) // 16)]),
        ],
    ),
    "session_hint": SessionHint(
        **_engine(namespace=DIGEST, session="agent-42", action="pin", ttl_ms=300_000),
        hashes=PACKED,
    ),
    "release": local.Release(**_engine(lease=12, corrupt=[1])),
    "confirm": local.Confirm(**_engine(offer=3, held=True)),
}
FROM_HOST_TIER: Mapping[str, local.FromHostTier] = {
    "welcome": local.Welcome(
        host="gpu-a",
        instance="0",
        epoch=EPOCH,
        agent=b"nixl-metadata",
        arena_address=2**46,
        arena_path="/dev/shm/kvbm-gpu-a-1760000000000017-arena",
        slot_bytes=2_097_152,
        slot_count=512,
        beat_ms=1_000,
    ),
    "welcome_filter": local.Welcome(
        host="gpu-a",
        instance="0",
        epoch=EPOCH,
        agent=b"nixl-metadata",
        arena_address=2**46,
        arena_path="/dev/shm/kvbm-gpu-a-1760000000000017-arena",
        slot_bytes=2_097_152,
        slot_count=512,
        beat_ms=1_000,
        explains=True,
        filter=1,
    ),
    "welcome_hints": local.Welcome(
        host="gpu-a",
        instance="0",
        epoch=EPOCH,
        agent=b"nixl-metadata",
        arena_address=2**46,
        arena_path="/dev/shm/kvbm-gpu-a-1760000000000017-arena",
        slot_bytes=2_097_152,
        slot_count=512,
        beat_ms=1_000,
        hints=True,
    ),
    "alive": local.Alive(epoch=EPOCH),
    "moved": local.Moved(
        endpoint="ipc:///run/kvbm/host-tier-1.sock", version=EPOCH, within_ms=5_000
    ),
    "refused": local.Refused(
        about="hello", code="bad_namespace", message="block_tokens is 32 here", field="namespace"
    ),
    "found": local.Found(
        lookup=5,
        epoch=EPOCH,
        lease=12,
        slots=[7, 8],
        checksums=[2**64 - 1, 1],
        block_bytes=2_097_152,
        disk_blocks=[1],
        reason="not stored",
        object_blocks=[0],
    ),
    "found_parts": local.Found(
        lookup=5,
        epoch=EPOCH,
        lease=12,
        slots=[7, 8],
        checksums=[2**64 - 1, 1],
        block_bytes=2_097_152,
        part_sums=pack_sums([2, 3, 4, 2**64 - 1]),
    ),
    "found_usable": local.Found(
        lookup=5, epoch=EPOCH, lease=0, slots=[], checksums=[], block_bytes=0, usable=2
    ),
    "found_groups": local.Found(
        lookup=5,
        epoch=EPOCH,
        lease=12,
        slots=[7, 8],
        checksums=[2**64 - 1, 1],
        block_bytes=2_097_152,
        boundary=16,
        shared=32,
        reason="not_stored",
    ),
    "pulled": local.Pulled(offer=3, pulled=2, skipped=1),
}
TO_CONSOLIDATOR: Mapping[str, consolidator.ToConsolidator] = {
    "attach": consolidator.Attach(
        **_engine(endpoint="ipc:///run/kvbm/sim-0.sock", namespace=NAMESPACE),
        replay_endpoint="ipc:///run/kvbm/sim-0-replay.sock",
        generation="0123456789abcdef",
        adapters=[Adapter(id=1, name="sql", content="00112233445566778899aabbccddeeff")],
    ),
    "attach_groups": consolidator.Attach(
        **_engine(endpoint="ipc:///run/kvbm/sim-0.sock", namespace=NAMESPACE),
        group_namespaces=[msgspec.structs.replace(NAMESPACE, group=1, block_tokens=32)],
    ),
    "attach_passing": consolidator.Attach(
        **_engine(endpoint="", namespace=NAMESPACE),
        passes_through="prefix caching is off",
    ),
    "attach_sglang": consolidator.Attach(
        **_engine(endpoint="ipc:///run/kvbm/sim-0.sock", namespace=NAMESPACE),
        shows_extra_keys=True,
    ),
    "detach": consolidator.Detach(**_engine()),
    "offered": consolidator.Offered(
        **_engine(offer=3, namespace=DIGEST, deadline_ms=5_000),
        runs=[consolidator.OfferedRun(parent=PARENT, hashes=PACKED, blocks=[4, 9, 2])],
    ),
}
FROM_CONSOLIDATOR: Mapping[str, consolidator.FromConsolidator] = {
    "attached": consolidator.Attached(engine="sim-0", rank=0, epoch=EPOCH),
}


@dataclass(frozen=True, slots=True)
class Example:
    """A message, the codec of its channel, and where its golden bytes are."""

    name: str
    codec: JsonCodec[Any] | MsgpackCodec[Any]
    message: msgspec.Struct

    @property
    def path(self) -> Path:
        """The golden file: JSON as it is, msgpack as hex digits."""
        return GOLDEN / f"{self.name}.{'json' if self.is_json else 'msgpack.hex'}"

    @property
    def is_json(self) -> bool:
        """Whether the message travels on NATS."""
        return isinstance(self.codec, JsonCodec)

    def golden(self) -> bytes:
        """The bytes of the golden file."""
        text = self.path.read_text().strip()
        return text.encode() if self.is_json else bytes.fromhex(text)


def _examples() -> list[Example]:
    by_codec: list[tuple[JsonCodec[Any] | MsgpackCodec[Any], Mapping[str, msgspec.Struct]]] = [
        (events.event_codec, EVENTS),
        (packed_events.packed_codec, PACKED_EVENTS),
        (local.to_host_tier, TO_HOST_TIER),
        (local.from_host_tier, FROM_HOST_TIER),
        (consolidator.to_consolidator, TO_CONSOLIDATOR),
        (consolidator.from_consolidator, FROM_CONSOLIDATOR),
    ]
    found = [Example(name, codec, one) for codec, group in by_codec for name, one in group.items()]
    return found + [
        Example(name, JsonCodec(type(one)), one) for name, one in (VERBS | SIZED | ADMIN).items()
    ]


EXAMPLES = _examples()


def write_missing() -> list[Path]:
    """Write the golden files that do not exist yet, and say which."""
    missing = [example for example in EXAMPLES if not example.path.exists()]
    for example in missing:
        payload = example.codec.encode(example.message)
        text = payload.decode() if example.is_json else payload.hex()
        example.path.write_text(text + "\n")
    return [example.path for example in missing]


if __name__ == "__main__":
    for path in write_missing():
        print(path)
