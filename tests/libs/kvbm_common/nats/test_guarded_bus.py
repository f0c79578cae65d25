"""The bus with credentials and TLS, on real servers: every kind, rotation, and what is refused."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from kvbm_cli.creds.certificates import Authority
from kvbm_common.access.nats_access import NatsAccess, of_url
from kvbm_common.access.secret_files import SecretFile, write_secret
from kvbm_common.access.tls import TlsFiles
from kvbm_common.errors import BusUnavailable, DeadlineExceeded, NotPermitted, RequestFailed
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.direct_client import DirectClient
from kvbm_common.nats.embedded_server import NatsServer
from kvbm_common.nats.jetstream import StreamMissing, ensure_stream
from kvbm_common.nats.streams import EVENTS
from nats.aio.client import Client

from tests.libs.kvbm_common.nats.speaking import echo, fail, publishing, put, read
from tests.security.operator_mode import write_operator
from tests.waiting import wait_until

SOON_S = 3.0
RUN_S = 60.0
"""A process starts in a second; a busy machine has more."""
REFUSED_S = 1.0
"""A refusal is tried again until then: a first one comes within milliseconds."""
EVENT_COUNT = 3_000
"""So many that the server asks for flow control."""
USERS = {"users": [{"user": "u", "password": "first"}]}


@asynccontextmanager
async def serving(directory: Path, **more: Any) -> AsyncIterator[NatsServer]:
    """Run a server with this in its configuration."""
    async with NatsServer(directory / "nats", more=more) as server:
        yield server


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    """An authority that has signed a server and a client; another with a client of its own."""
    for name in ("ours", "theirs"):
        signer = Authority(tmp_path / name)
        signer.give(tmp_path / name, "server", "nats", ["localhost", "127.0.0.1"])
        signer.give(tmp_path / name, "client", "client")
    return tmp_path


def server_tls(authority: Path, *, verify: bool = False) -> dict[str, Any]:
    """Return what the server needs for TLS; with `verify` it wants certificates of clients."""
    own = authority / "ours"
    return {"tls": {"cert_file": str(own / "server.pem"), "key_file": str(own / "server.key"),
                    "ca_file": str(own / "ca.pem"), "verify": verify}}  # fmt: skip


def by_tls(
    server: NatsServer, authority: Path, *, ca: str = "ours", client: str = ""
) -> NatsAccess:
    """Return an access over TLS: trusting one authority, perhaps with a certificate."""
    own = authority / client
    shown = (own / "client.pem", own / "client.key") if client else (None, None)
    return NatsAccess(
        servers=(f"tls://localhost:{server.port}",),
        tls=TlsFiles(authority / ca / "ca.pem", *shown),
        wants_tls=True,
    )


async def works(access: NatsAccess | str, *, count: int = 10) -> None:
    """A verb answers, its error travels in a header, and events come once and in order."""
    bus = await Bus.connect(access, "test")
    try:
        await bus.add_verbs("index", "0", "h", {"match": echo, "broken": fail})
        assert await bus.request("kvbm.v1.index.h.0.match", b"1", deadline_s=2) == b"1"
        with pytest.raises(RequestFailed, match="no"):
            await bus.request("kvbm.v1.index.h.0.broken", b"", deadline_s=2)
        async with publishing(bus) as publisher, bus.event_subscription() as events:
            put(publisher, 1, count)
            assert await read(events, count) == list(range(1, count + 1))
    finally:
        await bus.close()


async def refused(access: NatsAccess | str) -> str:
    """Return why there is no connection."""
    with pytest.raises(BusUnavailable) as caught:
        await Bus.connect(access, "test", deadline_s=REFUSED_S)
    return str(caught.value)


@pytest.mark.slow
async def test_a_password_in_the_url(tmp_path: Path) -> None:
    """It is used and not shown; without it, or with another one, the server says no."""
    async with serving(tmp_path, authorization=USERS) as server:
        await works(f"nats://u:first@127.0.0.1:{server.port}")
        assert "Authorization Violation" in await refused(server.url)
        wrong = await refused(f"nats://u:a-wrong-one@127.0.0.1:{server.port}")
        assert "Authorization Violation" in wrong
        assert "a-wrong-one" not in wrong


@pytest.mark.slow
async def test_a_creds_file_of_an_operator(tmp_path: Path) -> None:
    """JWT and seed, as a hosted NATS gives them out."""
    path = tmp_path / "user.creds"
    own = write_operator(path)
    async with serving(tmp_path, **own) as server:
        await works(NatsAccess(servers=(server.url,), file=SecretFile(path, "V")))
        assert "Authorization Violation" in await refused(server.url)


async def test_a_file_with_a_new_password_is_read_without_a_restart(tmp_path: Path) -> None:
    """1. A password that the file has not yet is not known. 2. The server changes the password and
    ends the connection; the file has the new one by then: the bus comes back by itself."""
    path = tmp_path / "u.creds"
    write_secret(path, "u:first")
    async with serving(tmp_path, authorization=USERS) as server:
        access = NatsAccess(servers=(server.url,), file=SecretFile(path, "V"))
        bus = await Bus.connect(access, "test")
        try:
            await bus.add_verbs("index", "0", "h", {"match": echo})
            generation = bus.generation
            write_secret(path, "u:second")
            server.more["authorization"] = {"users": [{"user": "u", "password": "second"}]}
            server.reload()
            await wait_until(lambda: bus.generation > generation and bus.connected)
            assert await bus.request("kvbm.v1.index.h.0.match", b"1", deadline_s=2) == b"1"
            assert not bus.closed_by_server.is_set()
        finally:
            await bus.close()


async def test_the_file_may_come_later_than_the_servers_change(tmp_path: Path) -> None:
    """Goal: a rotation in the wrong order costs an outage, no restart."""
    path = tmp_path / "u.creds"
    write_secret(path, "u:first")
    async with serving(tmp_path, authorization=USERS) as server:
        access = NatsAccess(servers=(server.url,), file=SecretFile(path, "V"))
        bus = await Bus.connect(access, "test")
        try:
            server.more["authorization"] = {"users": [{"user": "u", "password": "second"}]}
            server.reload()
            await wait_until(lambda: "Authorization Violation" in bus.trouble)
            path.unlink()
            await wait_until(lambda: "No such file" in bus.trouble)
            write_secret(path, "u:second")
            await wait_until(lambda: bus.connected)
        finally:
            await bus.close()


@pytest.mark.parametrize("verify", [False, True])
async def test_bus_carries_many_events_over_tls_with_and_without_a_client_certificate(
    tmp_path: Path, authority: Path, verify: bool
) -> None:
    """Many events, which come in pieces; and a certificate of the client where one is wanted."""
    async with serving(tmp_path, **server_tls(authority, verify=verify)) as server:
        access = by_tls(server, authority, client="ours" if verify else "")
        assert access.guarded is verify
        await works(access, count=EVENT_COUNT)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ca", "client"), [("theirs", "ours"), ("ours", ""), ("ours", "theirs")],
    ids=["a server that is not trusted", "no certificate", "another authority's"],
)  # fmt: skip
async def test_strangers_are_refused_on_either_side(
    tmp_path: Path, authority: Path, ca: str, client: str
) -> None:
    """The server shows a certificate of ours, and wants one."""
    async with serving(tmp_path, **server_tls(authority, verify=True)) as server:
        await refused(by_tls(server, authority, ca=ca, client=client))


@pytest.mark.slow
async def test_a_server_of_another_name_is_refused(tmp_path: Path, authority: Path) -> None:
    """Its certificate is good, and not for this name."""
    other = Authority(authority / "ours")
    (authority / "ours" / "server.pem").unlink()
    other.give(authority / "ours", "server", "nats", ["elsewhere.example"])
    async with serving(tmp_path, **server_tls(authority)) as server:
        assert "ertificate" in await refused(by_tls(server, authority))


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["tls", "nats"])
async def test_a_plaintext_server_gets_nothing(
    tmp_path: Path, authority: Path, scheme: str
) -> None:
    """Goal: who cuts TLS out of the connection learns no password, and is not talked to.

    The scheme says so, or the setting of an authority; the server's log has no login.
    """
    path = tmp_path / "u.creds"
    write_secret(path, "u:first")
    async with serving(tmp_path, authorization=USERS, debug=True, trace=True) as server:
        access = NatsAccess(
            servers=(f"{scheme}://localhost:{server.port}",),
            file=SecretFile(path, "V"),
            tls=TlsFiles(authority / "ours" / "ca.pem"),
            wants_tls=True,
        )
        assert "speaks no TLS" in await refused(access)
        assert "CONNECT" not in (server.directory / "nats-server.log").read_text()


async def test_certificates_are_read_again(tmp_path: Path, authority: Path) -> None:
    """Goal: a certificate that was renewed is shown at the next connection, without a restart.

    1. Connected. 2. The server trusts another authority from now on, and starts again. 3. The
    client's files are replaced: it comes back.
    """
    async with serving(tmp_path, **server_tls(authority, verify=True)) as server:
        bus = await Bus.connect(by_tls(server, authority, client="ours"), "test")
        try:
            server.kill()
            server.more["tls"]["ca_file"] = str(authority / "theirs" / "ca.pem")
            await server.start()
            # The client may hear of it by a reset alone: the server's log is sure to say why.
            log = server.directory / "nats-server.log"
            await wait_until(lambda: "TLS handshake error" in log.read_text())
            assert not bus.connected
            for name in ("client.key", "client.pem"):
                (authority / "theirs" / name).replace(authority / "ours" / name)
            await wait_until(lambda: bus.connected)
        finally:
            await bus.close()


@pytest.mark.slow
async def test_what_a_role_may_not_do_fails_at_once(tmp_path: Path) -> None:
    """Goal: a missing permission is an error with a name, not a deadline.

    A stream that is not there and may not be made says what to do. Another question waits on.
    """
    publish = {"allow": ["$JS.API.STREAM.INFO.*", "quiet"]}
    permissions = {"publish": publish, "subscribe": {"allow": [">"]}}
    users = [{"user": "u", "password": "p", "permissions": permissions}]
    async with serving(tmp_path, authorization={"users": users}) as server:
        bus = await Bus.connect(of_url(f"nats://u:p@127.0.0.1:{server.port}"), "test")
        try:
            await bus.subscribe("quiet", lambda _subject, _payload: None)
            other = asyncio.create_task(bus.request("quiet", b"", deadline_s=SOON_S))
            async with asyncio.timeout(SOON_S):
                with pytest.raises(NotPermitted, match=r"kvbm\.v1\.index\.match"):
                    await bus.request("kvbm.v1.index.match", b"", deadline_s=60)
                with pytest.raises(StreamMissing, match="kvbm nats-streams"):
                    await ensure_stream(bus, EVENTS)
            with pytest.raises(DeadlineExceeded):
                await other
        finally:
            await bus.close()


async def test_a_library_without_the_moment_gets_no_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: a release that introduces clients elsewhere is noticed, not used in the open."""
    monkeypatch.setattr(DirectClient, "_connect_command", Client._connect_command)
    async with serving(tmp_path) as server:
        assert "nats-py is another one" in await refused(server.url)


async def test_the_end_of_an_encrypted_connection_is_no_warning(
    tmp_path: Path, authority: Path
) -> None:
    """Goal: an operator does not read asyncio's line of a command without logs; others are written.

    Method: such a process connects and leaves.
    """
    async with serving(tmp_path, **server_tls(authority)) as server:
        access = by_tls(server, authority)
        code = (
            "import asyncio, logging, pathlib\n"
            "from kvbm_common.access.nats_access import NatsAccess\n"
            "from kvbm_common.access.tls import TlsFiles\n"
            "from kvbm_common.nats.bus import Bus\n"
            "async def main():\n"
            f"    tls = TlsFiles(pathlib.Path({str(access.tls.ca)!r}))\n"
            f"    to = NatsAccess(servers={access.servers!r}, tls=tls, wants_tls=True)\n"
            "    await (await Bus.connect(to, 'test')).close()\n"
            "    logging.getLogger('asyncio').warning('news')\n"
            "asyncio.run(main())\n"
        )
        made = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, stderr=asyncio.subprocess.PIPE
        )
        _, said = await asyncio.wait_for(made.communicate(), RUN_S)
    assert (made.returncode, said.decode()) == (0, "news\n")
