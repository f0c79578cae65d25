"""The other end of a link, on a real ZMQ ROUTER: a host tier or consolidator that does as told."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar

import zmq
from kvbm_common.access.curve import ServerKeys
from kvbm_common.wire.codec import MsgpackCodec
from kvbm_common.wire.consolidator import (
    Attached,
    FromConsolidator,
    ToConsolidator,
    from_consolidator,
    to_consolidator,
)
from kvbm_common.wire.local import FromHostTier, ToHostTier, Welcome, from_host_tier, to_host_tier

DEADLINE_S = 10.0
Heard = TypeVar("Heard")
Said = TypeVar("Said")
T = TypeVar("T")


class Endpoint(Generic[Heard, Said]):
    """Binds an endpoint; hears and says one message at a time, with a deadline."""

    def __init__(
        self,
        endpoint: str,
        hear: MsgpackCodec[Heard],
        say: MsgpackCodec[Said],
        keys: ServerKeys | None = None,
    ) -> None:
        self.endpoint = endpoint
        self._decode, self._encode = hear, say
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVTIMEO, int(DEADLINE_S * 1000))
        if keys is not None:
            self._socket.curve_server = True
            self._socket.curve_secretkey = keys.secret.encode()
            self._socket.curve_publickey = keys.public.encode()
        self._socket.bind(endpoint)
        self.peer = b""
        """Who was heard last."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._context.term()

    def hear(self, kind: type[T]) -> T:
        """The next message of one kind; others are passed over. Raises zmq.Again."""
        give_up_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < give_up_s:
            self.peer, payload = self._socket.recv_multipart()
            message = self._decode.decode(payload)
            if isinstance(message, kind):
                return message
        raise TimeoutError(f"no {kind.__name__}")

    def welcome(self, kind: type[T], message: Said, done: Callable[[], object]) -> None:
        """Answer every greeting until it has been heard: a link may have taken another socket."""
        give_up_s = time.monotonic() + DEADLINE_S
        while not done():
            if time.monotonic() > give_up_s:
                raise TimeoutError
            if self._socket.poll(10):
                self.peer, payload = self._socket.recv_multipart()
                if isinstance(self._decode.decode(payload), kind):
                    self.say(message)

    def say(self, message: Said) -> None:
        """Answer who was heard last."""
        self.send(self._encode.encode(message))

    def send(self, *frames: bytes) -> None:
        """Any frames."""
        self._socket.send_multipart([self.peer, *frames])


def host_tier(endpoint: str, keys: ServerKeys | None = None) -> Endpoint[ToHostTier, FromHostTier]:
    """A host tier's end; with keys it takes clients that know its public one."""
    return Endpoint(endpoint, to_host_tier, from_host_tier, keys)


def consolidator(endpoint: str) -> Endpoint[ToConsolidator, FromConsolidator]:
    """A consolidator's end."""
    return Endpoint(endpoint, to_consolidator, from_consolidator)


def welcome(epoch: int = 7, **changes: Any) -> Welcome:
    """A host tier's welcome."""
    fields: dict[str, Any] = {
        "host": "h", "instance": "host-tier-0", "epoch": epoch, "agent": b"agent",
        "arena_address": 4096, "arena_path": "/nowhere", "slot_bytes": 4096, "slot_count": 4,
        "beat_ms": 1000,
    }  # fmt: skip
    return Welcome(**(fields | changes))


def attached(rank: int = 0, *, offers: bool = True) -> Attached:
    """A consolidator's."""
    return Attached(engine="ada", rank=rank, epoch=1, offers=offers)
