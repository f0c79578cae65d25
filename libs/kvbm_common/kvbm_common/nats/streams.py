"""The streams of KVBM: what each keeps, and the mark by which a reader knows what was sent to it.

JetStream stores any message that reaches a subject of a stream, also one that it was made to send
itself: an answer of its API, or the last message of another stream. A role that may write to one
stream could so write to all. Therefore every publisher says which stream it means, in a header
that the server compares. What has no such mark was not published by a client, and a reader whose
bus is guarded takes it for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from kvbm_common.errors import ConfigError
from kvbm_common.wire.admin import AUDIT_SUBJECT_PREFIX
from kvbm_common.wire.events import CONSOLIDATED_PREFIX, SUBJECT_PREFIX

MARK = "Nats-Expected-Stream"
"""The header; nats-server refuses a message whose stream is another one."""
_VERSION = b"NATS/1.0"
_MARKED = f"\r\n{MARK}:".encode()
CONSUMERS_MAX = 4_096
"""Consumers of one stream, each 50 KB of the server's memory: a reader has one, a service a few."""
CONSUMER_IDLE_S = 300.0
"""A consumer without a listener ends after this time, also a durable one. A shorter time would
refuse the ordered consumers of NATS's own clients, which ask for so much."""
PARTITION_PREFIX = "kvbm.v1.partition"
"""After it: how many partitions there are, which one this is, host, source and kind."""
FNV_BASIS, FNV_PRIME = 2_166_136_261, 16_777_619
"""The numbers of FNV-1a in 32 bits, by which nats-server numbers partitions."""
REGISTRY_BUCKET = "kvbm-registry"
IMAGES_BUCKET = "KVBM_INDEX"


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSpec:
    """The limits and rules of a stream. When a limit is reached, the oldest messages go first as a
    rule."""

    name: str
    subjects: tuple[str, ...]
    bytes_max: int
    age_max_s: float
    duplicate_window_s: float = 120.0
    per_subject_max: int = -1
    """Messages kept per subject; 1 makes a stream of last values (a KV bucket)."""
    message_max: int = -1
    """Bytes of a message with its headers; -1: as many as the server takes. A stream with this
    bound has it set again, and `refuses`."""
    refuses: bool = False
    """True: messages that do not fit are refused, and others stay. Else the oldest go."""
    rolls_up: bool = False
    """A message may replace all before it on its subject, as in an object store."""
    permanent: bool = False
    """No message is deleted or purged, by any role: only age and size end one."""
    replicas: int = 1
    """The servers of a cluster that each keep the stream."""
    stored_as: str = ""
    """The subjects of what is stored, in place of the only one of `subjects`; empty: the same."""
    zones: tuple[str, ...] = ()
    """Zones whose streams of this name are its sources: see `zones.py`."""
    _mark: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_mark", f"\r\n{MARK}: {self.name}\r\n".encode())

    @property
    def first_mark(self) -> bytes:
        """Return the first bytes of headers whose first one is the mark."""
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

    def is_all(self, subject: str) -> bool:
        """Tell whether a subject is that of everything which is stored."""
        return subject in ((self.stored_as,) if self.stored_as else self.subjects)

    def as_config(self) -> dict[str, Any]:
        """Return the stream as the API takes it; durations in ns."""
        config: dict[str, Any] = {
            "name": self.name,
            "subjects": list(self.subjects),
            "retention": "limits",
            "discard": "new" if self.refuses or self.rolls_up else "old",
            "storage": "file",
            "num_replicas": self.replicas,
            "max_bytes": self.bytes_max,
            "max_age": int(self.age_max_s * 1e9),
            "max_msgs_per_subject": self.per_subject_max,
            "max_consumers": CONSUMERS_MAX,
            "consumer_limits": {"inactive_threshold": int(CONSUMER_IDLE_S * 1e9)},
            "duplicate_window": int(min(self.duplicate_window_s, self.age_max_s) * 1e9),
        }
        if self.stored_as:
            config["subject_transform"] = {"src": self.subjects[0], "dest": self.stored_as}
        if self.per_subject_max == 1:
            # A bucket as `nats kv` reads it. Without roll-ups: one would let the owner of a key
            # replace the keys of all.
            config |= {"deny_delete": True, "allow_direct": True}
        if self.rolls_up:
            # Refusing what does not fit leaves what is there whole, as `nats object` does.
            config |= {"allow_rollup_hdrs": True, "allow_direct": True}
        if self.message_max > 0:
            config["max_msg_size"] = self.message_max
        if self.permanent:
            config |= {"deny_delete": True, "deny_purge": True}
        if self.zones:
            config["sources"] = [source_of(self.name, zone) for zone in self.zones]
        return config


