"""What a back end of NIXL is given."""

from __future__ import annotations

import os
import threading

import pytest
from kvbm_common.nixl.library import NET_DEVICES, network_devices

DEADLINE_S = 5.0


@pytest.mark.parametrize("own", [None, "ib0"])
def test_the_devices_of_an_operator_stay(own: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a value of theirs it is loopback, for so long; with one it is theirs."""
    monkeypatch.delenv(NET_DEVICES, raising=False)
    if own:
        monkeypatch.setenv(NET_DEVICES, own)
    with network_devices("UCX"):
        assert os.environ[NET_DEVICES] == (own or "lo")
    with network_devices("POSIX"):
        assert os.environ.get(NET_DEVICES) == own
    assert os.environ.get(NET_DEVICES) == own


def test_a_second_thread_has_the_devices_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two movers start together: the first one's end takes nothing from the second."""
    monkeypatch.delenv(NET_DEVICES, raising=False)
    first_left, second_came, found = threading.Event(), threading.Event(), list[str | None]()

    def second() -> None:
        second_came.set()
        with network_devices("UCX"):
            assert first_left.wait(DEADLINE_S)
            found.append(os.environ.get(NET_DEVICES))

    thread = threading.Thread(target=second)
    with network_devices("UCX"):
        thread.start()
        assert second_came.wait(DEADLINE_S)
    first_left.set()
    thread.join(DEADLINE_S)
    assert found == ["lo"]
    assert NET_DEVICES not in os.environ
