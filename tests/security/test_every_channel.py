"""Every channel of docs/asyncapi.yaml, and every stream, tried with every credential and without.

The server is a real one with the configuration that `kvbm nats-config` writes. What it lets each
role do is compared with the document, which is made from the table of roles.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from kvbm_common.access import nkeys
from kvbm_common.access.grants import concrete, grants_of
from kvbm_common.access.nats_access import NatsAccess
from kvbm_common.access.nats_credentials import Credentials
from kvbm_common.access.roles import ADMIN, BY_NAME, CONSUMER, ROLES
from kvbm_common.errors import BusUnavailable, NotPermitted
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.direct_client import DirectClient
from kvbm_common.nats.jetstream import (
    JetStreamError,
    call_api,
    ensure_stream,
    publish_acknowledged,
)
from kvbm_common.nats.streams import AUDIT, EVENTS, STREAMS
from kvbm_common.registry.nats_kv import NatsRegistry
from kvbm_common.wire.admin import audit_subject

from tests.security.guarded_nats import GuardedNats, guarded_nats

DOCUMENT = Path(__file__).parents[2] / "docs" / "asyncapi.yaml"
CHANNELS: dict[str, Any] = {
    name: channel
    for name, channel in yaml.safe_load(DOCUMENT.read_text())["channels"].items()
    if channel["address"] is not None
}
HOSTS = ("a", "b")
"""The credentials under test are those of `a`."""
API_CALLS = (
    "STREAM.CREATE.{}", "STREAM.UPDATE.{}", "STREAM.DELETE.{}", "STREAM.PURGE.{}",
    "STREAM.MSG.DELETE.{}", "STREAM.MSG.GET.{}", "STREAM.SNAPSHOT.{}", "STREAM.RESTORE.{}",
    "CONSUMER.CREATE.{}", "CONSUMER.DURABLE.CREATE.{}.x", "CONSUMER.LIST.{}", "CONSUMER.NAMES.{}",
    "CONSUMER.DELETE.{}.x", "CONSUMER.MSG.NEXT.{}.x", "DIRECT.GET.{}",
)  # fmt: skip
"""Calls of the JetStream API that could read, change or destroy a whole stream."""


@dataclass(slots=True)
class Attempts:
    """A client that notes what the server refuses."""

    client: DirectClient
    refused: list[str] = field(default_factory=list)

    async def publish(self, subjects: Sequence[str]) -> set[str]:
        """Return which of these subjects the server takes no message on."""
        self.refused.clear()
        for subject in subjects:
            await self.client.publish(subject, b"", headers={"Nats-Expected-Stream": "none"})
        return await self._refused(subjects)

    async def subscribe(self, subjects: Sequence[str]) -> set[str]:
        """Return which of these subjects, or patterns, the server lets it not hear."""
        self.refused.clear()
        made = [await self.client.subscribe(subject) for subject in subjects]
        found = await self._refused(subjects)
        for subscription in made:
            await subscription.unsubscribe()
        return found

    async def _refused(self, subjects: Sequence[str]) -> set[str]:
        for _ in range(2):  # The first ping may overtake what waits to be sent.
            await self.client.flush()
        named = {name for text in self.refused for name in re.findall(r'"([^"]+)"', text)}
        return {subject for subject in subjects if subject.lower() in named}


@asynccontextmanager
async def attempts(guarded: GuardedNats, role: str) -> AsyncIterator[Attempts]:
    """Connect as a role of host `a`. Only the server decides what is refused."""
    access = guarded.access(role)
    client = DirectClient(access)
    tried = Attempts(client)

    async def note(error: Exception) -> None:
        tried.refused.append(str(error))

    await client.connect(list(access.servers), error_cb=note, inbox_prefix=access.inbox)
    try:
        yield tried
    finally:
        await client.close()


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[GuardedNats]:
    """A server with credentials for two hosts."""
    async with guarded_nats(tmp_path, hosts=HOSTS) as running:
        yield running


def subjects_of(channel: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield host and subject of a channel, on both hosts and for each example of a parameter."""
    for host in HOSTS:
        for subject in concrete(channel["address"], host):
            yield host, subject


def everything() -> list[str]:
    """Return the subjects of all channels."""
    return [subject for channel in CHANNELS.values() for _, subject in subjects_of(channel)]


@pytest.mark.slow
async def test_without_credentials_there_is_no_channel(guarded: GuardedNats) -> None:
    """A connection without credentials, or with a key that the server does not know, ends."""
    for seed in ("", nkeys.make_seed()):
        access = NatsAccess(
            servers=(guarded.server.url,), in_url=Credentials(seed=seed) if seed else None
        )
        with pytest.raises(BusUnavailable, match="Authorization Violation"):
            await Bus.connect(access, "anonymous", deadline_s=0.5)


@pytest.mark.parametrize("role", [role.name for role in ROLES])
async def test_each_role_sends_and_hears_what_the_document_says(
    guarded: GuardedNats, role: str
) -> None:
    """Goal: each channel is refused to every role that it is not for, on its own host and others.

    1. A message on each subject. 2. A subscription to each. 3. What the server has refused is what
    the table does not allow; and the document names this role where one is allowed.
    """
    grants = grants_of(BY_NAME[role], host="a", instances=guarded.plan.instance_names)
    async with attempts(guarded, role) as tried:
        unsent = await tried.publish(everything())
        unheard = await tried.subscribe(everything())
    for channel in CHANNELS.values():
        sent, heard = set[str](), set[str]()
        for host, subject in subjects_of(channel):
            assert (subject not in unsent) is grants.may_publish(subject), subject
            assert (subject not in unheard) is grants.may_subscribe(subject), subject
            sent |= {host} if subject not in unsent else set()
            heard |= {host} if grants.may_receive(subject) else set()
        for action, hosts in (("send", sent), ("receive", heard)):
            named = {HOST_ONLY: {"a"}, EVERYWHERE: set(HOSTS), NOWHERE: set()}
            assert hosts == named[scope(channel["x-roles"][action], role)], channel["address"]


