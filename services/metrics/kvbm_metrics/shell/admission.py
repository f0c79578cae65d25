"""Admission to the HTTP API: a limit on bodies, and a count of every request."""

from __future__ import annotations

import time
from http import HTTPStatus

from kvbm_common.runtime.metrics import Metrics
from kvbm_common.wire.codec import MESSAGE_BYTES_MAX
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

BODY_BYTES_MAX = MESSAGE_BYTES_MAX
"""The bytes of a request at most: a larger one does not fit into one message on NATS."""


class Door:
    """The ASGI middleware that admits requests."""

    def __init__(self, app: ASGIApp, *, counters: Metrics) -> None:
        self._app = app
        self._requests = counters.counter(
            "kvbm_http_requests", "Requests to the HTTP API.", labels=("route", "status")
        )
        self._seconds = counters.histogram(
            "kvbm_http_seconds", "Time to answer a request.", labels=("route",)
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, see its answer off."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun_s = time.monotonic()
        status = 500  # Until it says otherwise: the answer to an exception is made outside.

        async def counting_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, _limited(receive), counting_send)
        finally:
            # Only routes that exist become labels; anything else would have no bound.
            route = getattr(scope.get("route"), "path", "other")
            self._requests.labels(route=route, status=str(status)).inc()
            self._seconds.labels(route=route).observe(time.monotonic() - begun_s)


def _limited(receive: Receive) -> Receive:
    received_bytes = 0

    async def limited_receive() -> Message:
        nonlocal received_bytes
        message = await receive()
        received_bytes += len(message.get("body", b""))
        if received_bytes > BODY_BYTES_MAX:
            text = f"the body has more than {BODY_BYTES_MAX} bytes"
            raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, text)
        return message

    return limited_receive
