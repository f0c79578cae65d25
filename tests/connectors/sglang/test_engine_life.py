"""Engine life: the ranks of one engine share it, and no two engines do."""

from __future__ import annotations

import os
import subprocess
import sys
from unittest.mock import patch

import pytest
from kvbm_connectors.sglang import engine_life
from kvbm_connectors.sglang.engine_life import life_of_engine, life_of_weights


def test_processes_of_one_parent_have_the_life_of_an_engine() -> None:
    """Goal: where ranks share one copy, all of them find what the first rank stores. The parent of
    another engine is another process."""
    code = "from kvbm_connectors.sglang.engine_life import life_of_engine as l; print(l().hex())"
    ranks = {subprocess.check_output([sys.executable, "-c", code]) for _ in range(2)}
    other = subprocess.check_output(["sh", "-c", f"{sys.executable} -c '{code}'; true"])
    assert len(ranks) == 1
    assert other not in ranks


def test_engines_of_one_parent_have_lives_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's process begins several: each has the number that SGLang draws for it."""
    lives = []
    for run in ("one", "two", "one"):
        monkeypatch.setenv("SGLANG_RUN_ID", run)
        lives.append(life_of_engine())
    assert lives[0] == lives[2] != lives[1]


def test_an_engine_whose_first_process_is_hidden_has_the_life_of_this_process() -> None:
    with patch.object(os, "getppid", return_value=0):
        assert life_of_engine() == engine_life.LIFE


def test_weights_without_a_run_have_the_life_of_this_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Goal: no parent process stands for weights: that of Ray begins several engines."""
    monkeypatch.delenv("SGLANG_RUN_ID", raising=False)
    own = life_of_weights()
    monkeypatch.setattr(engine_life, "LIFE", bytes(8))
    assert life_of_weights() != own
    monkeypatch.setenv("SGLANG_RUN_ID", "one")
    assert life_of_weights() == life_of_weights() != life_of_weights(replica=1)
