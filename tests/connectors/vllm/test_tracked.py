"""Which blocks of a request are computed: only those that a finished step has written.

A block has four tokens. vLLM schedules a step (`plan` sees the request before its tokens are
counted), counts the tokens as in flight, and takes them out again when the step has ended.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from kvbm_common.identity import Hasher, Namespace
from kvbm_connectors.vllm.kv_groups import KvGroup
from kvbm_connectors.vllm.tracked import (
    DECODED_BLOCKS,
    Tracked,
    refusal_of_request,
    runs_to_offer,
)
from msgspec.structs import replace

from tests.connectors.vllm.requests import Request

BLOCK = 4


def admitted(request: Request, tokens: int) -> Tracked:
    """A request that is admitted with so many tokens from a cache."""
    tracked = Tracked(request, "")
    tracked.readmitted()
    request.num_computed_tokens = tokens
    return tracked


def test_a_hit_of_the_same_step_counts_when_that_step_has_ended() -> None:
    """Goal: vLLM caches a block when it is scheduled, so a hit may not be written yet.

    1. Another request computes two blocks in the very step that admits this one with a hit on
       them: nothing is computed.
    2. The step has ended: both blocks are.
    """
    request = Request()
    tracked = admitted(request, 8)
    tracked.scheduled()
    assert tracked.computed() // BLOCK == 0
    request.begin(1)
    assert tracked.computed() // BLOCK == 0
    request.end(1)
    assert tracked.computed() // BLOCK == 2


def test_a_hit_with_a_partial_tail_waits_for_the_step_too() -> None:
    request = Request(all_token_ids=tuple(range(12)))
    tracked = admitted(request, 10)
    tracked.scheduled()
    assert tracked.computed() // BLOCK == 0


def test_steps_that_overlap_end_one_after_the_other() -> None:
    """Goal: with asynchronous scheduling the second step is scheduled while the first one runs."""
    request = Request(all_token_ids=tuple(range(13)))
    tracked = admitted(request, 0)
    tracked.scheduled()
    request.begin(8)
    tracked.scheduled()
    request.begin(5)
    assert tracked.computed() // BLOCK == 0
    request.end(8)
    assert tracked.computed() // BLOCK == 2
    request.end(5)
    assert tracked.computed() // BLOCK == 3


def test_a_request_that_never_ran_has_computed_nothing() -> None:
    """Goal: blocks that another connector was to load into count only after a step of our own.

    The request is aborted while a remote prefill is still on its way into its blocks.
    """
    tracked = admitted(Request(), 8)
    assert tracked.computed() // BLOCK == 0


def test_rejected_speculative_tokens_are_not_computed() -> None:
    request = Request(all_token_ids=tuple(range(8)))
    tracked = admitted(request, 0)
    tracked.scheduled()
    request.begin(6)
    request.end(6)
    tracked.scheduled()
    request.begin(4)
    request.all_token_ids = tuple(range(10))
    assert tracked.computed() // BLOCK == 1
    request.end(4, rejected=3)
    assert tracked.computed() // BLOCK == 1


def test_a_preempted_request_begins_again() -> None:
    """Goal: after preemption the step of the former admission proves nothing.

    1. One step has ended, a second one is in flight when the request is preempted.
    2. It is admitted again with a hit, and its next step is scheduled: nothing is computed until
       that step has ended, although the stale one has.
    """
    request = Request(all_token_ids=tuple(range(13)))
    tracked = admitted(request, 0)
    tracked.scheduled()
    request.begin(8)
    request.end(8)
    tracked.scheduled()
    request.begin(4)
    tracked.readmitted()
    assert tracked.computed() // BLOCK == 0
    request.num_computed_tokens = 8
    tracked.scheduled()
    request.begin(5)
    request.end(4)
    assert tracked.computed() // BLOCK == 0
    request.end(5)
    assert tracked.computed() // BLOCK == 3


def test_blocks_that_no_step_was_sent_out_for_are_unwritten() -> None:
    """Goal: vLLM may hash blocks for a request and preempt it in the same call.

    1. A step for five tokens is sent out; a draft token of a second step may be rejected.
    2. The blocks after are unwritten; admitted again, all are until a step is sent out.
    """
    request = Request(all_token_ids=tuple(range(13)))
    tracked = admitted(request, 0)
    tracked.scheduled(5)
    assert tracked.written // BLOCK == 1
    request.begin(5)
    request.end(5)
    tracked.scheduled(4, 1)
    assert tracked.written // BLOCK == 2
    tracked.readmitted()
    assert tracked.written // BLOCK == 0


def test_of_the_steps_that_a_request_takes_few_look_at_it() -> None:
    """1. Two of four tokens: a third step is behind the two that fill the block. 2. A step fills
    it: the next one offers it, or, of an engine that plans ahead, the second next. 3. It is
    offered, and more of the prompt follows: the same for the next block. 4. All is computed: from
    now on so many blocks are offered together."""
    request = Request()
    tracked = Tracked(request, "")
    tracked.scheduled(2)
    assert tracked.steps_to_next_look(4) == 3
    tracked.scheduled(4)
    assert tracked.steps_to_next_look(4) == 1
    request.num_in_flight_tokens = 1
    assert tracked.steps_to_next_look(4) == 2
    tracked.offered = 4
    assert tracked.steps_to_next_look(4) == 4 + 2
    tracked.scheduled(9)
    tracked.offered = 8
    assert tracked.steps_to_next_look(4) == 4 * DECODED_BLOCKS - 1 + 2


def computed_nine() -> Tracked:
    """A request with a prompt of nine, whose step has ended and brought a token."""
    request = Request()
    tracked = admitted(request, 0)
    tracked.scheduled(9)
    request.begin(9)
    request.end(9)
    request.all_token_ids = tuple(range(10))
    return tracked


def test_a_decoded_block_whose_step_has_not_ended_waits_for_others() -> None:
    """Goal: one block by itself is not worth a look.

    1. A prompt of nine is offered, and the step that fills the next block is planned: it is looked
    at with seven more. 2. Eight are full, and there was no table when they were looked at: soon.
    3. None is offered together with others: soon.
    """
    tracked = computed_nine()
    tracked.offered = 9
    tracked.dispatched_tokens = 12
    assert tracked.steps_to_next_look(4) == 4 * DECODED_BLOCKS + 1
    assert tracked.steps_to_next_look(4, 1) == 1
    tracked.dispatched_tokens = 8 + 4 * DECODED_BLOCKS
    assert tracked.steps_to_next_look(4) == 1


def test_steps_with_drafts_are_looked_at_when_all_may_have_been_right() -> None:
    """1. A prompt of nine is computed, and its two blocks are offered; each step makes three tokens
    at most: 30 fill eight blocks in ten steps at the earliest. 2. A window's blocks, which the
    step must hold: every step is looked at."""
    tracked = computed_nine()
    tracked.offered = 8
    tracked.scheduled(3, 2)
    assert (tracked.dispatched_tokens, tracked.step_tokens) == (10, 3)
    assert tracked.steps_to_next_look(4) == (2 + 4 * (DECODED_BLOCKS - 1)) // 3 + 1
    assert tracked.steps_to_next_look(4, windows=True) == 1


def test_what_a_request_decodes_is_written_before_it_is_looked_at() -> None:
    """1. Its prompt of nine tokens is computed. 2. Of twelve that there are by now, eleven are."""
    request = Request()
    tracked = admitted(request, 0)
    tracked.scheduled(9)
    assert tracked.written == 9
    request.all_token_ids = tuple(range(12))
    assert tracked.written == 11


def test_what_is_computed_again_is_written_when_it_is_dispatched() -> None:
    """Goal: a load has failed after all tokens were sent out, and vLLM computes from there again.

    1. All nine tokens are dispatched. 2. The load of eight has failed, and a step computes four of
    them: no more is written. 3. The rest is computed, and the request decodes as before.
    """
    request = Request()
    tracked = admitted(request, 8)
    tracked.scheduled(1)
    assert tracked.written == 9
    request.num_computed_tokens = 0
    tracked.scheduled(4)
    assert (tracked.written, tracked.offers_decoded) == (4, False)
    request.begin(4)
    request.end(4)
    tracked.scheduled(5)
    request.all_token_ids = tuple(range(12))
    assert tracked.written == 11


def test_a_refused_request_is_looked_at_as_rarely() -> None:
    tracked = Tracked(Request(), "lora_changed")
    tracked.scheduled(9)
    assert tracked.steps_to_next_look(4) == 4 * DECODED_BLOCKS - 1 + 1


def test_a_lookup_that_waits_asks_with_the_same_names_again() -> None:
    """Two groups, blocks of 4 and of 8 tokens: names of tokens 8 to 16, and later of all of 24."""
    namespace = Namespace(model="m", block_tokens=4)
    window = replace(namespace, group=1, block_tokens=8)
    groups = [KvGroup(Hasher(namespace)), KvGroup(Hasher(window), window_blocks=1)]
    request = Request(all_token_ids=tuple(range(26)))
    tracked = Tracked(request, "")
    asked = tracked.names_between(groups, 8, 16)
    assert asked == (*Hasher(namespace).chain(range(16))[2:], *Hasher(window).chain(range(16))[1:])
    assert tracked.names_between(groups, 8, 16) is asked
    longer = tracked.names_between(groups, 0, 24)
    assert len(longer) == 6 + 3
    assert tracked.names_between(groups, 8, 16) == asked


def test_a_lookup_that_asks_for_all_known_names_copies_none() -> None:
    hasher = Hasher(Namespace(model="m", block_tokens=4))
    tracked = Tracked(Request(), "")
    names = tracked.first_names(hasher, 2)
    assert tracked.first_names(hasher, 2) is names
    assert tracked.first_names(hasher, 1) == names[:1]


def item(offset: int, length: int) -> SimpleNamespace:
    """A multimodal item."""
    place = SimpleNamespace(offset=offset, length=length)
    return SimpleNamespace(identifier="item", mm_position=place)


@pytest.mark.parametrize(
    ("request_", "refusal"),
    [
        (Request(), ""),
        (Request(cache_salt="é"), ""),
        (Request(cache_salt="\ud800"), "no_text"),
        (Request(lora_request=SimpleNamespace(lora_name="\ud800")), "no_text"),
        (Request(mm_features=[SimpleNamespace(identifier="\ud800")]), "no_text"),
        (Request(mm_features=[item(0, 4), item(4, 4)]), ""),
        (Request(mm_features=[item(0, 4), item(3, 4)]), "overlapping_media"),
        (Request(prompt_embeds=[[0.5]]), "prompt_embeds"),
        (SimpleNamespace(prompt_embeds=None, resumable=True), "streaming_input"),
    ],
)
def test_some_requests_have_blocks_without_names(request_: Request, refusal: str) -> None:
    """A prompt without tokens; a salt or name with a lone surrogate, which JSON lets through; two
    items in one token."""
    assert refusal_of_request(request_) == refusal


def test_while_a_load_is_under_way_nothing_is_computed() -> None:
    """1. A step of eight tokens has ended. 2. A load begins: beside the steps, it hides them."""
    request = Request(all_token_ids=tuple(range(13)))
    tracked = admitted(request, 0)
    assert tracked.computed() == 0
    tracked.scheduled(8)
    request.begin(8)
    assert tracked.computed() == 0
    request.end(8)
    assert tracked.computed() == 8
    tracked.lease = 1
    assert tracked.computed() == 0


def test_tokens_in_flight_are_certain_unless_a_step_has_drafts() -> None:
    """Ten tokens are scheduled, the last of them is in flight. Each step is for one token more:
    1. without drafts; 2. with one draft; 3. after a step with drafts; 4. after one without."""
    request = Request(all_token_ids=tuple(range(20)))
    tracked = admitted(request, 9)
    request.begin(1)
    dispatched = []
    for drafts in (0, 1, 0, 0):
        tracked.scheduled(1 + drafts, drafts)
        dispatched.append(tracked.dispatched_tokens)
    assert dispatched == [11, 10, 10, 11]
    tracked.scheduled()
    assert tracked.dispatched_tokens == 10


def test_how_soon_a_request_is_looked_at() -> None:
    """1. Nothing is dispatched: four steps of a token fill a block, and a fifth finds it. 2. The
    same where windows are held: such a step has no drafts. 3. Seven tokens are: a block is to be
    offered when the second next step is planned; where it is held, when the next one fills it.
    4. One draft: steps are looked at, if they may pass a window's margin."""
    request = Request(num_in_flight_tokens=0)
    tracked = Tracked(request, "")
    assert [tracked.steps_to_next_look(4), tracked.steps_to_next_look(4, windows=True)] == [5, 5]
    assert tracked.steps_to_next_look(4, together=0) == 4
    tracked.scheduled(7)
    request.num_in_flight_tokens = 1
    assert [tracked.steps_to_next_look(4, together=count) for count in (8, 0)] == [2, 1]
    tracked.scheduled(2, 1)
    assert tracked.steps_to_next_look(4, windows=True) == 1


