"""The streams of KVBM: what each keeps, and the mark by which a reader knows what was sent to it.

JetStream stores any message that reaches a subject of a stream, also one that it was made to send
itself: an answer of its API, or the last message of another stream. A role that may write to one
stream could so write to all. Therefore every publisher says which stream it means, in a header
that the server compares. What has no such mark was not published by a client, and a reader whose
bus is guarded takes it for nothing.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from kvbm_common.wire.admin import AUDIT_SUBJECT_PREFIX
from kvbm_common.wire.events import CONSOLIDATED_PREFIX, SUBJECT_PREFIX

MARK = "Nats-Expected-Stream"
"""The header; nats-server refuses a message whose stream is another one."""
_VERSION = b"NATS/1.0"
_MARKED = f"\r\n{MARK}:".encode()
CONSUMERS_MAX = 4_096
"""Of one stream, at 50 KB of the server's memory each: a reader has one, and a service a few."""
CONSUMER_IDLE_S = 300.0
"""A consumer without a listener ends after this time, also a durable one. A shorter time would
refuse the ordered consumers of NATS's own clients, which ask for so much."""
REGISTRY_BUCKET = "kvbm-registry"
IMAGES_BUCKET = "KVBM_INDEX"


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSpec:
    """What a stream keeps. The oldest messages go first when a limit is reached."""

    name: str
    subjects: tuple[str, ...]
    bytes_max: int
    age_max_s: float
    duplicate_window_s: float = 120.0
    per_subject_max: int = -1
    """Messages kept per subject; 1 makes a stream of last values (a KV bucket)."""
    rolls_up: bool = False
    """A message may replace all before it on its subject, as in an object store."""
    permanent: bool = False
    """No message is deleted or purged, by any role: only age and size end one."""
    replicas: int = 1
    """The servers of a cluster that each keep the stream."""
    _mark: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_mark", f"\r\n{MARK}: {self.name}\r\n".encode())

    @property
    def first_mark(self) -> bytes:
        """How the headers of a message begin whose first one is the mark."""
        return _VERSION + self._mark

    @property
    def marked(self) -> dict[str, str]:
        """The headers of a message that is meant for this stream."""
        return {MARK: self.name}

    def is_marked(self, block: bytes) -> bool:
        """Tell by its headers whether a client has published a message to this stream.

        The first such header counts: an empty one, which the server lets pass, before one with the
        right name would otherwise do.
        """
        at = block.find(_MARKED)
        return at >= 0 and block.startswith(self._mark, at)

    def as_config(self) -> dict[str, Any]:
        """Return the stream as the API takes it; durations in ns."""
        config: dict[str, Any] = {
            "name": self.name,
            "subjects": list(self.subjects),
            "retention": "limits",
            "discard": "old",
            "storage": "file",
            "num_replicas": self.replicas,
            "max_bytes": self.bytes_max,
            "max_age": int(self.age_max_s * 1e9),
            "max_msgs_per_subject": self.per_subject_max,
            "max_consumers": CONSUMERS_MAX,
            "consumer_limits": {"inactive_threshold": int(CONSUMER_IDLE_S * 1e9)},
            "duplicate_window": int(min(self.duplicate_window_s, self.age_max_s) * 1e9),
        }
        if self.per_subject_max == 1:
            # A bucket as `nats kv` reads it. Without roll-ups: one would let the owner of a key
            # replace the keys of all.
            config |= {"deny_delete": True, "allow_direct": True}
        if self.rolls_up:
            # Refusing what does not fit leaves what is there whole, as `nats object` does.
            config |= {"allow_rollup_hdrs": True, "allow_direct": True, "discard": "new"}
        if self.permanent:
            config |= {"deny_delete": True, "deny_purge": True}
        return config


EVENTS = StreamSpec(
    name="KVBM_EVENTS",
    subjects=(f"{SUBJECT_PREFIX}.>",),
    bytes_max=256 * 1024 * 1024,
    age_max_s=6 * 3600,
)
"""The events of all sources. 256 MiB hold about 7 million blocks at 37 bytes of JSON each; who
comes later than that, or than 6 hours, asks the sources for snapshots."""