def source_of(stream: str, zone: str) -> dict[str, Any]:
    """Return a zone's stream of the same name as a source, as the server describes it."""
    return {"name": stream, "external": {"api": f"$JS.{zone}.API", "deliver": ""}}


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
"""The blocks of KVBM_EVENTS, de-duplicated over the tiers of a host; written by consolidators."""

AUDIT = StreamSpec(
    name="KVBM_AUDIT",
    subjects=(f"{AUDIT_SUBJECT_PREFIX}.>",),
    bytes_max=64 * 1024 * 1024,
    age_max_s=90 * 24 * 3600,
    message_max=10 * 1024,
    refuses=True,
    permanent=True,
)
"""A quarter of a year, or some hundred thousand changes. An entry has 4 KiB of request, and as much
of reply, escaped as JSON. A full stream takes no more, so that no flood erases anything. It has no
limit per subject: JetStream can be made to write to any, and would push out the entries there."""

REGISTRY = StreamSpec(
    name=f"KV_{REGISTRY_BUCKET}",
    subjects=(f"$KV.{REGISTRY_BUCKET}.>",),
    bytes_max=16 * 1024 * 1024,
    age_max_s=3600,
    per_subject_max=1,
    message_max=16 * 1024,
    refuses=True,
)
"""Entries are renewed all the time, so what is an hour old has no living owner. 16 MiB hold some
ten thousand services. An entry has 250 to 600 bytes; one of a host tier names the sockets of all on
its host, 150 bytes each, and 64 of them fit. A full bucket takes no new name, and still
renews those that it has."""


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


@dataclass(frozen=True, slots=True)
class Partitions:
    """The parts of a fleet: events of a host are all in one of so many streams.

    A partition has a stream, a bucket for images of its index, and replicas of the index. One
    partition has the names of a fleet that knows none. The number stands in every name, so a
    process with another number of partitions writes to other streams and mixes up nothing.
    """

    count: int = 1

    def of(self, host: str) -> int:
        """Return the partition of a host: that of nats-server's `partition(count, host)`."""
        digest = FNV_BASIS
        for byte in host.encode():
            digest = (digest ^ byte) * FNV_PRIME & 0xFFFF_FFFF
        return digest % self.count

    def events(self, number: int) -> StreamSpec:
        """Return the stream of a partition."""
        if self.count == 1:
            return EVENTS
        return replace(
            EVENTS,
            name=self.named(EVENTS.name, number),
            subjects=(f"{PARTITION_PREFIX}.{self.count}.{number}.>",),
            stored_as=EVENTS.subjects[0],
        )

    def events_of(self, host: str) -> StreamSpec:
        """Return the stream with the events of a host."""
        return self.events(self.of(host))

    def images(self, number: int) -> str:
        """Return the bucket with the images of a partition."""
        return IMAGES_BUCKET if self.count == 1 else self.named(IMAGES_BUCKET, number)

    def named(self, name: str, number: int) -> str:
        """Return the name for a partition of what one partition has under this name."""
        return f"{name}_{self.count}_{number}"

    @property
    def streams(self) -> tuple[StreamSpec, ...]:
        """Return every stream of such a fleet: the role `admin` makes them."""
        if self.count == 1:
            return STREAMS
        every = range(self.count)
        images = (object_bucket(self.images(one), bytes_max=IMAGES.bytes_max) for one in every)
        shared = (spec for spec in STREAMS if spec not in (EVENTS, IMAGES))
        return (*(self.events(one) for one in every), *shared, *images)


