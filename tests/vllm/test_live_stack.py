"""The stack that engines of these tests attach to."""

from __future__ import annotations

import os
import signal
import threading

import pytest
from kvbm_cli.demo import check

from tests.vllm.harness import live_stack
from tests.waiting import stop_child

QUESTION_S = 0.3


@pytest.mark.slow
def test_a_service_that_is_late_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a test does not fail because a service had no processor while it was asked.

    1. The host tier is stopped for longer than a question waits.
    2. Its life and its figures are there all the same, when it goes on.
    """
    with live_stack({"cpu_cache_gb": 0.01}, ("host-tier",)) as stack:
        epoch = stack.epoch("host-tier")
        monkeypatch.setattr(check, "VERB_DEADLINE_S", QUESTION_S)
        pid = stack.stack.pids["host-tier"]
        stop_child(pid)
        later = threading.Timer(3 * QUESTION_S, os.kill, (pid, signal.SIGCONT))
        later.start()
        assert stack.epoch("host-tier") == epoch
        assert stack.figures("host-tier")
        later.join()
