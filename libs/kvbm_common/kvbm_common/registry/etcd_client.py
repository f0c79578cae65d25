"""A connection to etcd: the few calls that the registry needs, in threads and with deadlines.

etcd3 blocks. Its calls run in threads of this module, so none can hold up an event loop, and every
failure is a RegistryUnavailable. What is broken is thrown away with its channel, and the next
server of the list is asked: at once if this one refused the connection or had cut it, with the next
call if it did not answer in time.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kvbm_common.access.etcd_access import OPEN, EtcdAccess
from kvbm_common.errors import KvbmError, RegistryUnavailable

_IMPLEMENTATION = "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"
"""etcd3's messages were generated for an old protobuf; newer ones read them in pure Python only."""
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
# Its handlers sometimes killed a child between fork and exec; no child of a fork uses grpc.
_before = os.environ.get(_IMPLEMENTATION)
os.environ[_IMPLEMENTATION] = "python"
try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        import etcd3
        import grpc
        from etcd3 import etcdrpc
finally:
    del os.environ[_IMPLEMENTATION]
    if _before is not None:
        os.environ[_IMPLEMENTATION] = _before

CALL_DEADLINE_S = 1.0
"""For one answer. A call that finds no free thread waits as long again."""
CALL_THREADS = 4
"""Registrations of one process beat at different times; one call takes about a millisecond."""
MESSAGE_BYTES_MAX = 16 * 1024 * 1024
"""A listing of some ten thousand services."""
OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.enable_http_proxy", 0),  # etcd is inside; a proxy for the outside would hide it.
    ("grpc.use_local_subchannel_pool", 1),  # A new channel does not inherit the old one's pauses.
)
_Result = TypeVar("_Result")


class Compacted(RegistryUnavailable):
    """etcd has forgotten the revision from which a watch was to begin; read everything again."""

    code = "registry_compacted"


class _ConnectionLost(RegistryUnavailable):
    """There is no connection, or no longer; another try may find one."""


@dataclass(frozen=True, slots=True)
class EtcdEntry:
    """A key with its value, and the revision that wrote it."""

    key: str
    value: bytes
    revision: int


@dataclass(frozen=True, slots=True)
class EtcdReading:
    """The entries under a key or a prefix when the store was at a revision."""

    entries: tuple[EtcdEntry, ...]
    revision: int

    @property
    def entry(self) -> EtcdEntry | None:
        """The only one, if there is one."""
        return self.entries[0] if self.entries else None


@dataclass(frozen=True, slots=True)
class Change:
    """A key was written, or deleted (by a client, or by the end of its lease): no value."""

    key: str
    value: bytes | None
    revision: int


class Watch:
    """The changes under a prefix, in order. One task reads; another may cancel."""

    def __init__(self, call: Any, released: threading.Event, threads: ThreadPoolExecutor) -> None:
        self._call = call
        self._released = released
        self._threads = threads

    async def next(self) -> list[Change]:
        """Wait for the next batch; raises RegistryUnavailable, Compacted.

        It has no deadline: a quiet registry is a healthy one. Ask etcd for something else now and
        then, and cancel the watch when that fails.
        """
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._threads, self._read)
        except RuntimeError as error:
            raise RegistryUnavailable("the connection to etcd is closed") from error

    def cancel(self) -> None:
        """End it, from any thread, any number of times; its reader gets a RegistryUnavailable."""
        self._released.set()
        self._call.cancel()

    def _read(self) -> list[Change]:
        try:
            response = next(self._call, None)
        except grpc.RpcError as error:
            raise RegistryUnavailable(f"the watch ended: {_text(error)}") from error
        if response is None:
            raise RegistryUnavailable("the watch ended")
        if response.compact_revision:
            raise Compacted(f"etcd begins at revision {response.compact_revision}")
        if response.canceled:
            raise RegistryUnavailable(f"etcd ended the watch: {response.cancel_reason}")
        return [
            Change(
                key=event.kv.key.decode(errors="replace"),
                value=None if event.type == event.DELETE else event.kv.value,
                revision=event.kv.mod_revision,
            )
            for event in response.events
        ]


