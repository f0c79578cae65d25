"""CURVE: keys of ZMQ sockets on TCP. A server takes clients that it knows; ipc needs none of it.

The server's file has its secret key and the public keys of its clients, a client's file its own
keys and the server's public one; `kvbm creds curve` makes a pair. The list of clients is read again
for each connection.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq
import zmq.auth.asyncio

from kvbm_common.access.secret_files import SecretFile, SecretUnreadable, write_secret
from kvbm_common.config.settings import Settings
from kvbm_common.errors import ConfigError

TCP = "tcp://"
SERVER_FILE = "server.curve"
CLIENT_FILE = "client.curve"


class ServerKeys(msgspec.Struct, frozen=True):
    """The keys in a server's file. They are text as ZMQ writes it (Z85)."""

    public: str
    secret: str
    clients: list[str]


class ClientKeys(msgspec.Struct, frozen=True):
    """The keys in a client's file."""

    server: str
    public: str
    secret: str


def write_keys(directory: Path) -> tuple[Path, Path]:
    """Write a client's file, and a server's that takes it.

    A server's file that is there keeps its key and its clients, who have theirs elsewhere by now.
    Raises OSError; ConfigError for a client's file whose server's is gone; SecretUnreadable.
    """
    server_file, client_file = directory / SERVER_FILE, directory / CLIENT_FILE
    if server_file.exists():
        server = _decoded(SecretFile(server_file, "KVBM_CURVE_SERVER_FILE"), ServerKeys)
    elif client_file.exists():
        accepted = f"a directory with {SERVER_FILE} beside {CLIENT_FILE}, or with neither"
        raise ConfigError("KVBM_CREDS_DIR", directory, accepted)
    else:
        server = ServerKeys(*_key_pair(), clients=[])
    public, secret = _key_pair()
    server = msgspec.structs.replace(server, clients=[*server.clients, public])
    client = ClientKeys(server.public, public, secret)
    for file, keys in ((server_file, server), (client_file, client)):  # One too many is harmless.
        write_secret(file, msgspec.json.encode(keys).decode() + "\n")
    return server_file, client_file


def _key_pair() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def refuse_open(
    settings: Settings, endpoint: str, variable: str, *, is_open: bool, open_variable: str
) -> None:
    """Raise ConfigError for an endpoint on TCP without keys that is not declared open."""
    if not endpoint.startswith(TCP) or is_open or settings.curve_server_file is not None:
        return
    accepted = (
        "an ipc:// path; tcp:// with keys (KVBM_CURVE_SERVER_FILE, made by `kvbm creds curve`), "
        f"or with {open_variable}=true where every process that reaches the port may use it"
    )
    raise ConfigError(variable, endpoint, accepted)


def refuse_open_to_engines(settings: Settings, endpoint: str, variable: str) -> None:
    """Raise ConfigError for an endpoint of engines that would be open by mistake."""
    refuse_open(
        settings, endpoint, variable,
        is_open=settings.engines_open, open_variable="KVBM_ENGINES_OPEN",
    )  # fmt: skip


Keys = TypeVar("Keys", ServerKeys, ClientKeys)


def refuse_open_consolidator(settings: Settings) -> None:
    """Raise ConfigError for a socket of a consolidator that would be open by mistake."""
    refuse_open_to_engines(settings, settings.consolidator_endpoint, "KVBM_CONSOLIDATOR_ENDPOINT")
    for endpoint, variable in (
        (settings.router_endpoint, "KVBM_ROUTER_ENDPOINT"),
        (settings.router_replay_endpoint, "KVBM_ROUTER_REPLAY_ENDPOINT"),
    ):
        refuse_open(
            settings, endpoint, variable,
            is_open=settings.router_open, open_variable="KVBM_ROUTER_OPEN",
        )  # fmt: skip


class CurveServer:
    """The keys of the sockets of one context; without a file sockets stay as they are."""

    def __init__(self, context: Any, file: Path | None) -> None:
        self._file = SecretFile(file, "KVBM_CURVE_SERVER_FILE") if file is not None else None
        self._context = context
        self._authenticator: zmq.auth.asyncio.AsyncioAuthenticator | None = None

    def protect(self, socket: Any, endpoint: str) -> None:
        """Have a socket take clients with keys only, if it is to be bound on TCP.

        Call it before the socket is bound; raises ConfigError for a file that is no server's.
        """
        if self._file is None or not endpoint.startswith(TCP):
            return
        try:
            keys = self._keys()
        except SecretUnreadable as error:
            raise ConfigError("KVBM_CURVE_SERVER_FILE", self._file.path, str(error)) from error
        self._start()
        socket.curve_server = True
        socket.curve_secretkey = keys.secret.encode()
        socket.curve_publickey = keys.public.encode()

    def close(self) -> None:
        """Stop deciding who may connect."""
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None

    def callback(self, _domain: str, key: bytes) -> bool:
        """Tell whether a client with this public key may connect, by what the file says now."""
        with contextlib.suppress(SecretUnreadable):
            return key.decode() in self._keys().clients
        return False

    def _start(self) -> None:
        if self._authenticator is None:
            self._authenticator = zmq.auth.asyncio.AsyncioAuthenticator(self._context)
            self._authenticator.start()
            self._authenticator.configure_curve_callback("*", credentials_provider=self)

    def _keys(self) -> ServerKeys:
        assert self._file is not None
        return _decoded(self._file, ServerKeys)


def use_client_keys(socket: Any, endpoint: str, file: Path | None) -> None:
    """Give a socket the keys of a client, if it connects on TCP; raises SecretUnreadable."""
    if file is None or not endpoint.startswith(TCP):
        return
    keys = _decoded(SecretFile(file, "KVBM_CURVE_CLIENT_FILE"), ClientKeys)
    socket.curve_serverkey = keys.server.encode()
    socket.curve_publickey = keys.public.encode()
    socket.curve_secretkey = keys.secret.encode()


def _decoded(file: SecretFile, kind: type[Keys]) -> Keys:
    try:
        return msgspec.json.decode(file.text(), type=kind)
    except msgspec.MsgspecError as error:
        text = f"{file.path} was not written by `kvbm creds curve`"
        raise SecretUnreadable(text) from error