GB = 1_000_000_000
STORE_ROOM = 1.25
"""Disk space for what streams may hold: a deleted message stays until its file is rewritten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLimits:
    """The limits that an operator has set. With 0, a stream that is there stays as it is, and a
    new one has the limits of its `StreamSpec`."""

    replicas: int = 0
    partitions: int = 0
    """Streams of events that the fleet has; see `partitions.py`. 0: one."""
    events_gb: float = 0.0
    """Size of KVBM_EVENTS and of each partition's stream; KVBM_CONSOLIDATED has half of it."""
    events_age_s: float = 0.0
    duplicate_window_s: float = 0.0
    images_gb: float = 0.0
    zones: tuple[str, ...] = ()
    """The zones of the fleet that has these streams; none: a stream keeps its sources."""

    def fit(self, spec: StreamSpec) -> StreamSpec:
        """Return the specification with these limits."""
        own = self._of(spec)
        return replace(
            spec,
            replicas=self.replicas or spec.replicas,
            bytes_max=int(own.get("max_bytes", 0) * GB) or spec.bytes_max,
            age_max_s=own.get("max_age", 0) or spec.age_max_s,
            duplicate_window_s=own.get("duplicate_window", 0) or spec.duplicate_window_s,
            zones=self._zones_of(spec),
        )

    def with_more(self, said: StreamLimits) -> StreamLimits:
        """Return these limits with those that were said later over them."""
        return replace(self, **{name: value for name, value in asdict(said).items() if value})

    def set_for(self, spec: StreamSpec) -> tuple[str, ...]:
        """Return the fields of a stream's configuration that were said, as the API names them."""
        said = {name for name, value in self._of(spec).items() if value}
        if "max_age" in said:
            said.add("duplicate_window")  # It may not be longer than the age.
        said |= {"num_replicas"} if self.replicas else set()
        return tuple(sorted(said | ({"sources"} if self._zones_of(spec) else set())))

    def _zones_of(self, spec: StreamSpec) -> tuple[str, ...]:
        """Return the sources of a stream: an index's images are its own zone's."""
        return () if spec.rolls_up else self.zones

    def _of(self, spec: StreamSpec) -> dict[str, float]:
        """Return what was said of this stream alone, by the field of its configuration."""
        if spec.name == CONSOLIDATED.name or spec.name.startswith(EVENTS.name):
            share = 0.5 if spec.name == CONSOLIDATED.name else 1.0
            return {
                "max_bytes": share * self.events_gb,
                "max_age": self.events_age_s,
                "duplicate_window": self.duplicate_window_s,
            }
        return {"max_bytes": self.images_gb} if spec.name.startswith(IMAGES.name) else {}

    @property
    def store_bytes(self) -> int:
        """Return the room that all streams need on each server that keeps them."""
        return self.store_bytes_of(self.partitioned.streams)

    def store_bytes_of(self, streams: Iterable[StreamSpec]) -> int:
        """Return the room that these streams need on each server that keeps them."""
        return int(sum(self.fit(spec).bytes_max for spec in streams) * STORE_ROOM)

    @property
    def partitioned(self) -> Partitions:
        """Return the partitions of the events."""
        return Partitions(self.partitions or 1)

    def events_of(self, host: str) -> StreamSpec:
        """Return the stream of a host's events; raises ConfigError where `*` means several."""
        if host == "*" and self.partitioned.count > 1:
            accepted = f"one host: the events of all are in {self.partitions} streams"
            raise ConfigError("host", host, accepted)
        return self.partitioned.events_of(host)


AS_THEY_COME = StreamLimits()
