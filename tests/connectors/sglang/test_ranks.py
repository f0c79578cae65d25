"""Ranks: which of them is followed, under which number, and which pools they cannot have."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kvbm_common.wire.consolidator import Attach as Attached
from kvbm_connectors.sglang import storage as storage_module
from kvbm_connectors.sglang.options import Options, Stream
from kvbm_connectors.sglang.storage import Storage

from tests.connectors.sglang.conftest import Attach
from tests.connectors.sglang.pool import Config, Pool, Transfer, keys_of

STREAM = Stream(endpoint="tcp://127.0.0.1:5557")


@pytest.fixture
def attached(monkeypatch: pytest.MonkeyPatch) -> list[Attached]:
    """What storages say of their streams."""
    said: list[Attached] = []

    def attach(**fields: object) -> Attached:
        said.append(Attached(**fields))  # type: ignore[arg-type]
        return said[-1]

    monkeypatch.setattr(storage_module, "Attach", attach)
    return said


def say(config: Config, replica: int | None = None) -> None:
    """Register a pool, with a stream for who follows it."""
    options = {"interface_v1": 1}
    storage = Storage(
        replace(config, extra_config=options), Options.read(options, {}), STREAM, replica=replica
    )
    storage.register(Pool(), "kv")
    storage.close()


def test_one_rank_of_a_replica_is_followed(attached: list[Attached]) -> None:
    """Goal: an engine is one holder. SGLang publishes on the first rank of each kind alone."""
    for config in (
        Config(tp_size=2),
        Config(tp_size=2, tp_rank=1),
        Config(pp_size=2, pp_rank=1),
        Config(attn_cp_size=2, attn_cp_rank=1),
    ):
        say(config)
    assert [one.endpoint for one in attached] == [STREAM.endpoint, "", "", ""]


def test_replicas_have_numbers_of_their_own(attached: list[Attached]) -> None:
    """Goal: without DP attention, where SGLang's configuration of a storage says 0 in each."""
    say(Config(), replica=1)
    say(Config(dp_rank=2))
    assert [one.rank for one in attached] == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_draft_that_could_not_be_restored_passes_through(
    attach: Attach, caplog: pytest.LogCaptureFixture, rank: int
) -> None:
    """No rank stores for nothing, and the log says why."""
    config = Config(is_mla_model=True, tp_rank=rank, tp_size=2)
    pool, draft = Pool(mla=True), Pool()
    storage = attach(pool, config, draft=draft)
    keys = keys_of("draft", 2)
    assert storage.set(keys, pool.indices([0, 1]), None) == [False, False]
    assert storage.exists_in_all(keys, [Transfer("draft", keys)]).pages == 0
    assert storage.all_counts() == {"refused.set": 1, "refused.exists": 1}
    assert "passes through: pool 'draft' is cut by heads beside latent attention" in caplog.text
