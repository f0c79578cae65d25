"""Traces: spans of onboards, sent to an OpenTelemetry collector over OTLP/HTTP. Off by default.

A span is exported after its work: name, context, and when it began and ended. Contexts
travel in messages as text (`trace_context`), so no core and no engine knows of OpenTelemetry. It
is the extra `otel`, and imported here alone, when an endpoint is configured. Spans
wait in a bounded queue and are sent in the background; what a dead collector does not take is
dropped.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvbm_common.config.settings import Settings
from kvbm_common.extras import needed_for
from kvbm_common.runtime import trace_context
from kvbm_common.runtime.trace_context import TraceContext

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import SpanContext

QUEUE_SPANS_MAX = 2_048
CLOSE_MS = 1_000
"""The time that the last spans may take when a service ends."""
STANDARD = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")

Attributes = Mapping[str, str | int]


class Tracer:
    """Takes spans of one process; `on` says whether an exporter takes them."""

    def __init__(self, service: str, exporter: SpanExporter | None = None) -> None:
        self.on = exporter is not None
        self._service = service
        self._resources: dict[str, Resource] = {}
        if exporter is None:
            return
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._processor = BatchSpanProcessor(exporter, max_queue_size=QUEUE_SPANS_MAX)

    def parse(self, text: str) -> TraceContext | None:
        """Return the span that a message belongs to; None: it is not traced, or tracing is off."""
        return trace_context.parse(text) if self.on and text else None

    def ended(
        self,
        name: str,
        context: TraceContext,
        *,
        parent: TraceContext | None,
        start_ns: int,
        attributes: Attributes,
        service: str = "",
        end_ns: int = 0,
    ) -> None:
        """End a span, now unless `end_ns` says when; `service` names the process that did the
        work, where it is another one."""
        if not self.on:
            return  # It was closed meanwhile.
        from opentelemetry.sdk.trace import ReadableSpan

        span = ReadableSpan(
            name,
            context=_span_context(context),
            parent=_span_context(parent) if parent is not None else None,
            resource=self._resource(service or self._service),
            attributes=attributes,
            start_time=start_ns,
            end_time=max(start_ns, end_ns or time.time_ns()),
        )
        self._processor.on_end(span)

    def _resource(self, service: str) -> Resource:
        from opentelemetry.sdk.resources import Resource

        if service not in self._resources:
            self._resources[service] = Resource.create({"service.name": service})
        return self._resources[service]

    def close(self) -> None:
        """Send what is left, for a moment."""
        if self.on:
            self.on = False
            self._processor.force_flush(CLOSE_MS)
            self._processor.shutdown()  # type: ignore[no-untyped-call]


def tracer_of(settings: Settings, service: str) -> Tracer:
    """Return a tracer that does what the settings say; raises ExtraMissing."""
    if not wanted(settings, os.environ):
        return Tracer(service)
    with needed_for("KVBM_OTLP_ENDPOINT", "otel"):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    endpoint = settings.otlp_endpoint.rstrip("/")
    # Without an endpoint of ours the exporter reads the standard's own variables.
    return Tracer(service, OTLPSpanExporter(endpoint=f"{endpoint}/v1/traces" if endpoint else None))


def wanted(settings: Settings, environ: Mapping[str, str]) -> bool:
    """Return whether the settings or the standard's variables ask for traces."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    return bool(settings.otlp_endpoint) or any(environ.get(name) for name in STANDARD)


def _span_context(context: TraceContext) -> SpanContext:
    from opentelemetry.trace import SpanContext, TraceFlags

    return SpanContext(
        trace_id=int(context.trace_id, 16),
        span_id=int(context.span_id, 16),
        is_remote=False,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
    )
