"""Grants: the permissions that a role has on a nats-server, as lists of subjects.

What a service needs besides its line in the table is here: its verbs, its inboxes, its entry in the
registry, its audit, and the calls of the JetStream API that reading a stream takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Literal

from kvbm_common.access.roles import HOST, INSTANCE, ROLES, Reading, Role, role_of
from kvbm_common.nats.streams import (
    AUDIT,
    EVENTS,
    IMAGES,
    IMAGES_BUCKET,
    PARTITION_PREFIX,
    REGISTRY,
    REGISTRY_BUCKET,
    Partitions,
)
from kvbm_common.wire.admin import audit_subject
from kvbm_common.wire.events import SUBJECT_PREFIX
from kvbm_common.wire.operator_verbs import SERVICES, TIERS
from kvbm_common.wire.partitions import INDEX_GROUP
from kvbm_common.wire.verbs import verb_subject

INBOX = "_INBOX"
"""The first token of a client's inboxes; a role hears those of its own name only."""
API = "$JS.API"
PARTITIONED = (EVENTS.name, IMAGES.name, IMAGES_BUCKET)
"""Names that have another form for each partition of the fleet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grants:
    """The subjects that one credential may publish and subscribe to."""

    publish: tuple[str, ...] = ()
    publish_never: tuple[str, ...] = ()
    subscribe: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    """Parts of streams, by consumers of its own."""
    everything: bool = False

    def may_publish(self, subject: str) -> bool:
        """Tell whether a message may be sent to this subject."""
        allowed = any(matches(one, subject) for one in self.publish)
        return self.everything or (
            allowed and not any(matches(one, subject) for one in self.publish_never)
        )

    def may_subscribe(self, subject: str) -> bool:
        """Tell whether this subject, or all of this pattern, may be heard."""
        return self.everything or any(matches(one, subject) for one in self.subscribe)

    def may_receive(self, subject: str) -> bool:
        """Tell whether this subject may be heard, or read from a stream."""
        return self.may_subscribe(subject) or any(matches(one, subject) for one in self.reads)


def matches(pattern: str, subject: str) -> bool:
    """Tell whether a pattern covers a subject, as nats-server decides it.

    >>> matches("a.*.c", "a.b.c"), matches("a.>", "a.b.c"), matches("a.*", "a.b.c")
    (True, True, False)
    >>> matches("a.*", "a.>"), matches("a.>", "a.*")
    (False, True)
    """
    wanted, given = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        begins = wanted[:-1]
        return len(given) > len(begins) and _alike(begins, given[: len(begins)])
    return len(wanted) == len(given) and given[-1] != ">" and _alike(wanted, given)


def _alike(wanted: Sequence[str], given: Sequence[str]) -> bool:
    pairs = zip(wanted, given, strict=True)
    return all(one in ("*", other) for one, other in pairs) and ">" not in given


def inbox_of(role: str, host: str) -> str:
    """Return what the inboxes of a role begin with; a host's role has the host in it.

    >>> inbox_of("host-tier", "a"), inbox_of("index", "a")
    ('_INBOX.host-tier.a', '_INBOX.index')
    """
    return f"{INBOX}.{role}.{host}" if role_of(role).per_host else f"{INBOX}.{role}"


def grants_of(
    role: Role,
    *,
    host: str = "*",
    instances: Sequence[str] = ("0",),
    partitions: Sequence[int] = (1,),
) -> Grants:
    """Return what a credential of this role may do, on this host and with these instances.

    A fleet has two numbers of partitions while it changes from one to the other.
    """
    if role.may_do_everything:
        return Grants(everything=True)
    place = host if role.per_host else "*"
    fill_in = _Filled(place, instances)
    publish = [*role.asks, *role.publishes, *_reading(role.reads)]
    publish += [f"{API}.{call}" for call in role.calls]
    subscribe = [f"{inbox_of(role.name, place)}.>", *role.hears]
    if role.is_service:
        publish += _service_publishes(role)
        subscribe += _service_hears(role)
    several = [count for count in partitions if count > 1]
    if role.name == "index" and several:
        groups = [verb_subject(INDEX_GROUP, "*", host=str(one), instance="*") for one in several]
        publish += groups
        subscribe += [*groups, f"$SRV.*.kvbm-{INDEX_GROUP}", f"$SRV.*.kvbm-{INDEX_GROUP}.*"]
    spread = partial(_spread, [Partitions(count) for count in several])
    return Grants(
        publish=tuple(dict.fromkeys(spread(fill_in.all(publish)))),
        publish_never=tuple(spread(fill_in.all(role.never_publishes))),
        subscribe=tuple(dict.fromkeys(spread(fill_in.all(subscribe)))),
        reads=tuple(fill_in.all(one.part for one in role.reads)),
    )


def _spread(fleets: Iterable[Partitions], patterns: Iterable[str]) -> Iterator[str]:
    """Yield patterns, and after each of one partition the same of each of several."""
    places = [(partitions, number) for partitions in fleets for number in range(partitions.count)]
    for pattern in patterns:
        yield pattern
        for partitions, number in places:
            rest = pattern.removeprefix(f"{SUBJECT_PREFIX}.")
            if rest != pattern:
                yield f"{PARTITION_PREFIX}.{partitions.count}.{number}.{rest}"
                continue
            words = [
                partitions.named(word, number) if word in PARTITIONED else word
                for word in pattern.split(".")
            ]
            if (placed := ".".join(words)) != pattern:
                yield placed


@dataclass(frozen=True, slots=True)
class _Filled:
    """Patterns with a host and instances in their places."""

    host: str
    instances: Sequence[str]

    def all(self, patterns: Iterable[str]) -> Iterable[str]:
        """Yield each pattern, once for every instance where it names one."""
        for pattern in patterns:
            placed = pattern.replace(HOST, self.host)
            if INSTANCE not in placed:
                yield placed
                continue
            for instance in self.instances:
                yield placed.replace(INSTANCE, instance)


def _service_publishes(role: Role) -> list[str]:
    """Return what every service sends: its registry entry, its audit, a question for its health."""
    keys = [
        f"$KV.{REGISTRY_BUCKET}.{part}.{kind}.{role.place}.*"
        for part in ("services", "lives")
        for kind in role.registers
    ]
    own = [
        f"{API}.DIRECT.GET.{REGISTRY.name}.$KV.{REGISTRY_BUCKET}.services.{kind}.{role.place}.*"
        for kind in role.registers
    ]
    return [
        *keys,
        *own,
        f"{API}.STREAM.INFO.{AUDIT.name}",
        audit_subject(role.name, role.place, "*"),
        verb_subject(role.name, "stats", host=role.place, instance="*"),
    ]


def _service_hears(role: Role) -> list[str]:
    """Return what every service hears: its verbs, and the questions of NATS's micro services."""
    return [
        verb_subject(role.name, "*", host=role.place, instance="*"),
        "$SRV.*",
        f"$SRV.*.kvbm-{role.name}",
        f"$SRV.*.kvbm-{role.name}.*",
    ]