class EtcdClient:
    """One process's connection to etcd. Use it in one event loop."""

    def __init__(
        self,
        servers: tuple[str, ...],
        *,
        deadline_s: float = CALL_DEADLINE_S,
        access: EtcdAccess = OPEN,
    ) -> None:
        assert servers, "no etcd server"
        self._servers = servers
        self._access = access
        self._deadline_s = deadline_s
        self._next = 0
        self._client: Any = None
        self._closed = False
        self._lock = threading.Lock()
        """Guards the three above: calls in other threads open and throw away the connection."""
        self._threads = ThreadPoolExecutor(CALL_THREADS, thread_name_prefix="etcd")
        self._watch_thread = ThreadPoolExecutor(1, thread_name_prefix="etcd watch")

    async def get(self, key: str) -> EtcdReading:
        """Read a key; raises RegistryUnavailable."""
        return await self._call(lambda client: _reading(client.get_response(key)))

    async def list(self, prefix: str) -> EtcdReading:
        """Read all keys under a prefix; raises RegistryUnavailable."""
        return await self._call(lambda client: _reading(client.get_prefix_response(prefix)))

    async def put_if(
        self, guard: str, guard_revision: int, key: str, value: bytes, *, lease: int = 0
    ) -> EtcdEntry | None:
        """Write a key if `guard` is still as that revision left it (0: not there), else None.

        Raises RegistryUnavailable; then it may have happened or not.
        """

        def put(client: Any) -> EtcdEntry | None:
            terms = client.transactions
            succeeded, answers = client.transaction(
                compare=[terms.mod(guard) == guard_revision],
                success=[terms.put(key, value, lease=lease), terms.get(key)],
                failure=[],
            )
            if not succeeded:
                return None
            ((written, metadata),) = answers[1]
            return EtcdEntry(key, written, metadata.mod_revision)

        return await self._call(put)

    async def grant(self, ttl_s: float) -> int:
        """Grant a lease of whole seconds, not below etcd's least; raises RegistryUnavailable."""
        return await self._call(lambda client: int(client.lease(math.ceil(ttl_s)).id))

    async def keep_alive(self, lease: int) -> bool:
        """Renew a lease; False if it is gone. Raises RegistryUnavailable."""
        return await self._call(
            lambda client: any(answer.TTL > 0 for answer in client.refresh_lease(lease))
        )

    async def revoke(self, lease: int) -> None:
        """End a lease, and delete what was written under it; raises RegistryUnavailable."""
        await self._call(lambda client: client.revoke_lease(lease))

    async def watch(self, prefix: str, revision: int) -> Watch:
        """Follow a prefix from a revision on; raises RegistryUnavailable. One at a time."""
        return await self._call(lambda client: self._open_watch(client, prefix, revision))

    async def close(self) -> None:
        """End everything; what is under way ends with an error."""
        with self._lock:
            self._closed = True
            client, self._client = self._client, None
        if client is not None:
            client.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._watch_thread.shutdown(wait=False, cancel_futures=True)

    def _open_watch(self, client: Any, prefix: str, revision: int) -> Watch:
        # Not etcd3's own watcher: its thread cannot be ended, and it hides a lost connection.
        released = threading.Event()
        request = etcdrpc.WatchRequest(
            create_request=etcdrpc.WatchCreateRequest(
                key=prefix.encode(),
                range_end=etcd3.utils.increment_last_byte(prefix.encode()),
                start_revision=revision,
            )
        )

        def requests() -> Iterator[Any]:
            yield request
            released.wait()  # The end of the requests would be the end of the watch.

        call = etcdrpc.WatchStub(client.channel).Watch(requests(), metadata=client.metadata)
        call.add_callback(released.set)
        return Watch(call, released, self._watch_thread)

    async def _call(self, function: Callable[[Any], _Result]) -> _Result:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(2 * self._deadline_s):
                return await loop.run_in_executor(self._threads, self._run, function)
        except TimeoutError as error:
            raise RegistryUnavailable("no free thread to ask etcd") from error
        except RuntimeError as error:
            raise RegistryUnavailable("the connection to etcd is closed") from error

    def _run(self, function: Callable[[Any], _Result]) -> _Result:
        # Every server once, and the one again whose restart this call is the first to notice.
        for _ in self._servers:
            with contextlib.suppress(_ConnectionLost):
                return self._try(function)
        return self._try(function)

    def _try(self, function: Callable[[Any], _Result]) -> _Result:
        client: Any = None
        server = self._servers[self._next % len(self._servers)]
        try:
            client, server = self._connected()
            return function(client)
        except (etcd3.exceptions.ConnectionFailedError, ValueError) as error:
            # ValueError is what grpc raises on a channel that another thread has thrown away.
            self._throw_away(client)
            raise _ConnectionLost(f"etcd at {server}: {_text(error)}") from error
        except etcd3.exceptions.ConnectionTimeoutError as error:
            self._throw_away(client)
            raise RegistryUnavailable(f"etcd at {server}: {_text(error)}") from error
        except (etcd3.Etcd3Exception, grpc.RpcError) as error:
            if _knows_us_no_more(error):  # Its tokens end; a password may have changed.
                self._throw_away(client)
                raise _ConnectionLost(f"etcd at {server} refuses: {_text(error)}") from error
            raise RegistryUnavailable(f"etcd at {server} refuses: {_text(error)}") from error
        except KvbmError as error:
            raise RegistryUnavailable(f"etcd at {server}: {error}") from error

    def _connected(self) -> tuple[Any, str]:
        with self._lock:
            if self._closed:
                raise RegistryUnavailable("the connection to etcd is closed")
            server = self._servers[self._next % len(self._servers)]
            if self._client is None:
                self._client = self._made(server)
            return self._client, server

    def _made(self, server: str) -> Any:
        """Return a connection, with what the files of the access say now; raises KvbmError."""
        host, _, port = server.rpartition(":")
        tls, password = self._access.tls, self._access.password
        if tls:
            tls.context()  # Says more of a bad file than grpc does.
        client = etcd3.client(
            host,
            int(port),
            timeout=self._deadline_s,
            grpc_options=OPTIONS,
            ca_cert=_text_of(tls.ca),
            cert_cert=_text_of(tls.certificate),
            cert_key=_text_of(tls.key),
            user=self._access.user or None,
            password=password.text() if password is not None else None,
        )
        # The token is in the metadata of each call; grpc sends none of these without TLS.
        client.call_credentials = None
        return client

    def _throw_away(self, client: Any) -> None:
        with self._lock:
            if self._client is client:
                self._client = None
                self._next += 1
        if client is not None:
            client.close()


def _knows_us_no_more(error: BaseException) -> bool:
    """Tell whether etcd has refused the token of this connection."""
    for cause in (error, error.__context__):
        if isinstance(cause, grpc.Call) and cause.code() is grpc.StatusCode.UNAUTHENTICATED:
            return True
    return False


def _text_of(path: Path | None) -> str | None:
    return str(path) if path is not None else None


def _reading(response: Any) -> EtcdReading:
    entries = tuple(
        EtcdEntry(kv.key.decode(errors="replace"), kv.value, kv.mod_revision) for kv in response.kvs
    )
    return EtcdReading(entries, response.header.revision)


def _text(error: BaseException) -> str:
    """Return what grpc says; etcd3 hides it behind an exception without text."""
    for cause in (error, error.__context__):
        with contextlib.suppress(AttributeError, TypeError):
            return f"{cause.code().name.lower()}: {cause.details()}"  # type: ignore[union-attr]
    return str(error) or type(error).__name__
