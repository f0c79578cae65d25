"""Serving verbs: many requests at the same time, and every failure a typed answer."""

from __future__ import annotations

import asyncio
import logging
import warnings
from collections.abc import Awaitable, Callable, Mapping
from importlib.metadata import version
from typing import Any, Protocol

import msgspec
import nats.errors
from nats import micro
from nats.aio.client import Client
from nats.micro.service import EndpointConfig, Service, ServiceConfig

from kvbm_common.errors import BusUnavailable, KvbmError, MessageTooLarge, NotReady
from kvbm_common.nats.direct_client import reply_of
from kvbm_common.runtime.logs import OncePerKind
from kvbm_common.runtime.metrics import Metrics
from kvbm_common.wire.verbs import ErrorBody, ErrorReply, verb_subject

CONCURRENT_MAX = 256
"""Requests of one subject that are served at the same time; more are answered `busy`."""

INBOXES = ("_INBOX.", "_R_.")
"""The first tokens of answers' subjects; the second are of requests from other accounts."""

VerbHandler = Callable[[bytes], Awaitable[bytes]]
"""Takes the payload of a request and gives that of the reply; a KvbmError becomes the reply."""

_logger = logging.getLogger(__name__)


class Request(Protocol):
    """A request that waits for its answer."""

    @property
    def payload(self) -> bytes:
        """Return the bytes of the request."""

    async def respond(self, payload: bytes) -> None:
        """Answer; raises BusUnavailable, MessageTooLarge."""

    async def respond_error(self, payload: bytes, *, code: str, message: str) -> None:
        """Answer with an error; raises BusUnavailable."""


class Busy(KvbmError):
    """Too many requests are being served."""

    code = "busy"


class NoInbox(KvbmError):
    """A request whose answer would go to another place than an inbox.

    JetStream sends what it has stored, and answers of its API, to any subject that a client names,
    a verb's as well, and so would a verb's own answer: to take such a message for a request would
    give each client that may call the API the rights of all.
    """

    code = "no_inbox"


class Internal(KvbmError):
    """The handler made a mistake; the log has it in full."""

    code = "internal"


class VerbServer:
    """Runs the handlers of one process."""

    def __init__(self, client: Client, counters: Metrics, *, guarded: bool = False) -> None:
        """Serve on a client; a guarded one serves only what asks for an answer in an inbox."""
        self._client = client
        self._guarded = guarded
        self._services: dict[tuple[str, str], Service] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._log = OncePerKind(_logger)
        self._failed = counters.counter(
            "kvbm_bus_handler_errors_total", "Messages that ended in an error.", labels=("code",)
        )

    async def add_verbs(
        self,
        kind: str,
        instance: str,
        host: str,
        verbs: Mapping[str, VerbHandler],
        *,
        shared: bool,
    ) -> None:
        """Serve verbs on the subjects of one instance; with `shared`, also on those of its kind."""
        service = await self._service(kind, instance)
        for verb, handler in verbs.items():
            subjects = {verb_subject(kind, verb, host=host, instance=instance): instance}
            if shared:
                subjects[verb_subject(kind, verb)] = kind
            for subject, queue in subjects.items():
                take = self._adapted(self.endpoint(subject, handler))
                await service.add_endpoint(
                    EndpointConfig(name=verb, subject=subject, handler=take, queue_group=queue)
                )

    def endpoint(self, subject: str, handler: VerbHandler) -> Callable[[Request], Awaitable[None]]:
        """Return the function that takes the requests of one subject: it starts a task for each."""
        serving: set[asyncio.Task[None]] = set()

        async def take(request: Request) -> None:
            if len(serving) >= CONCURRENT_MAX:
                await self._refuse(subject, request, Busy(f"{len(serving)} requests are served"))
                return
            task = asyncio.create_task(self._serve(subject, handler, request), name=subject)
            for tasks in (serving, self._tasks):
                tasks.add(task)
                task.add_done_callback(tasks.discard)

        return take

    async def close(self) -> None:
        """Cancel what is being served; the requesters meet their deadlines."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def count_failure(self, subject: str, error: Exception) -> None:
        """Count a failure; log it once per kind, or in full if it is our mistake."""
        if isinstance(error, KvbmError):
            self._failed.labels(code=error.label).inc()
            log = self._log.info if isinstance(error, NotReady) else self._log.warning
            log(error.label, f"{subject}: {error}")
        else:
            self._failed.labels(code=Internal.code).inc()
            _logger.error("%s: the handler failed", subject, exc_info=error)

    async def _serve(self, subject: str, handler: VerbHandler, request: Request) -> None:
        try:
            await request.respond(await handler(request.payload))
        except Exception as error:
            await self._refuse(subject, request, error)

    async def _refuse(self, subject: str, request: Request, error: Exception) -> None:
        self.count_failure(subject, error)
        if not isinstance(error, KvbmError):
            error = Internal(type(error).__name__)
        body = ErrorBody(code=error.code, message=error.text, field=error.field)
        payload = msgspec.json.encode(ErrorReply(error=body))
        try:
            await request.respond_error(payload, code=error.code, message=error.text)
        except (BusUnavailable, MessageTooLarge) as gone:
            # The requester meets its own deadline.
            self.count_failure(subject, gone)

    def _adapted(
        self, endpoint: Callable[[Request], Awaitable[None]]
    ) -> Callable[[Any], Awaitable[None]]:
        async def take(request: Any) -> None:
            incoming = _Incoming(request)
            if self._guarded and not incoming.reply.startswith(INBOXES):
                self.count_failure(request.subject, NoInbox(f"an answer on {incoming.reply!r}"))
            else:
                await endpoint(incoming)

        return take

    async def _service(self, kind: str, instance: str) -> Service:
        """Return the micro service of this process, one per kind and instance."""
        if (kind, instance) not in self._services:
            config = ServiceConfig(name=f"kvbm-{kind}", version=version("kvbm-common"))
            # The library still asks for datetime.utcnow(), which newer Pythons warn about.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                self._services[kind, instance] = await micro.add_service(self._client, config)
        return self._services[kind, instance]


class _Incoming:
    """A request of the library as the verb server wants it."""

    def __init__(self, request: Any) -> None:
        self._request = request
        self.payload: bytes = request.data
        self.reply = reply_of(request)

    async def respond(self, payload: bytes) -> None:
        """Answer; raises BusUnavailable, MessageTooLarge."""
        await self._send(self._request.respond(payload))

    async def respond_error(self, payload: bytes, *, code: str, message: str) -> None:
        """Answer with an error; raises BusUnavailable. A header cannot hold line breaks."""
        line = " ".join(message.split())
        await self._send(self._request.respond_error(code, line, data=payload))

    async def _send(self, sending: Awaitable[None]) -> None:
        try:
            await sending
        except nats.errors.MaxPayloadError as error:
            raise MessageTooLarge("the reply is larger than the server takes") from error
        except (nats.errors.Error, ValueError) as error:
            raise BusUnavailable(f"cannot reply: {error}") from error
