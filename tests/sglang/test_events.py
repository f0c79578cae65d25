"""SGLang's own publisher through the consolidator: the index knows what its device holds."""

from __future__ import annotations

import json
from functools import partial

import pytest
from kvbm_common.runtime.processes import free_port

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


@pytest.mark.parametrize("bind", [None, True])
@pytest.mark.parametrize("host", ["*", "0.0.0.0", "127.0.0.1"])
def test_sglang_s_own_endpoint_is_followed(rank: RankProcess, host: str, bind: bool | None) -> None:
    """SGLang binds some endpoints and connects to others, where nothing of it can be followed."""
    config = {"publisher": "zmq", "endpoint": f"tcp://{host}:{free_port()}", "bind": bind}
    assert rank.ask("follow", extra=config).flags == [True]