def _reading(reads: Iterable[Reading]) -> Iterable[str]:
    """Yield the calls that reading takes; the part of the stream is in the call itself."""
    for one in reads:
        name = one.stream.name
        yield f"{API}.STREAM.INFO.{name}"
        yield f"{API}.CONSUMER.CREATE.{name}.*.{one.part}"
        yield f"{API}.CONSUMER.INFO.{name}.*"
        # The answer to the server's flow control; with a domain and an account in newer servers.
        yield f"$JS.FC.{name}.>"
        yield f"$JS.FC.*.*.{name}.>"


# --- who may use a channel ------------------------------------------------------------------------

HERE, ELSEWHERE = "here", "elsewhere"
EXAMPLES = {
    "instance": ("0",),
    "kind": ("stored",),
    "service": SERVICES,
    "source": (*(f"{tier}-0" for tier in TIERS), "engine"),
}
"""Parameter of a channel's address, but for the host → what stands for it."""


def concrete(address: str, host: str) -> Iterator[str]:
    """Yield the subjects of a channel on a host, with examples in the places of parameters.

    >>> list(concrete("kvbm.v1.{service}.{host}.{instance}.stats", "a"))[0]
    'kvbm.v1.index.a.0.stats'
    """
    names = [name for name in EXAMPLES if f"{{{name}}}" in address]
    for values in product(*(EXAMPLES[name] for name in names)):
        yield address.format(host=host, **dict(zip(names, values, strict=True)))


def users_of(address: str, action: Literal["send", "receive"]) -> list[str]:
    """Return the roles that may use a channel; `@host`: on their own host only.

    >>> users_of("kvbm.v1.disk-tier.{host}.{instance}.fill", "send")
    ['host-tier@host', 'admin']
    """
    found = []
    for role in ROLES:
        grants = grants_of(role, host=HERE)
        may = grants.may_publish if action == "send" else grants.may_receive
        here, elsewhere = (
            any(may(subject) for subject in concrete(address, host)) for host in (HERE, ELSEWHERE)
        )
        if here:
            found.append(role.name if elsewhere else f"{role.name}@host")
    return found
