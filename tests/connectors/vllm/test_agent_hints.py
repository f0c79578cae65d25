"""Hints with requests of vLLM: what is sent when a request arrives, and when it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvbm_common.identity import Hasher, SequenceHash
from kvbm_common.wire.session_hint import Action
from kvbm_connectors.vllm.scheduler_side import SchedulerSide

from tests.connectors.helpers import NAMESPACE
from tests.connectors.vllm.requests import Request
from tests.connectors.vllm.test_names import FakeHalf

EPHEMERAL = {"type": "ephemeral", "ttl": "5m"}
NAMES = Hasher(NAMESPACE).chain(list(range(8)))


@dataclass
class Hinting(Request):
    """A request whose sender says something to connectors."""

    kv_transfer_params: Any = None
    kv_hints: Any = None
    session_id: Any = None


@dataclass
class Half(FakeHalf):
    """A scheduler half that keeps the hints that it is given."""

    hints: list[tuple[str, str, Sequence[SequenceHash], int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def hint(
        self, session: str, action: Action, names: Sequence[SequenceHash] = (), *, ttl_ms: int = 0
    ) -> None:
        self.hints.append((session, action, list(names), ttl_ms))


def served(request: Request, *, tokens: int = 9) -> tuple[Half, SchedulerSide]:
    """A request that arrives, computes so many tokens, and ends."""
    half = Half()
    side = SchedulerSide(half, Hasher(NAMESPACE))
    side.hints.begin(request)
    side.matched(request, 0)
    request.begin(tokens)
    request.end(tokens)
    side.finished(request, [[1, 2, 3]])
    return half, side


def test_a_pin_is_of_the_computed_blocks_of_its_request() -> None:
    """Nine tokens are two full blocks of four."""
    half, _ = served(Hinting(kv_transfer_params={"session_id": "s", "cache_control": EPHEMERAL}))
    assert half.hints == [("s", "pin", NAMES, 300_000)]


def test_a_request_that_was_aborted_early_pins_what_it_computed() -> None:
    """Five tokens are one block."""
    half, _ = served(Hinting(kv_transfer_params={"cache_control": EPHEMERAL}), tokens=5)
    assert half.hints == [("r", "pin", NAMES[:1], 300_000)]


def test_a_retained_prefix_is_as_long_as_it_says() -> None:
    """Six tokens are one block; vLLM's own field has the envelope."""
    directives = [{"priority": 50, "end": 6, "duration": 60}, {"priority": 0, "start": 6}]
    action = {"action_type": "kv.retain", "payload": {"directives": directives}}
    half, _ = served(Hinting(kv_hints={"actions": [action]}, session_id="s"))
    assert half.hints == [("s", "pin", NAMES[:1], 60_000)]


def test_a_prefetch_is_sent_once_when_the_request_arrives() -> None:
    """vLLM asks for matches again and again."""
    action = {"action_type": "kv.prefetch", "payload": {"session_id": "t"}}
    request = Hinting(kv_transfer_params={"kv_hints": {"actions": [action]}})
    half = Half()
    side = SchedulerSide(half, Hasher(NAMESPACE))
    side.hints.begin(request)
    assert half.hints == [("t", "prefetch", [], 0)]
    side.matched(request, 0)
    side.matched(request, 0)
    assert len(half.hints) == 1


def test_a_bad_hint_is_counted_and_its_request_goes_on() -> None:
    """Whatever a client says."""
    half, side = served(Hinting(kv_transfer_params={"cache_control": {"type": "forever"}}))
    assert (half.hints, side.idle) == ([], True)
    assert side.counts["hints_dropped.malformed"] == 1
    half, side = served(Hinting(kv_transfer_params="cache_control"))
    assert (half.hints, side.idle) == ([], True)


def test_hints_of_a_request_without_names_are_counted() -> None:
    """What is computed from embeddings has no name."""
    half, side = served(Hinting(prompt_embeds=b"", kv_transfer_params={"cache_control": EPHEMERAL}))
    assert half.hints == []
    assert side.counts["hints_dropped.refused_request"] == 1


def test_a_request_without_hints_sends_none() -> None:
    """Its cost is a look at two fields."""
    half, side = served(Request())
    assert half.hints == []
    assert not any(key.startswith("hints") for key in side.counts)
