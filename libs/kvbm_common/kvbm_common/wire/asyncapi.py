"""The AsyncAPI description of the bus, generated from the message types so that it cannot drift.

`python -m kvbm_common.wire.asyncapi > docs/asyncapi.yaml` renews it; a test compares the two. Only
the tables below are written by hand: which message goes where.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvbm_common.counters import MetricsSnapshot
from kvbm_common.wire import VERSION, admin, events, explain, holders, scores, verbs

Json = dict[str, Any]

SERVICES = ("index", "host-tier", "disk-tier", "object-tier", "metrics", "consolidator")
"""Every kind of service; each instance answers `stats` and `metrics`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A message that nobody answers."""

    name: str
    subject: str
    types: Sequence[type[msgspec.Struct]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """A request and its reply."""

    service: str
    """`{service}` stands for every kind."""
    verb: str
    request: type[msgspec.Struct]
    reply: type[msgspec.Struct]
    shared: bool = False
    """Also on the subject where any replica answers."""


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
    Published(name="offers", subject=verbs.offers_subject("{host}"), types=(verbs.Offer,)),
    Published(
        name="audit",
        subject=admin.audit_subject("{service}", "{host}", "{instance}"),
        types=(admin.Audited,),
    ),
    Published(name="hits", subject=verbs.hits_subject("{host}"), types=(verbs.Hits,)),
)
VERBS = (
    Verb(
        service="index",
        verb="match",
        request=verbs.MatchRequest,
        reply=verbs.MatchReply,
        shared=True,
    ),
    Verb(
        service="index", verb="dump", request=verbs.DumpRequest, reply=verbs.DumpReply, shared=True
    ),
    Verb(
        service="index",
        verb="holders",
        request=verbs.DumpRequest,
        reply=holders.HoldersReply,
        shared=True,
    ),
    Verb(
        service="index",
        verb="match_batch",
        request=scores.MatchBatchRequest,
        reply=scores.MatchBatchReply,
        shared=True,
    ),
    Verb(
        service="index",
        verb="score",
        request=scores.ScoreRequest,
        reply=scores.ScoreReply,
        shared=True,
    ),
    Verb(
        service="index",
        verb="where",
        request=scores.WhereRequest,
        reply=scores.WhereReply,
        shared=True,
    ),
    Verb(service="host-tier", verb="arena", request=verbs.ArenaRequest, reply=verbs.ArenaReply),
    Verb(service="host-tier", verb="door", request=verbs.DoorRequest, reply=verbs.DoorReply),
    Verb(service="host-tier", verb="lease", request=verbs.LeaseRequest, reply=verbs.LeaseReply),
    Verb(
        service="host-tier", verb="release", request=verbs.ReleaseRequest, reply=verbs.ReleaseReply
    ),
    *(
        Verb(service=source, verb="fill", request=verbs.FillRequest, reply=verbs.FillReply)
        for source in ("disk-tier", "object-tier")
    ),
    *(
        Verb(
            service=source,
            verb="snapshot",
            request=verbs.SnapshotRequest,
            reply=verbs.SnapshotReply,
        )
        for source in ("host-tier", "disk-tier", "object-tier", "consolidator")
    ),
    *(
        Verb(service=tier, verb=verb, request=request, reply=reply)
        for tier in ("host-tier", "disk-tier", "object-tier")
        for verb, request, reply in (
            ("block", admin.BlockRequest, admin.BlockReply),
            ("evict", admin.RemoveRequest, admin.RemoveReply),
            ("reset", admin.RemoveRequest, admin.RemoveReply),
            ("pin", admin.PinRequest, admin.PinReply),
            ("unpin", admin.UnpinRequest, admin.UnpinReply),
            ("pins", admin.PinsRequest, admin.PinsReply),
            ("drain", admin.DrainRequest, admin.DrainReply),
            ("undrain", admin.DrainRequest, admin.DrainReply),
            ("resize", admin.ResizeRequest, admin.ResizeReply),
            ("policy", admin.PolicyRequest, admin.PolicyReply),
        )
    ),
    *(
        Verb(service=tier, verb="filter", request=admin.FilterRequest, reply=admin.FilterReply)
        for tier in ("disk-tier", "object-tier")
    ),
    Verb(
        service="host-tier",
        verb="explain",
        request=explain.ExplainRequest,
        reply=explain.ExplainReply,
    ),
    Verb(
        service="host-tier",
        verb="explain_list",
        request=explain.ExplainListRequest,
        reply=explain.ExplainListReply,
    ),
    *(
        Verb(service=tier, verb="fates", request=explain.FatesRequest, reply=explain.FatesReply)
        for tier in ("disk-tier", "object-tier")
    ),
    Verb(
        service="host-tier",
        verb="prefetch",
        request=admin.PrefetchRequest,
        reply=admin.PrefetchReply,
    ),
    Verb(
        service="{service}",
        verb="log_level",
        request=admin.LogLevelRequest,
        reply=admin.LogLevelReply,
    ),
    Verb(service="{service}", verb="stats", request=verbs.StatsRequest, reply=verbs.StatsReply),
    Verb(service="{service}", verb="metrics", request=verbs.StatsRequest, reply=MetricsSnapshot),
)
PARAMETERS: dict[str, Json] = {
    "host": {"description": "Name of a machine."},
    "source": {"description": "`host-tier-0`, `disk-tier-0`, `object-tier-0`, an engine's name."},
    "instance": {"description": "Tells services of one kind on one host apart."},
    "kind": {"description": "Kind of the event.", "enum": ["stored", "removed", "cleared"]},
    "service": {"description": "Kind of the service.", "enum": list(SERVICES)},
}


def document() -> Json:
    """The whole description, AsyncAPI 3.0."""
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
    """The text of docs/asyncapi.yaml."""
    # A development dependency: services and engines never render this.
    import yaml

    text: str = yaml.safe_dump(document(), sort_keys=False, allow_unicode=True, width=100)
    return "# Generated by `python -m kvbm_common.wire.asyncapi`; do not edit.\n" + text


def _info() -> Json:
    return {
        "title": "KVBM on NATS",
        "version": f"{VERSION}.0.0",
        "description": (
            "Events, offers, hits and verbs of the KV-cache block manager, from the view of the "
            "services: they send what is published and receive the requests. "
            "Positions, limits and rules of evolution are in wire.md."
        ),
        "license": {"name": "Apache-2.0"},
    }


def _verb_subjects(verb: Verb) -> Iterable[tuple[str, str]]:
    """Names and subjects of the channels on which a verb is asked."""
    name = "every" if verb.service == "{service}" else verb.service
    here = verbs.verb_subject(verb.service, verb.verb, host="{host}", instance="{instance}")
    yield f"{name}-{verb.verb}", here
    if verb.shared:
        yield f"{name}-{verb.verb}-any", verbs.verb_subject(verb.service, verb.verb)


def _channel(subject: str | None, types: Sequence[type]) -> Json:
    """A channel; without a subject it is an inbox that the requester names."""
    channel: Json = {
        "address": subject,
        "messages": {_name(one): {"$ref": f"#/components/messages/{_name(one)}"} for one in types},
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
    return {"name": one.__name__, "summary": summary, "payload": schema}


def _all_types() -> list[type]:
    asked = [one for verb in VERBS for one in (verb.request, verb.reply)]
    published = [one for channel in PUBLISHED for one in channel.types]
    return list(dict.fromkeys([*published, *asked, verbs.ErrorReply]))


def _name(one: type) -> str:
    return one.__name__


if __name__ == "__main__":
    sys.stdout.write(render())
