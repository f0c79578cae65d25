"""Requests whose adapter is replaced, or brought by another request: they store nothing wrong."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest
from kvbm_connectors.vllm.adapters import WAYS_OUT, Adapters
from kvbm_connectors.vllm.scheduler_side import SchedulerSide

from tests.connectors.vllm.requests import Output, Request
from tests.connectors.vllm.test_names import (
    NEW,
    Blocks,
    FakeHalf,
    Lora,
    asked,
    make_adapter,
    make_side,
)

NUMBERS = count()


def begin(side: SchedulerSide, lora: Lora) -> Request:
    """Compute both blocks of a request."""
    request = Request("running", lora_request=lora)
    side.matched(request, 0)
    side.allocated(request, Blocks(), 0)
    side.plan(Output({"running": 9}))
    request.begin(9)
    request.end(9)
    return request


def is_refused(side: SchedulerSide, half: FakeHalf, lora: Lora) -> bool:
    """Tell whether a new request with an adapter is looked up under no name."""
    before = len(half.asked)
    side.matched(Request(f"new {next(NUMBERS)}", lora_request=lora), 0)
    return len(half.asked) == before


@pytest.mark.parametrize("other", [False, True], ids=["same", "other"])
def test_a_load_that_fails_may_have_replaced_the_adapter(tmp_path: Path, other: bool) -> None:
    """Goal: vLLM has taken the old adapter away when a load in place fails half-way.

    1. A request with an adapter has begun. Another load under its number fails.
    2. It stores nothing. Requests with the number are refused, after a reset, too.
    3. The adapters have a name under further numbers after a reset.
    """
    one, two = make_adapter(tmp_path / "a"), make_adapter(tmp_path / "b", b"2")
    side, half = make_side()
    running = begin(side, Lora(one))
    side.adapter_loaded(Lora(two if other else one), failed=True)
    assert not side.finished(running, ([3, 4, 5],))
    assert not half.offers
    assert is_refused(side, half, Lora(one, 1))
    assert is_refused(side, half, Lora(one, 2))
    assert is_refused(side, half, Lora(two, 3)) == other
    side.reset(NEW)
    assert not is_refused(side, half, Lora(one, 2))
    assert not is_refused(side, half, Lora(two, 3))
    assert is_refused(side, half, Lora(one, 1))


def test_a_load_that_fails_may_have_replaced_one_without_requests(tmp_path: Path) -> None:
    one, two = make_adapter(tmp_path / "a"), make_adapter(tmp_path / "b", b"2")
    side, half = make_side()
    side.adapter_loaded(Lora(one))
    side.adapter_loaded(Lora(two), failed=True)
    assert is_refused(side, half, Lora(one))


@pytest.mark.parametrize("kept", [False, True])
def test_a_first_load_that_fails_costs_its_number_the_cache_if_vllm_has_kept_it(
    tmp_path: Path, kept: bool
) -> None:
    """Goal: what a half-loaded adapter computes has no name. A path with a typing error costs
    nothing."""
    side, half = make_side()
    side.adapter_loaded(Lora("/nowhere"), failed=True, kept=kept)
    assert is_refused(side, half, Lora(make_adapter(tmp_path / "a"))) == kept


@pytest.mark.parametrize("whose", ["one", "other"])
def test_a_replaced_adapter_is_not_trusted_under_another_number(tmp_path: Path, whose: str) -> None:
    """Goal: a request does not hit device blocks of its adapter that another one's weights made.

    1. Requests with two numbers are followed. One has begun, the other waits for room.
    2. An adapter is loaded in place under the first number: either was computed under the name of
       the other.
    3. The request that waited has the name of the one or the other: it stores nothing.
    """
    one, other = make_adapter(tmp_path / "a"), make_adapter(tmp_path / "b", b"2")
    side, _ = make_side()
    begin(side, Lora(one, 1))
    waits = Request("waits", lora_request=Lora(one if whose == "one" else other, 2))
    side.matched(waits, 0)
    plain = Request("plain", lora_request=Lora(make_adapter(tmp_path / "c", b"3"), 3))
    side.matched(plain, 0)
    side.adapter_loaded(Lora(other, 1))
    for request in (waits, plain):
        side.matched(request, 4)
        side.allocated(request, Blocks(), 0)
        request.num_computed_tokens = 4
        side.plan(Output({request.request_id: 5}))
        request.begin(5)
        request.end(5)
    assert not side.finished(waits, ([3, 4, 5],))
    assert side.finished(plain, ([3, 4, 5],)), "a third adapter is none of the two"


@pytest.mark.parametrize("used", [False, True], ids=["loaded", "used"])
def test_an_adapter_from_memory_replaces_the_one_of_its_name(tmp_path: Path, used: bool) -> None:
    """Goal: weights that are loaded from memory are not those of the path that they come with."""
    path = make_adapter(tmp_path / "a")
    side, half = make_side()
    side.adapter_loaded(Lora(path))
    if used:
        running = begin(side, Lora(path))
    side.adapter_loaded(Lora(path, lora_tensors={"x": 1}))
    if used:
        assert not side.finished(running, ([3, 4, 5],))
    assert is_refused(side, half, Lora(path))


def test_an_adapter_that_was_in_memory_first_is_refused_from_files(tmp_path: Path) -> None:
    """vLLM keeps what it has under a number, be it loaded alone or by a request."""
    path = make_adapter(tmp_path / "a")
    side, half = make_side()
    side.adapter_loaded(Lora(path, 1, lora_tensors={"x": 1}))
    assert is_refused(side, half, Lora(path, 1))
    for _ in range(2):
        assert is_refused(side, half, Lora(path, 2, lora_tensors={"x": 1}))
    assert side.counts["requests_refused.lora_in_memory"] == 2
    assert is_refused(side, half, Lora(path, 2))


def test_a_request_whose_adapter_is_read_in_each_step_stores_nothing(tmp_path: Path) -> None:
    """Goal: no block is stored by the name of files that vLLM read again in a later step.

    1. A request with an adapter has begun. vLLM loads it again, unchanged: nothing is replaced.
    2. A request of vLLM's server has `load_inplace`. It is refused, and its adapter with it.
    3. After a reset the adapter has a name under another number, without `load_inplace`.
    """
    path = make_adapter(tmp_path / "a")
    side, half = make_side()
    running = begin(side, Lora(path))
    in_place = Lora(path, load_inplace=True)
    side.adapter_loaded(in_place)
    assert not is_refused(side, half, Lora(path))
    for _ in range(2):
        assert is_refused(side, half, in_place)
    assert side.counts["requests_refused.lora_in_place"] == 2
    assert not side.finished(running, ([3, 4, 5],))
    assert is_refused(side, half, Lora(path, 2))
    side.reset(NEW)
    assert not is_refused(side, half, Lora(path, 2))
    assert is_refused(side, half, Lora(path))


def test_a_request_without_names_still_brings_its_adapter(tmp_path: Path) -> None:
    """Goal: a number stands for the adapter that vLLM loaded first, whatever the request.

    1. A request with embeddings brings an adapter. Another one under its number is refused.
    2. So it is where the order is the other: the first one's request stores nothing more.
    """
    one, two = make_adapter(tmp_path / "a"), make_adapter(tmp_path / "b", b"2")
    side, half = make_side()
    embeds = Request("embeds", lora_request=Lora(two), prompt_embeds=object())
    side.matched(embeds, 0)
    assert side.counts["requests_refused.prompt_embeds"] == 1
    assert is_refused(side, half, Lora(one))
    side, half = make_side()
    running = begin(side, Lora(one))
    side.matched(embeds, 0)
    assert not side.finished(running, ([3, 4, 5],))
    assert asked(side, half)


def test_requests_are_looked_through_once_for_a_replaced_adapter(tmp_path: Path) -> None:
    """Goal: a request with an adapter that is refused already costs no look at all others.

    After a reset its adapter has a name again, so that there are others to refuse.
    """
    one, two = make_adapter(tmp_path / "a"), make_adapter(tmp_path / "b", b"2")
    adapters = Adapters()
    adapters.value_of(Lora(one))
    adapters.value_of(Lora(two, 2))
    (tmp_path / "b" / "adapter_model.safetensors").write_bytes(b"3")
    for _ in range(2):
        for lora in (Lora(one, lora_tensors={"x": 1}), Lora(two, 2)):
            assert adapters.note_load(lora)
            assert not adapters.note_load(lora)
        adapters.forget()
        adapters.value_of(Lora(one, 3))
        adapters.value_of(Lora(two, 2))
        (tmp_path / "b" / "adapter_model.safetensors").write_bytes(b"4")


def test_adapters_are_refused_when_their_loads_cannot_be_followed(tmp_path: Path) -> None:
    """Requests with adapters store nothing more, those without do."""
    path = make_adapter(tmp_path / "a")
    side, half = make_side()
    running = begin(side, Lora(path))
    side.adapters_lost()
    assert side.counts["requests_refused.lora_unknown"] == 1
    assert not side.finished(running, ([3, 4, 5],))
    side.reset(NEW)
    assert is_refused(side, half, Lora(path, 2))
    assert side.counts["requests_refused.lora_unknown"] == 2
    assert asked(side, half)


def test_each_reason_is_in_the_document() -> None:
    """Operators look a reason up that a counter names."""
    document = (Path(__file__).parents[3] / "docs" / "vllm.md").read_text()
    assert not [code for code in WAYS_OUT if f"`{code}`" not in document]
