"""Both halves in the engine's order, on real bytes through the real stack.

The executor compares every block that a request looks back on, so that a test that runs through has
shown that no wrong byte was computed on.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
from kvbm_connectors.client import arena_access

from tests.connectors.trtllm.engine import BLOCK_TOKENS
from tests.connectors.trtllm.running import Engine, engine_on, promises_left
from tests.recording import recorded
from tests.vllm.harness import LiveStack, corrupt_arena
from tests.waiting import wait_for

Monkey = pytest.MonkeyPatch


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_was_computed_is_loaded_before_the_next_step(
    stack: LiveStack, monkeypatch: Monkey, ranks: int
) -> None:
    """1. A request of 5 full blocks and 2 tokens, of which one was generated, is computed; its
    blocks are pinned until the host tier has them.
    2. The device forgets. The same prompt: all of its full blocks but what must be computed are
    there when the first step computes.
    3. What one engine has computed another loads.
    """
    with engine_on(stack, monkeypatch, ranks=ranks, overtake=True) as engine:
        first = engine.ask(range(100, 121))
        assert (first.external, engine.count("offload_blocks")) == (0, 5)
        engine.forget()
        again = engine.ask(range(100, 121))
        assert (again.device_hit, again.external) == (0, 20)
        assert engine.counts["computed"] == 21 + 1
        assert engine.side.idle
    with engine_on(stack, monkeypatch, ranks=ranks) as other:
        assert other.ask(range(100, 121)).external == 20
        assert len(promises_left(stack, other)) == 1
    assert promises_left(stack, engine, other) == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_prompts_come_in_chunks(stack: LiveStack, monkeypatch: Monkey, ranks: int) -> None:
    """A prompt that is computed 6 tokens at a time, beside others: the promise is kept in its first
    step, and what it has computed is saved at its end, generated tokens included."""
    with engine_on(stack, monkeypatch, ranks=ranks, chunk_tokens=6) as engine:
        engine.ask(range(200, 213))
        engine.forget()
        requests = [
            engine.request(range(200, 240), 9),
            engine.request([*range(200, 208), *range(300, 320)], 5),
            engine.request(range(400, 410), 3),
        ]
        engine.run(*requests)
        engine.settle()
        assert [request.external for request in requests] == [12, 8, 0]
        engine.forget()
        grown = requests[0].tokens
        assert len(grown) == 49
        assert engine.ask(grown).external == 48  # The last token but one was computed, too.


def test_the_last_token_is_not_computed_yet(stack: LiveStack, monkeypatch: Monkey) -> None:
    """12 tokens, of which the last one was sampled and nobody has computed on it: two blocks."""
    with engine_on(stack, monkeypatch) as engine:
        request = engine.ask(range(900, 910), 2)
        assert len(request.tokens) == 3 * BLOCK_TOKENS
        assert engine.count("offload_blocks") == 2
        engine.forget()
        assert engine.ask([*request.tokens, 1, 2]).external == 8
        engine.forget()
        assert engine.ask(request.tokens).external == 8  # The engine insists on one to compute.


def test_a_cancelled_request_leaves_nothing_behind(stack: LiveStack, monkeypatch: Monkey) -> None:
    """The engine frees a cancelled request without a word.

    1. One is cancelled in the middle of its prompt, one while it generates, one while it waits:
       none of their blocks is ever offered, and all of them are free at once.
    2. Of one that was cancelled, and of which the engine does say something, the part that was not
       computed has no name.
    """
    with engine_on(stack, monkeypatch, chunk_tokens=4) as engine:
        engine.ask(range(500, 509))
        engine.forget()
        halfway = engine.request(range(500, 530), 4)
        generating = engine.request(range(600, 606), 8)
        for _ in range(3):
            engine.step()
        late = engine.request(range(700, 720))
        offered = engine.count("offered_blocks")
        for request in (halfway, generating, late):
            engine.cancel(request)
        engine.step()
        assert halfway.position < halfway.prompt_len
        assert len(generating.tokens) > generating.prompt_len
        assert engine.idle
        assert engine.pool.free_count == engine.pool.block_count
        assert engine.count("offered_blocks") == offered
        assert not engine.leader.request_finished(halfway, halfway.blocks)
        assert engine.count("unfinished_prompts") == 1
        engine.forget()
        assert engine.ask(range(500, 530)).external == 8


def test_blocks_that_are_saved_come_free_without_a_step(
    stack: LiveStack, monkeypatch: Monkey
) -> None:
    """A pool in which one request has room: the next one waits until the first one's blocks are
    saved, in steps in which nobody is scheduled and so no plan is made."""
    with engine_on(stack, monkeypatch, ranks=2, blocks=6) as engine:
        requests = [engine.request(range(n, n + 20)) for n in (1000, 1100, 1200)]
        engine.run(requests[0])
        assert engine.saving
        assert engine.pool.free_count < 6
        engine.run(*requests)
        engine.settle()
        assert engine.count("offload_blocks") == 15


def test_salts_do_not_meet(stack: LiveStack, monkeypatch: Monkey) -> None:
    """The same prompt under another salt is another one; releases up to 1.2 show a digest of it."""
    prompt = range(2000, 2010)
    salts: list[dict[str, Any]] = [
        {}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"cache_salt_id": 7}, {"cache_salt_id": 8},
    ]  # fmt: skip
    with engine_on(stack, monkeypatch) as engine:
        for fields in salts:
            assert engine.ask(prompt, **fields).external == 0
            engine.forget()
        for fields in salts:
            assert engine.ask(prompt, **fields).external == 8
            engine.forget()


def test_blocks_of_low_priority_stay(stack: LiveStack, monkeypatch: Monkey) -> None:
    """`DYN_KVBM_HOST_OFFLOAD_PREFIX_MIN_PRIORITY`: a request's blocks are saved up to the first one
    below it. Without a retention configuration all have TensorRT-LLM's default, 35."""
    variables = {"DYN_KVBM_HOST_OFFLOAD_PREFIX_MIN_PRIORITY": "36"}
    with engine_on(stack, monkeypatch, variables=variables) as engine:
        ranked, plain = range(3000, 3020), range(3100, 3120)
        engine.ask(ranked, priorities=[90, 36, 35, 90, 90])
        engine.ask(plain)
        engine.forget()
        assert engine.ask(ranked).external == 8
        assert engine.ask(plain).external == 0
        assert engine.count("priority_skipped_blocks") == 3 + 5 + 5 + 5