HOST_ONLY, EVERYWHERE, NOWHERE = "its own host", "every host", "no host"


def scope(listed: list[str], role: str) -> str:
    """Return where a role is named in a list of the document."""
    if f"{role}@host" in listed:
        return HOST_ONLY
    return EVERYWHERE if role in listed else NOWHERE


def test_the_document_names_each_role() -> None:
    """No role is without a channel, and each channel is heard by more than operators."""
    named = {
        one.removesuffix("@host")
        for channel in CHANNELS.values() for listed in channel["x-roles"].values()
        for one in listed
    }  # fmt: skip
    assert named == {role.name for role in ROLES}
    for channel in CHANNELS.values():
        assert set(channel["x-roles"]["receive"]) - {ADMIN}, channel["address"]


@pytest.mark.parametrize("role", [role.name for role in ROLES if role.name != ADMIN])
async def test_streams_are_read_in_part_and_never_changed(guarded: GuardedNats, role: str) -> None:
    """Goal: no call of the API reads another part, makes, changes or destroys a stream.

    The exceptions are the index and its own images, and a consumer that reads event by event.
    """
    calls = [f"$JS.API.{call.format(spec.name)}" for spec in STREAMS for call in API_CALLS]
    async with attempts(guarded, role) as tried:
        allowed = set(calls) - await tried.publish(calls)
    expected: set[str] = set()
    if role == "index":
        expected = {f"$JS.API.STREAM.{call}.OBJ_KVBM_INDEX" for call in ("PURGE", "MSG.GET")}
    if role == CONSUMER:  # It reads all of both streams: its consumers need not name a part.
        expected = {
            f"$JS.API.CONSUMER.{call.format(stream)}"
            for call in ("MSG.NEXT.{}.x", "DELETE.{}.x", "CREATE.{}")
            for stream in ("KVBM_EVENTS", "KVBM_CONSOLIDATED")
        }
    assert allowed == expected


@pytest.mark.parametrize("role", ["host-tier", "disk-tier", "consolidator"])
@pytest.mark.parametrize(
    "part", ["kvbm.v1.events.b.*.*", "kvbm.v1.events.>", "kvbm.v1.events.*.*.*", ">"]
)
async def test_a_host_reads_its_own_events_only(guarded: GuardedNats, role: str, part: str) -> None:
    """1. The part is in the subject of the call, so the server refuses it. 2. Neither does a call
    for the own part with another one in its request bring another's events."""
    own = "kvbm.v1.events.a.*.*"
    async with guarded.bus(role) as bus:
        for name, asked in ((f"x.{part}", part), (f"y.{own}", part), ("z", part)):
            config = {"name": name[0], "filter_subject": asked, "ack_policy": "none"}
            request = {"stream_name": "KVBM_EVENTS", "config": config}
            with pytest.raises((NotPermitted, JetStreamError)):
                await call_api(bus, f"CONSUMER.CREATE.KVBM_EVENTS.{name}", request)
        several = {"name": "y", "filter_subjects": [own, part], "ack_policy": "none"}
        request = {"stream_name": "KVBM_EVENTS", "config": several}
        with pytest.raises(JetStreamError):
            await call_api(bus, f"CONSUMER.CREATE.KVBM_EVENTS.y.{own}", request)


async def test_tenants_share_nothing(tmp_path: Path) -> None:
    """1. What one publishes the other does not hear. 2. Nor is its stream the other's, even for an
    admin. 3. Entries of the registry are those of the tenant."""
    async with (
        guarded_nats(tmp_path, hosts=("a",), tenants=("x", "y")) as guarded,
        guarded.bus(ADMIN, tenant="x") as ours,
        guarded.bus(ADMIN, tenant="y") as other,
    ):
        heard: list[str] = []
        await other.subscribe_raw(">", lambda many: heard.extend(m.subject for m in many))
        ack = await publish_acknowledged(ours, EVENTS, "kvbm.v1.events.a.x.stored", b"1")
        assert ack.seq == 1
        theirs = await ensure_stream(other, EVENTS)
        assert theirs.state.last_seq == 0
        registry = NatsRegistry(ours, ttl_s=5.0)
        await registry.register("index", "a", "0")
        reader = NatsRegistry(other, ttl_s=5.0)
        assert await reader.list() == []
        await reader.close()
        await registry.close()
        assert not [one for one in heard if not one.startswith(("_INBOX", "$JS"))]


async def test_the_audit_is_not_erased_even_by_an_admin(guarded: GuardedNats) -> None:
    """No message is deleted, and the stream is not purged; nor can that be allowed again."""
    async with guarded.bus(ADMIN) as admin:
        subject = audit_subject("index", "a", "0")
        await publish_acknowledged(admin, AUDIT, subject, b"{}")
        with pytest.raises(JetStreamError):
            await call_api(admin, f"STREAM.MSG.DELETE.{AUDIT.name}", {"seq": 1})
        with pytest.raises(JetStreamError):
            await call_api(admin, f"STREAM.PURGE.{AUDIT.name}", {})
        config = AUDIT.as_config() | {"deny_delete": False, "deny_purge": False}
        with pytest.raises(JetStreamError):
            await call_api(admin, f"STREAM.UPDATE.{AUDIT.name}", config)
        assert (await ensure_stream(admin, AUDIT)).state.last_seq == 1