def test_steps_that_fill_blocks_unevenly_are_rounded_down() -> None:
    """Each step makes four tokens at most, and 30 are wanted: seven steps may be enough."""
    request = Request(all_token_ids=tuple(range(10)), num_computed_tokens=9)
    tracked = Tracked(request, "")
    tracked.offered = 8
    tracked.scheduled(4, 3)
    assert tracked.steps_to_next_look(4) == 7 + 1


def test_of_what_the_device_had_only_what_the_host_tier_knows_is_left_out() -> None:
    """Three blocks; the device had two and a half. 1. The host tier knows all names, so the third
    is offered. 2. It knows none. 3. The second was loaded."""
    names = Hasher(Namespace(model="m", block_tokens=4)).chain(range(12))
    tracked = Tracked(Request(), "", local=10)
    assert tracked.indices_to_offer(3, names, lambda _name: True, BLOCK) == [2]
    assert tracked.indices_to_offer(3, names, lambda _name: False, BLOCK) == [0, 1, 2]
    tracked.loaded = (4, 8)
    assert tracked.indices_to_offer(3, names, lambda _name: False, BLOCK) == [0, 2]


def test_runs_begin_behind_their_parents() -> None:
    """Blocks 0 and 1, and 3: the root is the parent of the first run."""
    hasher = Hasher(Namespace(model="m", block_tokens=4))
    names = hasher.chain(range(16))
    first, second = runs_to_offer([0, 1, 3], [7, 8, 9, 10], names, hasher.root)
    assert (first.parent, first.hashes, first.blocks) == (hasher.root, tuple(names[:2]), (7, 8))
    assert (second.parent, second.hashes, second.blocks) == (names[2], (names[3],), (10,))


def test_an_offer_takes_the_held_blocks_before_its_end() -> None:
    tracked = Tracked(Request(), "", held={1: {4: 40, 2: 20, 3: 30}, 2: {0: 9}})
    assert tracked.take_held(1, 4) == {2: 20, 3: 30}
    assert tracked.held == {1: {4: 40}, 2: {0: 9}}
    assert tracked.take_held(1, 5) == {4: 40}
    assert tracked.held == {2: {0: 9}}
    assert tracked.take_held(3, 9) == {}
