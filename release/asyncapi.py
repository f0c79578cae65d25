"""The AsyncAPI description of the bus, generated from the message types so that it cannot drift.

`python -m release.asyncapi > docs/asyncapi.yaml` renews it; a test compares the two. Only
the tables below are written by hand: which message goes where. The verbs of operators have their
own (`OPERATOR_VERBS`).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from kvbm_common.access.grants import users_of
from kvbm_common.wire import (
    VERSION,
    admin,
    events,
    explain,
    index_verbs,
    packed_events,
    routes,
    scores,
    verbs,
)
from kvbm_common.wire.metrics import MetricsSnapshot
from kvbm_common.wire.operator_verbs import LOWER_TIERS, OPERATOR_VERBS, SERVICES, TIERS

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A message without an answer."""

    name: str
    subject: str
    types: Sequence[type[msgspec.Struct]]
    content_type: str = ""
    """Where it is not JSON."""


@dataclass(frozen=True, slots=True)
class Verb:
    """A request and its reply."""

    service: str
    """`{service}` stands for every kind."""
    verb: str
    request: type[msgspec.Struct]
    reply: type[msgspec.Struct]
    shared: bool = False
    """Whether it is also on the subject where any replica answers."""


def _operators_verbs() -> Iterable[Verb]:
    """Yield an entry per operator's verb and kind of service; `{service}` is any kind."""
    for answered_by in dict.fromkeys(one.answered_by for one in OPERATOR_VERBS):
        for service in ("{service}",) if answered_by == SERVICES else answered_by:
            for one in OPERATOR_VERBS:
                if one.answered_by == answered_by:
                    yield Verb(service=service, verb=one.name, request=one.request, reply=one.reply)


PUBLISHED = (
    Published(
        name="events",
        subject=f"{events.SUBJECT_PREFIX}.{{host}}.{{source}}.{{kind}}",
        types=(events.Stored, events.Removed, events.Cleared),
    ),
    Published(
        name="consolidated",
        subject=f"{events.CONSOLIDATED_PREFIX}.{{host}}.{{source}}.{{kind}}",
        types=(events.Stored, events.Removed, events.Cleared),
    ),
    *(
        Published(
            name=f"packed-{name}",
            subject=f"{prefix}.{{host}}.{{source}}.{packed_events.PACKED}",
            types=(packed_events.PackedEvents,),
            content_type="application/msgpack",
        )
        for name, prefix in (
            ("events", events.SUBJECT_PREFIX),
            ("consolidated", events.CONSOLIDATED_PREFIX),
        )
    ),
    Published(name="offers", subject=verbs.offers_subject("{host}"), types=(verbs.Offer,)),
    Published(
        name="audit",
        subject=admin.audit_subject("{service}", "{host}", "{instance}"),
        types=(admin.Audited,),
    ),
    Published(name="hits", subject=verbs.hits_subject("{host}"), types=(verbs.Hits,)),
)
VERBS = (
    Verb("index", "match", index_verbs.MatchRequest, index_verbs.MatchReply, shared=True),
    Verb("index", "dump", index_verbs.DumpRequest, index_verbs.DumpReply, shared=True),
    Verb("index", "holders", index_verbs.DumpRequest, scores.HoldersReply, shared=True),
    Verb("index", "match_batch", scores.MatchBatchRequest, scores.MatchBatchReply, shared=True),
    Verb("index", "score", scores.ScoreRequest, scores.ScoreReply, shared=True),
    Verb("index", "route", routes.RouteRequest, routes.RouteReply, shared=True),
    Verb("index", "where", scores.WhereRequest, scores.WhereReply, shared=True),
    Verb("host-tier", "arena", verbs.ArenaRequest, verbs.ArenaReply),
    Verb("host-tier", "door", verbs.DoorRequest, verbs.DoorReply),
    Verb("host-tier", "lease", verbs.LeaseRequest, verbs.LeaseReply),
    Verb("host-tier", "release", verbs.ReleaseRequest, verbs.ReleaseReply),
    *(Verb(tier, "fill", verbs.FillRequest, verbs.FillReply) for tier in LOWER_TIERS),
    *(
        Verb(source, "snapshot", verbs.SnapshotRequest, verbs.SnapshotReply)
        for source in (*TIERS, "consolidator")
    ),
    Verb("host-tier", "explain", explain.ExplainRequest, explain.ExplainReply),
    Verb("host-tier", "explain_list", explain.ExplainListRequest, explain.ExplainListReply),
    *(Verb(tier, "fates", explain.FatesRequest, explain.FatesReply) for tier in LOWER_TIERS),
    *_operators_verbs(),
    Verb("{service}", "stats", verbs.StatsRequest, verbs.StatsReply),
    Verb("{service}", "metrics", verbs.StatsRequest, MetricsSnapshot),
)
PARAMETERS: dict[str, Json] = {
    "host": {"description": "Name of a machine."},
    "source": {"description": "`host-tier-0`, `disk-tier-0`, `object-tier-0`, an engine's name."},
    "instance": {"description": "Tells services of one kind on one host apart."},
    "kind": {"description": "Kind of the event.", "enum": ["stored", "removed", "cleared"]},
    "service": {"description": "Kind of the service.", "enum": list(SERVICES)},
}


