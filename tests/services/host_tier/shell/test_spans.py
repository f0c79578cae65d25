"""The spans of an onboard: who is whose parent, what they say; and nothing when they are off."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from kvbm_common.runtime.trace_context import new_trace, parse
from kvbm_common.service.tracing import Tracer
from kvbm_common.wire.local import Found, Lookup, MissedLookup, Misses, Release
from kvbm_common.wire.verbs import LeaseRequest
from kvbm_host_tier.core.messages import Input, Tick
from kvbm_host_tier.core.peer_messages import PeerId, PullFromPeer
from kvbm_host_tier.shell import spans as module
from kvbm_host_tier.shell.spans import OnboardSpans
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.services.host_tier.helpers import NAMESPACE, incarnation, name

CONNECTION = b"ada"


class Traced:
    """Spans, and what has come of them."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.tracer = Tracer("host-tier", self._exporter)
        self.spans = OnboardSpans(self.tracer)

    def ended(self) -> dict[str, ReadableSpan]:
        """By name; each name once."""
        self.tracer.close()
        found = self._exporter.get_finished_spans()
        assert len({span.name for span in found}) == len(found)
        return {span.name: span for span in found}


@pytest.fixture
def traced() -> Iterator[Traced]:
    made = Traced()
    yield made
    made.tracer.close()


def lookup(number: int = 1, **fields: Any) -> Lookup:
    """A traced question for one block."""
    given: dict[str, Any] = {"trace": str(new_trace()), "request": "r-1", "sent_us": 1_000_000}
    return Lookup(
        engine="ada", incarnation=incarnation(1), lookup=number, namespace=NAMESPACE.digest,
        hashes=name(1), lease_ms=100, deadline_ms=100, **(given | fields),
    )  # fmt: skip


def found(lease: int, number: int = 1) -> Found:
    """An answer."""
    return Found(
        lookup=number, epoch=1, lease=lease, slots=[1] if lease else [],
        checksums=[1] if lease else [], block_bytes=64, reason="" if lease else "not_stored",
    )  # fmt: skip


def parents(ended: dict[str, ReadableSpan], inner: str, outer: str) -> bool:
    """Is one the other's child?"""
    parent, context = ended[inner].parent, ended[outer].get_span_context()
    assert parent is not None
    assert context is not None
    return (parent.trace_id, parent.span_id) == (context.trace_id, context.span_id)


def test_from_the_question_to_the_release(traced: Traced) -> None:
    """What the core passes on is the lookup's own context; the engine's span ends last."""
    asked = lookup()
    heard = traced.spans.heard(CONNECTION, asked)
    assert isinstance(heard, Lookup)
    inner, outer = parse(heard.trace), parse(asked.trace)
    assert inner is not None
    assert outer is not None
    assert inner.trace_id == outer.trace_id
    assert inner.span_id != outer.span_id
    assert heard == msgspec.structs.replace(asked, trace=heard.trace)
    traced.spans.said(CONNECTION, found(5))
    release = Release(engine="ada", incarnation=incarnation(1), lease=5, corrupt=[0])
    assert traced.spans.heard(CONNECTION, release) is release
    ended = traced.ended()
    assert parents(ended, "lookup", "onboard")
    assert ended["onboard"].start_time == 1_000_000_000
    assert (ended["onboard"].attributes or {})["kvbm.corrupt_blocks"] == 1
    assert (ended["lookup"].attributes or {})["kvbm.blocks_found"] == 1
    assert ended["onboard"].resource.attributes["service.name"] == "ada"
    assert ended["lookup"].resource.attributes["service.name"] == "host-tier"


def test_a_miss_ends_with_its_answer_and_names_its_reason(traced: Traced) -> None:
    """The engine's own span, where it has one, is the parent of all."""
    own = new_trace()
    traced.spans.heard(CONNECTION, lookup(trace=str(own.child()), parent=str(own)))
    traced.spans.said(CONNECTION, found(0))
    ended = traced.ended()
    assert (ended["lookup"].attributes or {})["kvbm.reason"] == "not_stored"
    parent = ended["onboard"].parent
    assert parent is not None
    assert f"{parent.span_id:016x}" == own.span_id


async def test_another_host_is_part_of_the_trace(traced: Traced) -> None:
    """The pull passes its own context on; the other host's lease is below it."""
    context = new_trace()
    passed: list[str] = []

    async def pull(effect: PullFromPeer) -> Input:
        passed.append(effect.trace)
        return Tick()

    async def leased() -> bytes:
        return b"leased"

    effect = PullFromPeer(1, PeerId("b", "0"), (name(1),), (1,), 64, 100, str(context))
    assert await traced.spans.pull(effect, pull) == Tick()
    [inner] = passed
    request = LeaseRequest(owner="a", epoch=1, hashes=[name(1).hex()], lease_ms=1, trace=inner)
    assert await traced.spans.lease(request, leased()) == b"leased"
    ended = traced.ended()
    assert parents(ended, "peer_lease", "peer_pull")
    assert (ended["peer_pull"].attributes or {})["kvbm.peer"] == str(PeerId("b", "0"))


def test_onboards_that_never_end_have_a_limit(
    traced: Traced, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "OPEN_MAX", 1)
    for number in (1, 2):
        traced.spans.heard(CONNECTION, lookup(number))
    for number in (1, 2):
        traced.spans.said(CONNECTION, found(0, number))
    assert traced.ended().keys() == {"lookup", "onboard"}


def test_off_is_off() -> None:
    """Messages pass unchanged, and so do contexts of somebody who traces."""
    spans = OnboardSpans(Tracer("host-tier"))
    asked = lookup()
    assert spans.heard(CONNECTION, asked) is asked
    spans.said(CONNECTION, found(0))


def test_a_miss_that_the_engine_has_answered_has_spans_without_length(traced: Traced) -> None:
    outer = new_trace()
    missed = MissedLookup(
        lookup=1, hashes=name(1), request="r-1", trace=str(new_trace()), sent_us=1_000_000,
        parent=str(outer),
    )  # fmt: skip
    untraced = MissedLookup(lookup=2, hashes=name(2))
    misses = Misses(
        engine="ada", incarnation=incarnation(1), namespace=NAMESPACE.digest,
        lookups=[missed, untraced],
    )  # fmt: skip
    assert traced.spans.heard(CONNECTION, misses) is misses
    ended = traced.ended()
    assert set(ended) == {"onboard", "lookup"}
    assert parents(ended, "lookup", "onboard")
    for span in ended.values():
        assert span.start_time == span.end_time == 1_000_000_000
    attributes = ended["lookup"].attributes
    assert attributes is not None
    assert (attributes["kvbm.blocks_asked"], attributes["kvbm.reason"]) == (1, "not_stored")
