"""SGLang's own publisher through the consolidator: the index knows what its device holds."""

from __future__ import annotations

import json
from functools import partial

import pytest
from kvbm_common.identity import Hasher, request_extras
from kvbm_common.runtime.processes import free_port

from tests.sglang.conftest import StartRank
from tests.sglang.conversation import Prompt
from tests.sglang.harness import RankProcess
from tests.vllm.harness import LiveStack, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def test_device_blocks_reach_the_index(stack: LiveStack, rank: RankProcess) -> None:
    """1. Eight blocks are stored on the device, hashes signed. 2. SGLang says the same of its own
    host memory: it is not ours to announce. 3. The last block leaves the device."""
    config = {"publisher": "zmq", "endpoint": f"tcp://*:{free_port()}",
              "replay_endpoint": f"tcp://*:{free_port()}"}  # fmt: skip
    rank.attach(stack.settings, arguments={"kv_events_config": json.dumps(config)})
    tokens = list(range(8 * 16))

    def device_blocks() -> int:
        found = stack.indexed()
        return sum(len(names) for source, names in found.items() if source.startswith("sglang-"))

    def holds(expected: int) -> bool:
        return device_blocks() == expected

    for events, expected in ((1, 8), (2, 8), (3, 7)):
        signs = rank.ask("publish", extra=config, seeds=tokens, rounds=events).flags
        assert True in signs
        assert False in signs
        wait_for(partial(holds, expected), f"not {expected}", details=lambda: str(stack.indexed()))
    rank.ask("detach")
    wait_for(lambda: device_blocks() == 0, "still there")


TOKENS = list(range(100, 100 + 4 * 16))


def test_an_extra_key_sets_blocks_apart(stack: LiveStack, start: StartRank) -> None:
    """Goal: a router is not pointed to an engine for pages that only another tenant can use.

    1. SGLang's own tree caches a prompt for two tenants, by extra keys. 2. Under the names that
    the prompt has by its tokens nothing is held, and each tenant has blocks of its own. 3. The same
    prompt without a key, with a salt and with an adapter: all are held under the names that a
    router asks for.
    """
    rank = start()
    config = {"publisher": "zmq", "endpoint": f"tcp://*:{free_port()}", "format": "dynamo",
              "replay_endpoint": f"tcp://*:{free_port()}"}  # fmt: skip
    rank.attach(stack.settings, arguments={"kv_events_config": json.dumps(config)})
    (worker,) = stack.call(stack.view.stats("host-tier")).workers
    hasher = Hasher(worker.namespace)
    asked = [
        {block.hex() for block in hasher.chain(TOKENS, extras=request_extras(**fields))}
        for fields in ({}, {"salt": "s"}, {"lora": "poet"})
    ]

    def device_blocks() -> set[str]:
        found = stack.indexed()
        return set().union(*(found[source] for source in found if source.startswith("sglang-")))

    def cache(*prompts: Prompt) -> None:
        expected = len(device_blocks()) + 4 * len(prompts)
        rank.ask("cache", extra=config, prompts=list(prompts))
        wait_for(lambda: len(device_blocks()) == expected, f"{expected} blocks are not held",
                 details=lambda: str(stack.indexed()))  # fmt: skip

    dropped = stack.figures("consolidator")["dropped"]
    cache(
        Prompt(tokens=TOKENS, extra_key="A"),
        Prompt(tokens=TOKENS, extra_key="B"),
        Prompt(tokens=TOKENS, extra_key="A", salt="s"),
    )
    assert device_blocks().isdisjoint(set().union(*asked))
    assert stack.figures("consolidator")["dropped"] == dropped + 12
    cache(
        Prompt(tokens=TOKENS),
        Prompt(tokens=TOKENS, salt="s"),
        Prompt(tokens=TOKENS, is_poet=True),
    )
    assert set().union(*asked) <= device_blocks()
    rank.ask("detach")


def test_keys_of_elastic_parallelism_are_not_looked_at(stack: LiveStack, start: StartRank) -> None:
    """Goal: where SGLang gives every request a key of its own, routers find them all the same."""
    rank = start()
    config = {"publisher": "zmq", "endpoint": f"tcp://*:{free_port()}", "format": "dynamo",
              "replay_endpoint": f"tcp://*:{free_port()}"}  # fmt: skip
    rank.attach(stack.settings, arguments={
        "kv_events_config": json.dumps(config), "elastic_ep_backend": "mooncake",
    })  # fmt: skip
    (worker,) = stack.call(stack.view.stats("host-tier")).workers
    wanted = {block.hex() for block in Hasher(worker.namespace).chain(TOKENS)}
    rank.ask("cache", extra=config, prompts=[Prompt(tokens=TOKENS, extra_key="elastic_ep_size=8")])

    def device_blocks() -> set[str]:
        found = stack.indexed()
        return set().union(*(found[source] for source in found if source.startswith("sglang-")))

    wait_for(lambda: device_blocks() == wanted, "they have other names",
             details=lambda: str(stack.indexed()))  # fmt: skip
    rank.ask("detach")


@pytest.mark.parametrize("bind", [None, True])
@pytest.mark.parametrize("host", ["*", "0.0.0.0", "127.0.0.1"])
def test_sglang_s_own_endpoint_is_followed(rank: RankProcess, host: str, bind: bool | None) -> None:
    """SGLang binds some endpoints and connects to others, where nothing of it can be followed."""
    config = {"publisher": "zmq", "endpoint": f"tcp://{host}:{free_port()}", "bind": bind}
    assert rank.ask("follow", extra=config).flags == [True]