CONSOLIDATED = StreamSpec(
    name="KVBM_CONSOLIDATED",
    subjects=(f"{CONSOLIDATED_PREFIX}.>",),
    bytes_max=128 * 1024 * 1024,
    age_max_s=6 * 3600,
)
"""The same blocks once more, de-duplicated over the tiers of a host; written by consolidators."""

AUDIT = StreamSpec(
    name="KVBM_AUDIT",
    subjects=(f"{AUDIT_SUBJECT_PREFIX}.>",),
    bytes_max=64 * 1024 * 1024,
    age_max_s=90 * 24 * 3600,
    permanent=True,
)
"""A quarter of a year, or some ten thousand changes."""

REGISTRY = StreamSpec(
    name=f"KV_{REGISTRY_BUCKET}",
    subjects=(f"$KV.{REGISTRY_BUCKET}.>",),
    bytes_max=16 * 1024 * 1024,
    age_max_s=3600,
    per_subject_max=1,
)
"""Entries are renewed all the time, so what is an hour old has no living owner. 16 MiB hold some
ten thousand services."""


def object_bucket(bucket: str, *, bytes_max: int) -> StreamSpec:
    """Return the stream of an object store, as `nats object` knows it."""
    return StreamSpec(
        name=f"OBJ_{bucket}",
        subjects=(f"$O.{bucket}.C.>", f"$O.{bucket}.M.>"),
        bytes_max=bytes_max,
        age_max_s=0,
        duplicate_window_s=0,
        rolls_up=True,
    )


IMAGES = object_bucket(IMAGES_BUCKET, bytes_max=1 << 30)
"""Two images of an index of 20 million blocks: the one that is there and the one that replaces
it."""

STREAMS = (EVENTS, CONSOLIDATED, AUDIT, REGISTRY, IMAGES)
"""Every stream that KVBM uses: the role `admin` makes them."""
GB = 1_000_000_000
STORE_ROOM = 1.25
"""Of what streams may take: what is replaced stays until the file that it is in is rewritten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLimits:
    """What an operator has said of the streams; 0: nothing, so a stream that is there stays as it
    is, and a new one has the limits of its `StreamSpec`."""

    replicas: int = 0
    events_gb: float = 0.0
    """Of KVBM_EVENTS; KVBM_CONSOLIDATED has the half."""
    events_age_s: float = 0.0
    duplicate_window_s: float = 0.0
    images_gb: float = 0.0

    def fit(self, spec: StreamSpec) -> StreamSpec:
        """Return the specification with these limits."""
        own = self._of(spec)
        return replace(
            spec,
            replicas=self.replicas or spec.replicas,
            bytes_max=int(own.get("max_bytes", 0) * GB) or spec.bytes_max,
            age_max_s=own.get("max_age", 0) or spec.age_max_s,
            duplicate_window_s=own.get("duplicate_window", 0) or spec.duplicate_window_s,
        )

    def with_more(self, said: StreamLimits) -> StreamLimits:
        """Return these limits with those that were said later over them."""
        return replace(self, **{name: value for name, value in asdict(said).items() if value})

    def set_for(self, spec: StreamSpec) -> tuple[str, ...]:
        """Return the fields of a stream's configuration that were said, as the API names them."""
        said = {name for name, value in self._of(spec).items() if value}
        if "max_age" in said:
            said.add("duplicate_window")  # It may not be longer than the age.
        return tuple(sorted(said | ({"num_replicas"} if self.replicas else set())))

    def _of(self, spec: StreamSpec) -> dict[str, float]:
        """Return what was said of this stream alone, by the field of its configuration."""
        if spec.name in (EVENTS.name, CONSOLIDATED.name):
            share = 1.0 if spec.name == EVENTS.name else 0.5
            return {
                "max_bytes": share * self.events_gb,
                "max_age": self.events_age_s,
                "duplicate_window": self.duplicate_window_s,
            }
        return {"max_bytes": self.images_gb} if spec.name == IMAGES.name else {}

    @property
    def store_bytes(self) -> int:
        """Return the room that all streams need on each server that keeps them."""
        return int(sum(self.fit(spec).bytes_max for spec in STREAMS) * STORE_ROOM)


AS_THEY_COME = StreamLimits()
