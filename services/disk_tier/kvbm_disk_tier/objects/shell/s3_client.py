"""The client of S3, and the only import of boto3: one that can be interrupted.

botocore has a deadline for each piece that comes, and none for an answer: one that drips, a byte
now and then, would hold its thread for as long as it likes. So each thread's connection is known
here, and is shut down from outside when the time of a call is over.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import socket
import threading
from dataclasses import dataclass
from typing import Any

from kvbm_disk_tier.objects.shell.listing_xml import EVENT, before_parse

CONNECT_S = 2.0
READ_S = 5.0
"""The seconds that one piece of an answer may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketOptions:
    """The address of the bucket, from the configuration."""

    bucket: str
    endpoint: str = ""
    """Empty: AWS."""
    region: str = "us-east-1"
    access_key: str = ""
    """Empty: whatever AWS' own chain of credentials finds."""
    secret_key: str = ""
    path_style: bool = True

    def __repr__(self) -> str:
        """Represent the bucket without its keys: the text is logged."""
        return f"{self.bucket} at {self.endpoint or 'AWS'} ({self.region})"

    def for_nixl(self, *, threads: int) -> dict[str, str]:
        """Return the parameters of NIXL's OBJ back end.

        Checksums of the transport are left out: ours is compared after every read, and stores that
        are not AWS differ in them.
        """
        given = {
            "bucket": self.bucket,
            "region": self.region,
            "endpoint_override": self.endpoint,
            "scheme": "http" if self.endpoint.startswith("http://") else "https",
            "access_key": self.access_key,
            "secret_key": self.secret_key,
            "use_virtual_addressing": "false" if self.path_style else "true",
            "num_threads": str(threads),
            "req_checksum": "required",
            "resp_checksum": "required",
        }
        return {name: value for name, value in given.items() if value}


class Redirected(OSError):
    """A store that sends us elsewhere, and does not say where to."""


class Connections:
    """The connection that each thread waits on."""

    def __init__(self) -> None:
        self._of_thread: dict[int, Any] = {}
        self._late: set[int] = set()
        """Threads whose time is over: they begin nothing more."""

    def use(self, connection: Any) -> None:
        """Note what the calling thread is about to wait on; raises OSError if it is late."""
        thread = threading.get_ident()
        self._of_thread[thread] = connection
        if thread in self._late:
            raise ConnectionAbortedError("the time of this call is over")

    def forget(self) -> None:
        """Forget the calling thread: its call has ended."""
        self._of_thread.pop(threading.get_ident(), None)
        self._late.discard(threading.get_ident())

    def interrupt(self, thread: int) -> None:
        """End whatever a thread is waiting for, or will be."""
        self._late.add(thread)
        held = getattr(self._of_thread.get(thread), "sock", None)
        if isinstance(held, socket.socket):
            with contextlib.suppress(OSError):
                socket.socket.shutdown(held, socket.SHUT_RDWR)


def make_client(options: BucketOptions, connections: Connections) -> Any:
    """Return a client whose calls can be interrupted, without a request."""
    from botocore.config import Config

    client = _session(kept=bool(options.access_key)).client(
        "s3",
        endpoint_url=options.endpoint or None,
        region_name=options.region,
        aws_access_key_id=options.access_key or None,
        aws_secret_access_key=options.secret_key or None,
        config=Config(
            connect_timeout=CONNECT_S,
            read_timeout=READ_S,
            retries={"total_max_attempts": 1},
            s3={"addressing_style": "path" if options.path_style else "virtual"},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        ),
    )
    client.meta.events.register(EVENT, before_parse)
    client.meta.events.register("before-call.s3.DeleteObjects", _add_md5)
    client.meta.events.register("before-call.s3.HeadBucket", _refuse_redirection)
    # What is below a proxy of the environment has a manager of its own, and stays as it is.
    manager = client._endpoint.http_session._manager
    manager.pool_classes_by_scheme = {
        scheme: _watched_pool(pool, connections)
        for scheme, pool in manager.pool_classes_by_scheme.items()
    }
    return client


def _add_md5(*, params: dict[str, Any], **_: object) -> None:
    """Sum up the body as S3 first wanted it: stores that are not AWS (Swift) insist."""
    body = params["body"]
    data = body.encode() if isinstance(body, str) else bytes(body)
    digest = hashlib.md5(data, usedforsecurity=False).digest()
    params["headers"]["Content-MD5"] = base64.b64encode(digest).decode()


def _refuse_redirection(**_: object) -> None:
    """End a call that was redirected without a region.

    botocore asks for the region with a head of the bucket. A store that redirects that as well is
    asked again by its answer, some hundred times.
    """
    raise Redirected("the store redirects, and names no region")


def _watched_pool(pool: Any, connections: Connections) -> Any:
    class Watched(pool.ConnectionCls):  # type: ignore[misc]
        """A connection that is noted whenever a thread uses it."""

        def connect(self) -> Any:
            result = super().connect()
            connections.use(self)  # Only now there is something to shut down.
            return result

        def request(self, *arguments: Any, **named: Any) -> Any:
            connections.use(self)
            return super().request(*arguments, **named)

    return type("WatchedPool", (pool,), {"ConnectionCls": Watched})


def _session(*, kept: bool) -> Any:
    """Return a boto3 session: a new one finds the credentials of AWS' own chain again."""
    return _kept_session() if kept else _new_session()


def _new_session() -> Any:
    import boto3

    return boto3.session.Session()


@functools.cache
def _kept_session() -> Any:
    """Return the session of this process: one reads megabytes of descriptions."""
    return _new_session()
