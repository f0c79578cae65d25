"""The roles on the bus: the one table of who may ask, publish, hear and read what.

From an entry follow:

    the permissions of nats-server        grants.py, kvbm_cli.creds.nats_config
    `x-roles` in docs/asyncapi.yaml       release.asyncapi
    the test that tries every channel     tests/security/test_every_channel.py

A credential of a host's role is good for the subjects of that host. In the patterns `{host}` is
that host, `{instance}` each instance that the credential is for, and `*` any one word.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvbm_common.nats.streams import (
    AUDIT,
    CONSOLIDATED,
    EVENTS,
    IMAGES,
    IMAGES_BUCKET,
    REGISTRY,
    REGISTRY_BUCKET,
    StreamSpec,
)
from kvbm_common.wire.events import CONSOLIDATED_PREFIX, SUBJECT_PREFIX
from kvbm_common.wire.operator_verbs import LOWER_TIERS, OPERATOR_VERBS, SERVICES, TIERS
from kvbm_common.wire.verbs import hits_subject, offers_subject, verb_subject

HOST = "{host}"
INSTANCE = "{instance}"
ADMIN = "admin"
CONSUMER = "consumer"

INDEX_QUESTIONS = ("match", "match_batch", "score", "route", "where", "dump", "holders")
"""The verbs that any replica of the index answers."""
SNAPSHOT_OWNERS = (*TIERS, "consolidator")
ENTRIES = f"$KV.{REGISTRY_BUCKET}.services.>"
ENGINE = "engine"


@dataclass(frozen=True, slots=True)
class Reading:
    """A stream that a role reads by consumers of its own, and the part of it."""

    stream: StreamSpec
    part: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """One line of the table."""

    name: str
    help: str
    per_host: bool = False
    """A credential is for one host."""
    is_service: bool = True
    """True: the role serves the verbs of its kind, is in the registry, and writes the audit."""
    asks: tuple[str, ...] = ()
    publishes: tuple[str, ...] = ()
    never_publishes: tuple[str, ...] = ()
    """Exceptions from `publishes`."""
    hears: tuple[str, ...] = ()
    """Subjects besides its verbs and the answers to its questions."""
    reads: tuple[Reading, ...] = ()
    registers: tuple[str, ...] = ()
    """Kinds of registry entries that it writes."""
    calls: tuple[str, ...] = ()
    """Calls of the JetStream API besides those that reading takes."""
    may_do_everything: bool = False

    @property
    def place(self) -> str:
        """The host in its subjects: its own one, or any."""
        return HOST if self.per_host else "*"


def _verb(kind: str, verb: str, host: str = "*") -> str:
    return verb_subject(kind, verb, host=host, instance="*")


def _events(source: str, host: str = HOST) -> str:
    return f"{SUBJECT_PREFIX}.{host}.{source}.*"


def source_of(kind: str) -> str:
    """Return the pattern of the names under which instances of a tier publish events."""
    return f"{kind}-{INSTANCE}"


OF_THIS_HOST = Reading(EVENTS, _events("*"))
OF_ALL_HOSTS = Reading(EVENTS, EVENTS.subjects[0])
THE_REGISTRY = Reading(REGISTRY, ENTRIES)

INDEX_ASKS = tuple(verb_subject("index", verb) for verb in INDEX_QUESTIONS)
INDEX_BY_NAME = tuple(_verb("index", verb) for verb in INDEX_QUESTIONS)
"""Questions to a replica by its name: the one that NATS has chosen may not answer."""
SNAPSHOTS = tuple(_verb(kind, "snapshot") for kind in SNAPSHOT_OWNERS)
OPERATORS_ASK = tuple(
    dict.fromkeys(
        _verb(kind, verb)
        for verb, kinds in (
            *((one.name, one.answered_by) for one in OPERATOR_VERBS),
            ("stats", SERVICES),
            ("metrics", SERVICES),
            ("explain", ("host-tier",)),
            ("explain_list", ("host-tier",)),
        )
        for kind in kinds
    )
)


def _lower_tier(kind: str, help: str) -> Role:
    return Role(
        name=kind,
        help=help,
        per_host=True,
        asks=tuple(
            _verb("host-tier", verb, HOST) for verb in ("arena", "lease", "release", "snapshot")
        ),
        publishes=(_events(source_of(kind)),),
        hears=(hits_subject(HOST),),
        reads=(OF_THIS_HOST, THE_REGISTRY),
        registers=(kind,),
    )


ROLES = (
    Role(
        name="consolidator",
        help="Publishes the engines' events and offers of its host.",
        per_host=True,
        asks=tuple(_verb(tier, "snapshot", HOST) for tier in TIERS),
        publishes=(offers_subject(HOST), _events("*"), f"{CONSOLIDATED_PREFIX}.{HOST}.*.*"),
        never_publishes=tuple(_events(source_of(tier)) for tier in TIERS),
        reads=(OF_THIS_HOST, THE_REGISTRY),
        registers=("consolidator", ENGINE),
        calls=(f"STREAM.INFO.{CONSOLIDATED.name}",),
    ),
    Role(
        name="index",
        help="Follows all events, and answers who has what.",
        asks=SNAPSHOTS,
        publishes=(f"$O.{IMAGES_BUCKET}.>",),
        hears=(verb_subject("index", "*"),),
        reads=(OF_ALL_HOSTS, THE_REGISTRY, Reading(IMAGES, f"$O.{IMAGES_BUCKET}.C.*")),
        registers=("index",),
        calls=(f"STREAM.MSG.GET.{IMAGES.name}", f"STREAM.PURGE.{IMAGES.name}"),
    ),
    Role(
        name="host-tier",
        help="Holds blocks in memory: asks for fills, and reads from other hosts.",
        per_host=True,
        asks=(
            *(_verb(tier, verb, HOST) for tier in LOWER_TIERS
              for verb in ("fill", "fates", "snapshot")),
            *(_verb("host-tier", verb) for verb in ("door", "lease", "release")),
            verb_subject("index", "match"),
            _verb("index", "match"),
        ),
        publishes=(_events(source_of("host-tier")), hits_subject(HOST)),
        hears=(offers_subject(HOST),),
        reads=(OF_THIS_HOST, THE_REGISTRY),
        registers=("host-tier",),
    ),
    _lower_tier("disk-tier", "Holds blocks on disk, for the host tiers of its host."),
    _lower_tier("object-tier", "Holds blocks in a bucket, for the host tiers of its host."),
    Role(
        name="metrics",
        help="Serves the HTTP API: asks every service, and carries out what operators want.",
        asks=tuple(dict.fromkeys((*INDEX_ASKS, *INDEX_BY_NAME, *OPERATORS_ASK))),
        reads=(OF_ALL_HOSTS, THE_REGISTRY, Reading(AUDIT, AUDIT.subjects[0])),
        registers=("metrics",),
    ),
    Role(
        name=CONSUMER,
        help="Reads events and asks the index: for routers and dashboards of third parties.",
        is_service=False,
        asks=(*INDEX_ASKS, *SNAPSHOTS),
        hears=(*EVENTS.subjects, *CONSOLIDATED.subjects),
        reads=(OF_ALL_HOSTS, Reading(CONSOLIDATED, CONSOLIDATED.subjects[0]), THE_REGISTRY),
        calls=(
            "INFO",
            "STREAM.NAMES",
            # It reads all of both streams, and client libraries do not all name the part in a call.
            *(
                f"CONSUMER.{call}"
                for spec in (EVENTS, CONSOLIDATED)
                for call in (
                    f"CREATE.{spec.name}", f"CREATE.{spec.name}.*",
                    f"MSG.NEXT.{spec.name}.*", f"DELETE.{spec.name}.*",
                )
            ),
        ),
    ),
    Role(
        name=ADMIN,
        help="Makes the streams, and may do everything else: for operators, and for `streams`.",
        is_service=False,
        may_do_everything=True,
    ),
)  # fmt: skip
"""Every role."""

BY_NAME = {role.name: role for role in ROLES}


def role_of(kind: str) -> Role:
    """Return the role of a kind of service; one of another package has what every service has."""
    return BY_NAME.get(kind) or Role(
        name=kind, help="", per_host=True, reads=(THE_REGISTRY,), registers=(kind,)
    )
