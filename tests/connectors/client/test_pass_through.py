"""An engine without a cache, towards its consolidator: real ZMQ, the other end does as told."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvbm_common.wire.consolidator import Attach, Detach
from kvbm_common.wire.local import Beat
from kvbm_connectors.client.pass_through import PassThrough
from msgspec.structs import replace

from tests.connectors.endpoints import attached, consolidator
from tests.connectors.helpers import INCARNATION, NAMESPACE

SAID = Attach(
    engine="ada", incarnation=INCARNATION, endpoint="", namespace=NAMESPACE,
    passes_through="prefix caching is off",
)  # fmt: skip


@pytest.mark.slow
def test_the_reason_is_said_and_the_end_too(tmp_path: Path) -> None:
    """1. The consolidator hears the reason. 2. Beats follow. 3. The engine ends, and says so."""
    endpoint = f"ipc://{tmp_path}/consolidator.sock"
    passing = PassThrough(SAID, endpoint)
    passing.start()
    try:
        with consolidator(endpoint) as other:
            assert other.hear(Attach) == SAID
            other.say(attached())
            assert other.hear(Beat).engine == "ada"
            passing.close()
            assert other.hear(Detach) == Detach(engine="ada", incarnation=INCARNATION)
    finally:
        passing.close()


def test_without_a_consolidator_it_ends_all_the_same(tmp_path: Path) -> None:
    """Nobody listens: the engine starts and stops as if it had said it."""
    passing = PassThrough(SAID, f"ipc://{tmp_path}/nobody.sock")
    passing.start()
    passing.close()


@pytest.mark.parametrize("changes", [{"passes_through": ""}, {"endpoint": "ipc://pub"}])
def test_what_it_says_is_a_reason_and_no_stream(changes: dict[str, str], tmp_path: Path) -> None:
    """An engine that is followed, or gives no reason, is a defect of the caller."""
    with pytest.raises(AssertionError, match="passes through"):
        PassThrough(replace(SAID, **changes), f"ipc://{tmp_path}/nobody.sock")
