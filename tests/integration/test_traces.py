"""Traces of onboards, as a real collector's door sees them: OTLP over HTTP, decoded as protobuf."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from kvbm_common.config.settings import Settings
from kvbm_common.service.tracing import tracer_of, wanted
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.integration.running import Running, running
from tests.integration.test_explain import ask, reasons
from tests.integration.test_operators import Operator
from tests.waiting import ask_until

DEADLINE_S = 20


class Collector(ThreadingHTTPServer):
    """Takes spans, each with the name of the service that it is of."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Door)
        self.news = threading.Condition()
        self.spans: list[tuple[str, Span]] = []
        self.paths: set[str] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def take(self, payload: bytes) -> None:
        """A request of an exporter."""
        request = ExportTraceServiceRequest.FromString(payload)
        with self.news:
            for group in request.resource_spans:
                names = [a.value.string_value for a in group.resource.attributes
                         if a.key == "service.name"]  # fmt: skip
                for scope in group.scope_spans:
                    self.spans += [(names[0], span) for span in scope.spans]
            self.news.notify_all()

    def trace_of(self, request: str) -> dict[str, tuple[str, Span]]:
        """All spans of the trace of a request, by name, when its onboard has ended."""

        def onboard() -> Span | None:
            for _, span in self.spans:
                if span.name == "onboard" and attributes(span)["kvbm.request"] == request:
                    return span
            return None

        with self.news:
            assert self.news.wait_for(onboard, DEADLINE_S), [s.name for _, s in self.spans]
            found = onboard()
            assert found is not None
            trace_id = found.trace_id
            complete = self.news.wait_for(
                lambda: (
                    {"lookup", "fill", "read"}
                    <= {s.name for _, s in self.spans if s.trace_id == trace_id}
                ),
                DEADLINE_S,
            )
            assert complete, [s.name for _, s in self.spans if s.trace_id == trace_id]
            return {s.name: (who, s) for who, s in self.spans if s.trace_id == trace_id}


class Door(BaseHTTPRequestHandler):
    """POST /v1/traces."""

    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        zipped = self.headers.get("content-encoding") == "gzip"
        self.server.paths.add(self.path)
        self.server.take(gzip.decompress(body) if zipped else body)
        answer = ExportTraceServiceResponse().SerializeToString()
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_args: object) -> None:
        """Silent."""


def attributes(span: Span) -> dict[str, str]:
    """Those that are text."""
    return {one.key: one.value.string_value for one in span.attributes}


async def written_blocks(run: Running) -> float:
    """How many blocks the disk tier has announced."""
    return (await run.view.stats("disk-tier")).figures.get("offload_blocks_h2d", 0)


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join(DEADLINE_S)


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_an_onboard_from_disk_is_one_trace(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engine, host tier, disk tier: each span is inside its parent, and says what it did."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
    values = {
        "cpu_cache_gb": 0.02, "disk_cache_gb": 0.5, "disable_disk_offload_filter": True,
        "otlp_endpoint": collector.url,
        "onboard_deadline_ms": 15_000,  # A disk under other tests' load may take seconds.
    }  # fmt: skip
    async with running(values, engines=1) as run:
        await ask(run, "stored", 1, 16)

        # Else a disk that stands still for a moment lets it leave host memory first.
        async def written() -> bool:
            return await written_blocks(run) >= 16

        await ask_until(written, deadline_s=DEADLINE_S)
        for number in range(2, 31):
            await ask(run, f"filler-{number}", number, 16)
        await ask(run, "from-disk", 1, 16)
        told = await Operator(run).reads("explain", "from-disk")
        assert reasons(told) == [(16, "hit", "disk")]
        trace = collector.trace_of("from-disk")
    assert {name: who for name, (who, _) in trace.items()} == {
        "onboard": "sim-0", "lookup": "host-tier", "fill": "host-tier", "read": "disk-tier",
    }  # fmt: skip
    onboard, lookup, fill, read = (trace[n][1] for n in ("onboard", "lookup", "fill", "read"))
    assert onboard.parent_span_id == b""
    for outer, inner in ((onboard, lookup), (lookup, fill), (fill, read)):
        assert inner.parent_span_id == outer.span_id
        assert outer.start_time_unix_nano <= inner.start_time_unix_nano
    assert read.end_time_unix_nano <= onboard.end_time_unix_nano
    assert attributes(lookup)["kvbm.engine"] == "sim-0"
    assert attributes(fill)["kvbm.tier"] == "disk"
    assert collector.paths == {"/v1/traces"}


def test_traces_are_off_unless_somebody_wants_them() -> None:
    """Our setting or the standard's; the standard's switch turns them off."""
    off, on = Settings.load({}), Settings.load({}, {"otlp_endpoint": "http://127.0.0.1:4318"})
    assert not wanted(off, {})
    assert wanted(on, {})
    assert wanted(off, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"})
    assert not wanted(on, {"OTEL_SDK_DISABLED": "true"})
    assert not tracer_of(off, "host-tier").on