def test_requests_without_names_pass_through(stack: LiveStack, monkeypatch: Monkey) -> None:
    """A LoRA's number means another adapter in the next engine; a picture is not in the tokens."""
    with engine_on(stack, monkeypatch) as engine:
        for _ in range(2):
            assert engine.ask(range(4000, 4010), lora_task_id=0).external == 0
            assert engine.ask(range(4000, 4010), multimodal_positions=[2]).external == 0
            engine.forget()
        assert engine.count("requests_refused.lora") == 2
        assert engine.count("requests_refused.multimodal") == 2
        assert engine.count("offered_blocks") == 0


def test_a_match_inside_a_block_is_left_to_the_engine(
    stack: LiveStack, monkeypatch: Monkey
) -> None:
    """Partial reuse is refused at the start; should the engine do it all the same, no promise."""
    with engine_on(stack, monkeypatch) as engine:
        request = engine.ask(range(4200, 4210))
        assert engine.leader.get_num_new_matched_tokens(request, 3) == (0, False)
        assert engine.count("partial_matches") == 1
        assert not engine.leader.request_finished(request, [])


def test_a_promise_has_its_room(stack: LiveStack, monkeypatch: Monkey) -> None:
    """A hit that is larger than the memory for promises is cut, and computed from there on."""
    with engine_on(stack, monkeypatch, variables={"KVBM_PROMISE_GB": "2e-6"}) as engine:
        engine.ask(range(5000, 5050))
        engine.forget()
        request = engine.ask(range(5000, 5050))
        assert request.external == 7 * BLOCK_TOKENS
        assert engine.count("promises_cut_blocks") == 5


def test_rotten_blocks_are_not_promised(stack: LiveStack, monkeypatch: Monkey) -> None:
    """1. Somebody writes over the arena. 2. Nothing of it is promised; the engine computes. 3. The
    host tier has discarded what was bad, and takes the same blocks anew."""
    with engine_on(stack, monkeypatch) as engine:
        engine.ask(range(6000, 6020))
        engine.forget()
        corrupt_arena(stack.settings)
        assert engine.ask(range(6000, 6020)).external == 0
        assert engine.count("promises_lost.corrupt") == 1