def document() -> Json:
    """Return the whole description, AsyncAPI 3.0."""
    channels: Json = {}
    operations: Json = {}
    for one in PUBLISHED:
        channels[one.name] = _channel(one.subject, one.types)
        operations[f"publish-{one.name}"] = _operation("send", one.name, one.types)
    for verb in VERBS:
        for name, subject in _verb_subjects(verb):
            channels[name] = _channel(subject, (verb.request,))
            channels[f"{name}-reply"] = _channel(None, (verb.reply, verbs.ErrorReply))
            operations[name] = _operation("receive", name, (verb.request,)) | {
                "reply": _reply(f"{name}-reply", (verb.reply, verbs.ErrorReply))
            }
    types = _all_types()
    _, schemas = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    return {
        "asyncapi": "3.0.0",
        "info": _info(),
        "defaultContentType": "application/json",
        "servers": {"nats": {"host": "127.0.0.1:4222", "protocol": "nats"}},
        "channels": channels,
        "operations": operations,
        "components": {
            "messages": {_name(one): _message(one) for one in types},
            "parameters": PARAMETERS,
            "schemas": schemas,
        },
    }


def render() -> str:
    """Render the text of docs/asyncapi.yaml."""
    # A development dependency: services and engines never render this.
    import yaml

    text: str = yaml.safe_dump(document(), sort_keys=False, allow_unicode=True, width=100)
    return "# Generated by `python -m release.asyncapi`; do not edit.\n" + text


def _info() -> Json:
    return {
        "title": "KVBM on NATS",
        "version": f"{VERSION}.0.0",
        "description": (
            "Events, offers, hits and verbs of the KV-cache block manager, from the view of the "
            "services: they send what is published and receive the requests. `x-roles` says which "
            "credentials may use a channel where NATS has roles; `@host`: on their own host. "
            "Positions, limits and rules of evolution are in wire.md."
        ),
        "license": {"name": "Apache-2.0"},
    }


def _verb_subjects(verb: Verb) -> Iterable[tuple[str, str]]:
    """Yield names and subjects of the channels on which a verb is asked."""
    name = "every" if verb.service == "{service}" else verb.service
    here = verbs.verb_subject(verb.service, verb.verb, host="{host}", instance="{instance}")
    yield f"{name}-{verb.verb}", here
    if verb.shared:
        yield f"{name}-{verb.verb}-any", verbs.verb_subject(verb.service, verb.verb)


def _channel(subject: str | None, types: Sequence[type]) -> Json:
    """Describe a channel; without a subject it is an inbox that the requester names."""
    channel: Json = {
        "address": subject,
        "messages": {_name(one): {"$ref": f"#/components/messages/{_name(one)}"} for one in types},
    }
    if subject is not None:
        channel["x-roles"] = {
            "send": users_of(subject, "send"),
            "receive": users_of(subject, "receive"),
        }
    if names := re.findall(r"{(\w+)}", subject or ""):
        channel["parameters"] = {
            name: {"$ref": f"#/components/parameters/{name}"} for name in names
        }
    return channel


def _operation(action: str, channel: str, types: Sequence[type]) -> Json:
    return {"action": action} | _channel_and_messages(channel, types)


def _reply(channel: str, types: Sequence[type]) -> Json:
    address = {"location": "$message.header#/reply", "description": "The inbox of the requester."}
    return {"address": address} | _channel_and_messages(channel, types)


def _channel_and_messages(channel: str, types: Sequence[type]) -> Json:
    root = f"#/channels/{channel}"
    return {
        "channel": {"$ref": root},
        "messages": [{"$ref": f"{root}/messages/{_name(one)}"} for one in types],
    }


def _message(one: type) -> Json:
    summary = (one.__doc__ or "").strip().split("\n")[0]
    schema = {"$ref": f"#/components/schemas/{one.__name__}"}
    said: Json = {"name": one.__name__, "summary": summary, "payload": schema}
    content_type = next((p.content_type for p in PUBLISHED if one in p.types), "")
    if content_type:
        said |= {"contentType": content_type, "description": "What has base64 here is raw bytes."}
    return said


def _all_types() -> list[type]:
    asked = [one for verb in VERBS for one in (verb.request, verb.reply)]
    published = [one for channel in PUBLISHED for one in channel.types]
    return list(dict.fromkeys([*published, *asked, verbs.ErrorReply]))


def _name(one: type) -> str:
    return one.__name__


if __name__ == "__main__":
    sys.stdout.write(render())