def test_a_promise_waits_for_its_request(stack: LiveStack, monkeypatch: Monkey) -> None:
    """The V2 manager asks long before it schedules, and may take less than it was promised.

    1. Between question and first step others come and go, and every lease ends: the load is right.
    2. Of five blocks two are taken; in the third, of which a part is taken, the rest is computed.
    3. One is cancelled while it waits, one begins anew: their places are free again.
    """
    variables = {"KVBM_LEASE_MS": "100", "KVBM_ONBOARD_DEADLINE_MS": "100"}
    with engine_on(stack, monkeypatch, variables=variables) as engine:
        keeper, prompt = engine.keeper, range(9000, 9021)
        engine.ask(prompt)
        engine.forget()
        waits = engine.request(prompt, deferred=3)
        engine.run(engine.request(range(9100, 9110), 3))
        until_ms = time.monotonic() * 1000 + 2 * int(variables["KVBM_LEASE_MS"])
        wait_for(lambda: time.monotonic() * 1000 > until_ms, "the lease")
        engine.run(waits)
        engine.settle()
        assert waits.external == 20
        for honoured in (8, 10):
            engine.forget()
            assert engine.ask(prompt, honoured=honoured, deferred=1).external == honoured
        engine.forget()
        gone, again = (engine.request(prompt, deferred=9) for _ in range(2))
        engine.step()
        assert keeper.promised == 10
        engine.cancel(gone)
        engine.leader.request_reset(again)
        engine.step()
        assert keeper.promised == 0
        assert engine.leader.get_num_new_matched_tokens(again, 0) == (20, False)
        engine.run(again)
        engine.settle()


def test_the_device_overtakes_the_beginning_of_a_promise(
    stack: LiveStack, monkeypatch: Monkey
) -> None:
    """With `aggressive_prefix_budgeting` the engine gives back the beginning of an offer, and still
    counts on the rest.

    1. A prompt is promised five blocks and waits; another one computes the first three of them.
    2. The engine takes those, gives them back, and loads the other two: their bytes are right.
    """
    with engine_on(stack, monkeypatch, rematch=True) as engine:
        prompt = range(9300, 9321)
        engine.ask(prompt)
        engine.forget()
        waits = engine.request(prompt, deferred=3)
        engine.step()
        assert (waits.external, engine.keeper.promised) == (20, 5)
        engine.run(engine.request(range(9300, 9313)))
        engine.run(waits)
        engine.settle()
        assert (waits.device_hit, waits.external) == (12, 8)
        engine.ask(range(9400, 9405))
        assert engine.keeper.promised == 0


@pytest.mark.slow
def test_a_promise_outlives_the_host_tier(stack: LiveStack, monkeypatch: Monkey) -> None:
    """1. The host tier is killed when the engine has been told of a hit, and before it loads.
    2. The load is there all the same. 3. Engine and host tier find together again."""

    def killed_meanwhile(engine: Engine) -> None:
        allocated = engine.leader.update_state_after_alloc

        def kill(request: object, blocks: list[int]) -> None:
            stack.kill("host-tier")
            allocated(request, blocks)

        monkeypatch.setattr(engine.leader, "update_state_after_alloc", kill)

    with engine_on(stack, monkeypatch) as engine:
        engine.ask(range(7000, 7020))
        engine.forget()
        killed_meanwhile(engine)
        request = engine.request(range(7000, 7020))
        engine.run(request)
        assert request.external == 16
        stack.start("host-tier")
        monkeypatch.undo()
        engine.settle()
        half = engine.half
        wait_for(lambda: half.welcome is not None and half.welcome.epoch == half.epoch, "epoch")
        engine.forget()
        engine.ask(range(7000, 7020))
        engine.forget()
        assert engine.ask(range(7000, 7020)).external == 16


def test_an_engine_opens_no_connection_to_the_host_tier(
    stack: LiveStack, monkeypatch: Monkey
) -> None:
    """Its workers lend their memory, and read promises. UCX ended the engine's process where the
    host tier died while both were connecting to each other."""
    reached = recorded(monkeypatch, arena_access, "reader_of")
    with engine_on(stack, monkeypatch, ranks=2) as engine:
        engine.ask(range(9500, 9520))
        engine.forget()
        assert engine.ask(range(9500, 9520)).external == 16
    assert not reached


@pytest.mark.slow
def test_an_engine_without_a_host_tier_computes(stack: LiveStack, monkeypatch: Monkey) -> None:
    """Nobody listens where it was told to look: every request is computed, and nothing is held.
    After a while the log says so."""
    variables = {
        "KVBM_HOST_TIER_ENDPOINT": f"ipc://{stack.settings.runtime_dir}/nobody",
        "DYN_KVBM_LEADER_WORKER_INIT_TIMEOUT_SECS": "1",
    }
    with engine_on(stack, monkeypatch, variables=variables, wait=False) as engine:
        assert engine.ask(range(8000, 8020)).external == 0
        assert not engine.saving
        assert engine.count("lookups_passed_through") == 1
        wait_for(lambda: engine.count("init_timeouts") == 1, "nobody says that they have not met")
